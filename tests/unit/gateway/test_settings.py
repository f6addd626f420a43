"""Settings are refused where they are wrong, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tknp.errors import InvalidValue
from tknp.gateway.settings import GatewaySettings, read_settings, settings_from, settings_from_text

POOL = "127.0.0.1:50051"


def test_defaults_are_closed() -> None:
    settings = settings_from({"pools": [POOL]})
    assert settings == GatewaySettings(pools=(POOL,))
    assert (settings.http_host, settings.grpc_port) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"pools": []}, "pools"),
        ({"pools": POOL}, "pools"),
        ({"pools": ["nowhere"]}, "pools[0]"),
        ({"pools": [POOL, 5]}, "pools[1]"),
        ({"pools": ["dns:host"]}, "pools[0]"),
        ({"http_port": 0}, "http_port"),
        ({"http_port": "8000"}, "http_port"),
        ({"http_host": ""}, "http_host"),
        ({"http_host": "0.0.0.0"}, "http_host"),
        ({"http_host": "0.0.0.0", "keys_file": "keys"}, "http_host"),
        ({"grpc_port": 8000}, "grpc_port"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": 5}, "max_replicas"),
        ({"replays": -1}, "replays"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"replay_wait_s": True}, "replay_wait_s"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"http_cert": "cert"}, "http_cert"),
        ({"http_client_ca": "ca"}, "http_client_ca"),
        ({"pool": POOL}, "pool"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        settings_from({"pools": [POOL], **values})
    assert raised.value.field == field


def test_open_ports_have_to_be_said() -> None:
    tls = {"keys_file": "keys", "http_cert": "cert", "http_key": "key"}
    assert settings_from({"pools": [POOL], "http_host": "0.0.0.0", **tls}).keys_file == "keys"
    opened = settings_from({"pools": [POOL], "http_host": "0.0.0.0", "insecure": True})
    assert opened.keys_file is None


def test_a_file_and_what_a_command_line_says(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pools: [dns:pools.local:50051]\nreplays: 0\nhttp_port: 8080\n")
    assert read_settings(path).pools == ("dns:pools.local:50051",)
    args = {"settings": str(path), "http_port": "8081", "insecure": "true", "timeout_s": "1.5"}
    settings = settings_from_text(args)
    assert (settings.http_port, settings.insecure, settings.replays) == (8081, True, 0)
    assert settings.timeout_s == 1.5
    assert settings_from_text({"pools": f"{POOL},dns:b:1"}).pools == (POOL, "dns:b:1")
    path.write_text("- pools")
    with pytest.raises(InvalidValue, match="mapping"):
        read_settings(path)
    with pytest.raises(InvalidValue, match="cannot be read"):
        read_settings(tmp_path / "absent")
