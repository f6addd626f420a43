from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tknp.cli.local_pool import LocalPool, check, commands, cores, target_of
from tknp.cli.ports import check_free, free_ports, highest_safe_port
from tknp.config import read_pool, write_pool
from tknp.errors import CheckpointError, InvalidValue
from tknp.pool import open_pool


@pytest.fixture
def local(random_checkpoint: Callable[..., Path]) -> LocalPool:
    model = str(random_checkpoint(layers=4, q_heads=8, kv_heads=2))
    return LocalPool(model, nodes=2, tp=2, prefill=1, prefill_tp=2, host="127.0.0.1", port=0)


def test_a_pool_has_distinct_loopback_addresses_and_defaults(
    local: LocalPool, tmp_path: Path
) -> None:
    pool = local.configure()
    addresses = [pool.coordinator, pool.data_plane, pool.prefill[0].data_plane]
    for group in (*pool.nodes, *pool.prefill):
        assert len(group.addresses) == 2
        addresses += group.addresses
    assert len(set(addresses)) == 9
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert pool.kv_memory_bytes == 512 * 2**20
    write_pool(pool, tmp_path / "pool.yaml")
    assert read_pool(tmp_path / "pool.yaml") == pool


def test_unequal_memories_replace_the_kv_budget(local: LocalPool) -> None:
    pool = replace(local, memories=(3, 4)).configure()
    assert [node.memory_bytes for node in pool.nodes] == [3, 4]
    assert pool.kv_memory_bytes is None
    with pytest.raises(InvalidValue, match="one size for each of 2"):
        replace(local, memories=(3,)).configure()
    with pytest.raises(InvalidValue, match="not both"):
        replace(local, memories=(3, 4), settings={"kv_memory_bytes": 5}).configure()


@pytest.mark.parametrize(
    ("kvp", "settings", "grid", "streams"),
    [
        (None, {}, (2, 2), 1),
        (None, {"copies": 2}, (2, 2), 2),
        (None, {"strategy": "dp"}, (2, 2), 2),
        (None, {"strategy": "pp"}, (2, 2), 2),
        (None, {"strategy": "pp", "microbatches": 1}, (2, 2), 1),
        (None, {"strategy": "tp"}, (1, 4), 1),
        (4, {"strategy": "helix", "overlap": 4}, (4, 1), 1),
    ],
)
def test_a_strategy_groups_the_ranks(
    kvp: int | None,
    settings: dict[str, Any],
    grid: tuple[int, int],
    streams: int,
    local: LocalPool,
) -> None:
    pool = replace(local, kvp=kvp, settings=settings).configure()
    assert (len(pool.nodes), pool.tp) == grid
    assert {name: getattr(pool, name) for name in settings} == settings
    layout = open_pool(pool).layout
    assert (layout.nodes, layout.tp, layout.streams, layout.domain_ranks) == (*grid, streams, 2)


def test_what_a_strategy_can_not_be_is_refused_by_the_flags_name(local: LocalPool) -> None:
    for change, message in (
        ({"settings": {"strategy": "dp", "copies": 2}}, "copies=2: dp has no copies"),
        ({"kvp": 2}, "kvp=2: tknp has no kvp"),
        ({"nodes": 3, "settings": {"copies": 2}}, "copies=2: block b has its second root"),
        ({"kvp": 4, "memories": (10**8, 10**9), "settings": {"strategy": "helix"}},
         "memory=(100000000, 1000000000): give equal sizes"),
    ):  # fmt: skip
        with pytest.raises(InvalidValue, match=f"^{re.escape(message)}"):
            replace(local, **change).configure()  # type: ignore[arg-type]


def test_a_taken_port_is_refused(local: LocalPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValue, match=f"port={port}: can't listen on 127.0.0.1"):
            replace(local, port=port).configure()
    assert check_free("port", "127.0.0.1", port) == port


def test_free_ports_avoid_those_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) <= highest_safe_port()


def test_clients_reach_a_coordinator_that_listens_everywhere(local: LocalPool) -> None:
    pool = local.configure()
    assert target_of(pool) == pool.coordinator
    everywhere = replace(pool, coordinator="0.0.0.0:81", insecure=True)
    assert target_of(everywhere) == "127.0.0.1:81"


def test_every_rank_has_one_command(local: LocalPool, tmp_path: Path) -> None:
    pool = local.configure()
    made = commands(pool, tmp_path / "pool.yaml", {"PATH": "/bin"})
    assert [command.name for command in made] == [
        "coordinator", "prefill-0-rank-0", "prefill-0-rank-1", "decode-node-0-rank-0",
        "decode-node-0-rank-1", "decode-node-1-rank-0", "decode-node-1-rank-1",
    ]  # fmt: skip
    arguments = list(made[-1].argv)[list(made[-1].argv).index("serve") :]
    assert arguments == [
        "serve", "decode-node", "--pool", str(tmp_path / "pool.yaml"), "--node", "1", "--rank", "1",
    ]  # fmt: skip


def test_cores_are_shared_unless_the_user_says_otherwise(local: LocalPool, tmp_path: Path) -> None:
    pool = replace(local, nodes=1, tp=1, prefill_tp=1).configure()
    shared = commands(pool, tmp_path, {})[0].environment
    chosen = commands(pool, tmp_path, {"OMP_NUM_THREADS": "7"})[0].environment
    assert shared is not None
    assert shared["OMP_NUM_THREADS"] == str(max(1, cores() // 2))
    assert int(shared["GOMP_SPINCOUNT"]) < 10_000
    assert chosen is not None
    assert chosen["OMP_NUM_THREADS"] == "7"


def test_what_can_not_be_served_is_refused_by_the_flags_name(
    local: LocalPool, tmp_path: Path
) -> None:
    good = replace(local, model="smollm2", tp=3, prefill_tp=3)
    check(good.configure())
    for change, message in (
        ({"tp": 2}, "tp=2: must divide 9 query heads"),
        ({"prefill_tp": 2}, "prefill_tp=2: must divide 9 query heads"),
        ({"nodes": 31}, "nodes=31: give 1 to 30"),
        ({"memories": (10**9, 1000)}, "memory=1000: leaves -"),
        ({"settings": {"kv_memory_bytes": 1}}, "kv_memory=1: leaves 1 bytes"),
        ({"settings": {"max_model_len": 10**6}}, "max_model_len=1000000: "),
    ):
        with pytest.raises(InvalidValue, match=f"^{re.escape(message)}"):
            check(replace(good, **change).configure())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="absent does not exist"):
        check(replace(good, model=str(tmp_path / "absent")).configure())
