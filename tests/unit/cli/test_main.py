from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from tknp import __version__
from tknp.cli.main import COMMANDS, main
from tknp.cli.output import printable, seconds_text, size_text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {command}")


def test_version_and_unknown_commands() -> None:
    assert __version__ in CliRunner().invoke(main, ["--version"]).stdout
    assert CliRunner().invoke(main, ["levitate"]).exit_code == 2


def test_the_command_line_imports_no_engine() -> None:
    code = (
        "import sys, importlib; from tknp.cli.main import COMMANDS\n"
        "[importlib.import_module('tknp.cli.' + name) for name in COMMANDS]\n"
        "print({'torch', 'numpy', 'transformers', 'gguf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_units_are_readable() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 100 * 2**20, 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "100 MiB", "1024 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (None, 0.0123, 1.5)] == ["-", "12.3 ms", "1.50 s"]


def test_model_text_can_not_drive_a_terminal() -> None:
    assert printable("a\x1b[2J\tb\n\x07\x9bé漢") == "a[2J\tb\né漢"
