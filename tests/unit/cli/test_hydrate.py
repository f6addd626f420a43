"""A checkpoint is copied once, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tknp.cli.hydrate import MARKER, hydrate
from tknp.cli.main import main
from tknp.errors import InvalidValue


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = tmp_path / "store" / "model"
    (made / "sub").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "sub" / "weights").write_bytes(b"w" * 1000)
    return made


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume"


def test_all_objects_come_and_the_marker_last(store: Path, volume: Path) -> None:
    uri = f"file://{store}"
    (volume / ".incoming").mkdir()
    (volume / ".incoming" / "half").write_text("of an earlier try")
    assert hydrate(uri, volume)
    found = {str(p.relative_to(volume)) for p in volume.rglob("*") if p.is_file()}
    assert found == {"config.json", "sub/weights", MARKER}
    assert (volume / MARKER).read_text() == uri
    (store / "config.json").write_text("changed")
    assert not hydrate(uri, volume)
    assert (volume / "config.json").read_text() == "{}"


def test_another_model_takes_its_place(store: Path, volume: Path) -> None:
    assert hydrate(f"file://{store}", volume)
    (volume / MARKER).write_text("s3://another")
    (store / "config.json").write_text("new")
    assert hydrate(f"file://{store}", volume)
    assert (volume / "config.json").read_text() == "new"


@pytest.mark.parametrize("uri", ["file:///not/there", "nonsense://a/b"])
def test_what_is_not_there_is_said(volume: Path, uri: str) -> None:
    with pytest.raises(InvalidValue, match="uri="):
        hydrate(uri, volume)
    assert not (volume / MARKER).exists()


def test_the_command_says_what_it_did(store: Path, volume: Path) -> None:
    done = CliRunner().invoke(main, ["hydrate", f"file://{store}", str(volume)])
    assert done.exit_code == 0, done.output
    assert "copied" in done.output
