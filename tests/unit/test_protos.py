"""The checked-in code of services/tknp/v1 is what its .proto files give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN_BY_HAND = {"__init__.py"}


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    # A process of its own: the compiler brings a protobuf library that crashes beside torch.
    script = ROOT / "protos" / "generate.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)

    fresh = _files(tmp_path / "tknp" / "v1")
    checked_in = _files(ROOT / "services" / "tknp" / "v1")
    assert sorted(checked_in) == sorted([*fresh, *WRITTEN_BY_HAND])
    stale = [name for name, code in fresh.items() if checked_in[name] != code]
    assert not stale, "run `make protos` and commit what it writes"


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".py", ".pyi")}
