"""What importing a module loads, seen in a fresh process.

Layers are import-linter's (pyproject.toml). It reads imports; this runs them, lazy ones apart, so
that bookkeeping, planning and clients start without torch: on a coordinator, in a shell.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOAD = """
import importlib, pkgutil, sys
heavy = {"torch", "transformers"}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    inner = pkgutil.walk_packages(getattr(module, "__path__", ()), name + ".")
    for name in [name, *(found.name for found in inner)]:
        importlib.import_module(name)
        if loaded := heavy.intersection(sys.modules):
            sys.exit(f"{name} loads {sorted(loaded)}")
"""


def load(*modules: str) -> str:
    """Import modules, and all of packages, in order; return which one loads too much, if any."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD, *modules], capture_output=True, text=True, timeout=60
    )
    return run.stderr.strip()


def test_light_modules_load_neither_torch_nor_transformers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    assert load(*contracts["light"]["source_modules"]) == ""


def test_the_command_line_starts_light() -> None:
    assert load("tknp.cli.main") == ""


def test_what_is_heavy_is_noticed() -> None:
    assert load("tknp.kv.size", "tknp.kv.storage") == "tknp.kv.storage loads ['torch']"
