"""The pool file: it is read back as written, and so are its sizes and addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.config import (
    NodeConfig,
    PoolConfig,
    PrefillConfig,
    check_address,
    parse_bytes,
    pool_from,
    read_pool,
    write_pool,
)
from tknp.errors import InvalidValue

# --- round trip --------------------------------------------------------------------------------

ports = st.integers(1, 65535)
addresses = st.builds("{}:{}".format, st.sampled_from(["10.0.0.1", "node-3.pool", "[::1]"]), ports)
counts = st.integers(1, 10**12)
SECURITY = ("tls_cert", "tls_key", "tls_ca", "token_file", "api_token_file")


@st.composite
def pools(draw: st.DrawFn) -> PoolConfig:
    tp = draw(st.integers(1, 3))
    sized = draw(st.booleans())
    text = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12)

    def ranks(count: int) -> tuple[str, ...]:
        return tuple(draw(st.lists(addresses, min_size=count, max_size=count)))

    return PoolConfig(
        model=draw(text.filter(bool)),
        coordinator=draw(addresses),
        data_plane=draw(addresses),
        nodes=tuple(
            NodeConfig(
                ranks(tp),
                draw(st.sampled_from(["decode-node", "decode-root", "attention-owner"])),
                draw(counts) if sized else None,
                ranks(draw(st.sampled_from([0, tp]))),
            )
            for _ in range(draw(st.integers(1, 3)))
        ),
        prefill=tuple(
            PrefillConfig(
                ranks(count),
                draw(addresses) if count > 1 else "",
                ranks(draw(st.sampled_from([0, count]))),
            )
            for count in draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
        ),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        kv_memory_bytes=draw(st.none() | counts),
        max_model_len=draw(st.none() | counts),
        page_size=draw(st.none() | counts),
        kv_transfer=draw(st.sampled_from(["auto", "nixl", "grpc"])),
        timeout_s=draw(st.floats(1e-3, 1e6)),
        lease_s=draw(st.floats(1e-3, 3600)),
        epoch=draw(counts),
        strategy=draw(st.sampled_from(["tknp", "dp", "tp", "pp", "dcp", "helix"])),
        copies=draw(st.sampled_from([1, 2])),
        microbatches=draw(st.none() | counts),
        width=draw(st.none() | counts),
        reserve_ratio=draw(st.floats(0, 1)),
        interface=draw(text),
        insecure=True,
        **draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(SECURITY, text.filter(bool)))),
    )


@settings(max_examples=40, deadline=None)
@given(pool=pools())
def test_written_pool_is_read_back(
    pool: PoolConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "pool.yaml"
    write_pool(pool, path)
    assert read_pool(path) == pool


def test_synthetic_kv_needs_no_prefill(minimal: dict[str, Any]) -> None:
    assert pool_from({**minimal, "prefill": [], "synthetic_kv": True}).prefill == ()


def test_file_is_plain_yaml_without_unset_values(minimal: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    write_pool(pool_from(minimal), path)
    plain = yaml.safe_load(path.read_text())
    assert plain["nodes"][1]["addresses"] == ["127.0.0.1:7200"]
    assert "page_size" not in plain
    assert "memory_bytes" not in plain["nodes"][0]


def test_null_means_unset(minimal: dict[str, Any]) -> None:
    assert pool_from({**minimal, "max_batch": None, "timeout_s": None}) == pool_from(minimal)


def test_json_is_read(minimal: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(minimal))
    assert read_pool(path) == pool_from(minimal)


def test_defaults(minimal: dict[str, Any]) -> None:
    pool = pool_from(minimal)
    assert pool.tp == 1
    assert pool.dtype == "bfloat16"
    assert pool.nodes[0].role == "decode-node"
    assert pool.tokens_per_page == 64
    assert pool_from({**minimal, "device": "cuda"}).tokens_per_page == 256
    assert pool_from({**minimal, "device": "cuda", "page_size": 16}).tokens_per_page == 16


def test_metrics_addresses_of_ranks(minimal: dict[str, Any]) -> None:
    node = {"addresses": ["a:1", "a:2"], "metrics_addresses": ["127.0.0.1:3", "127.0.0.1:4"]}
    replica = {"addresses": ["a:1"], "metrics_addresses": ["127.0.0.1:5"]}
    pool = pool_from({**minimal, "nodes": [node], "prefill": [replica], "insecure": True})
    assert [pool.nodes[0].metrics_address(t) for t in range(2)] == ["127.0.0.1:3", "127.0.0.1:4"]
    assert pool.prefill[0].metrics_address(0) == "127.0.0.1:5"
    without = pool_from(minimal)
    assert without.metrics_address == ""
    assert without.nodes[0].metrics_address(0) == ""
    assert without.prefill[0].metrics_address(0) == ""


def test_sizes_are_parsed_wherever_bytes_are_asked_for(minimal: dict[str, Any]) -> None:
    nodes = [{**node, "memory_bytes": "2GiB"} for node in minimal["nodes"]]
    pool = pool_from({**minimal, "nodes": nodes, "kv_memory_bytes": "512MiB"})
    assert pool.kv_memory_bytes == 512 * 2**20
    assert {node.memory_bytes for node in pool.nodes} == {2 * 2**30}


def test_overrides_win_where_they_are_set(minimal: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    write_pool(pool_from({**minimal, "max_batch": 8, "max_queue": 9}), path)
    pool = read_pool(path, {"max_batch": 16, "max_queue": None, "kv_memory_bytes": "1GiB"})
    assert (pool.max_batch, pool.max_queue, pool.kv_memory_bytes) == (16, 9, 2**30)


# --- sizes and addresses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (1, 1),
        ("1", 1),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("512Mi", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("3k", 3_000),
        ("3KiB", 3_072),
        ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40),
        ("1T", 10**12),
        ("7b", 7),
        (" 4 GB ", 4 * 10**9),
        (2**50, 2**50),
    ],
)
def test_sizes(text: str | int, value: int) -> None:
    assert parse_bytes("memory", text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "2XB",
        "2iB",
        "-1GB",
        "1e9",
        "1,5GB",
        "2 G B",
        "1.GB",
        "nan",
        "0",
        "0.1",
        0,
        -5,
        True,
    ],
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(InvalidValue, match=r"512MiB|at least one byte") as error:
        parse_bytes("kv_memory_bytes", text)
    assert error.value.field == "kv_memory_bytes"
    assert error.value.value == text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "host:65535", "[::1]:8080", "a.b-c:80"])
def test_addresses(address: str) -> None:
    assert check_address("coordinator", address) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:http", "host:²", "80"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidValue, match=r"HOST:PORT with a port in 1\.\.65535") as error:
        check_address("coordinator", address)
    assert error.value.field == "coordinator"
