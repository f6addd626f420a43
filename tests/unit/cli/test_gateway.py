"""`tknp gateway` refuses what it can't serve before Ray is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tknp.cli.main import main

POOL = ("--pool-target", "127.0.0.1:50051")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pools"),
        (("--pool-target", "nowhere"), "pools[0]"),
        ((*POOL, "--http-host", "0.0.0.0"), "http_host"),
        ((*POOL, "--grpc-port", "8000"), "grpc_port"),
        ((*POOL, "--min-replicas", "9"), "max_replicas"),
        ((*POOL, "--settings", "absent.yaml"), "settings"),
        ((*POOL, "--http-cert", "absent.pem", "--http-key", "absent.key"), "http_cert"),
    ],
)
def test_bad_settings_are_named(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["gateway", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pools: [127.0.0.1:50051]\nhttp_host: 0.0.0.0\n")
    result = CliRunner().invoke(
        main, ["gateway", "--settings", str(path), "--http-host", "10.0.0.1"]
    )
    assert result.exit_code == 2
    assert "http_host='10.0.0.1'" in result.stderr
