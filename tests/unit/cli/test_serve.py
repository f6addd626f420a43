from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tknp.cli.main import main
from tknp.cli.serve import inherited_environment, pick, resolve, run_ranks
from tknp.config import NodeConfig, PoolConfig, PrefillConfig, write_pool
from tknp.errors import InvalidValue


@pytest.fixture
def pool() -> PoolConfig:
    return PoolConfig(
        model="tiny", coordinator="127.0.0.1:1", data_plane="127.0.0.1:2", dtype="bfloat16",
        nodes=(
            NodeConfig(("127.0.0.1:3", "127.0.0.1:4")),
            NodeConfig(("127.0.0.1:5", "127.0.0.1:6"), role="attention-owner"),
        ),
        prefill=(PrefillConfig(("127.0.0.1:7",)), PrefillConfig(("127.0.0.1:8",))),
    )  # fmt: skip


@pytest.fixture
def pool_file(pool: PoolConfig, tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    write_pool(pool, path)
    return path


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments])


def test_overrides_win_over_the_file(pool_file: Path) -> None:
    pool = resolve(pool_file, "info", dtype=None, kv_memory_bytes=2**20, epoch=7)
    assert (pool.dtype, pool.kv_memory_bytes, pool.epoch) == ("bfloat16", 2**20, 7)


def test_flags_win_over_the_environment_and_it_over_the_file(
    pool_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Node 1 is an attention-owner, so each call ends with an error once settings are resolved.
    arguments = ["decode-node", "--rank", "0"]
    monkeypatch.setenv("TKNP_POOL", str(pool_file))
    monkeypatch.setenv("TKNP_NODE", "1")
    assert "nodes[1].role='attention-owner'" in serve(*arguments).stderr
    monkeypatch.setenv("TKNP_LEASE_S", "-1")
    assert "lease_s=-1.0: " in serve(*arguments).stderr
    assert "lease_s=-2.0: " in serve(*arguments, "--lease-s", "-2").stderr


@pytest.mark.parametrize("command", ["decode-node", "decode-root"])
def test_role_of_the_file_must_be_the_command(pool_file: Path, command: str) -> None:
    result = serve(command, "--pool", str(pool_file), "--node", "1")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: nodes[1].role='attention-owner': run `tknp serve attention-owner`, "
        "or change the role\n"
    )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["decode-node"], "node=None: choose one of the pool's nodes: 0..1"),
        (["decode-node", "--node", "2"], "node=2: the pool has nodes 0..1"),
        (["decode-node", "--node", "0", "--rank", "2"], "rank=2: the pool has ranks 0..1"),
        (["prefill"], "replica=None: choose one of the pool's prefill replicas: 0..1"),
        (["prefill", "--replica", "-1"], "replica=-1"),
        (["decode-node", "--node", "0", "--kv-memory", "lots"], "kv_memory_bytes='lots'"),
    ],
)
def test_wrong_choices_are_refused_with_code_2(
    pool_file: Path, arguments: list[str], field: str
) -> None:
    result = serve(*arguments, "--pool", str(pool_file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {field}")


def test_an_unreadable_pool_file_is_named(tmp_path: Path) -> None:
    result = serve("coordinator", "--pool", str(tmp_path / "absent.yaml"))
    assert result.exit_code == 2
    assert "absent.yaml': cannot be read" in result.stderr


def test_the_only_choice_needs_no_flag() -> None:
    assert pick("node", None, 1, "nodes") == 0
    with pytest.raises(InvalidValue, match="node=1"):
        pick("node", 1, 1, "nodes")


def test_a_named_rank_serves_in_this_process(pool: PoolConfig) -> None:
    served: list[int] = []
    run_ranks(pool, "decode-node", ("--node", "0"), pool.nodes[0].addresses, 1, served.append)
    run_ranks(pool, "prefill", ("--replica", "0"), pool.prefill[0].addresses, None, served.append)
    assert served == [1, 0]


def test_children_do_not_inherit_what_the_pool_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TKNP_DTYPE", "float16")
    monkeypatch.setenv("TKNP_RANK", "1")
    monkeypatch.setenv("TKNP_DEBUG", "1")
    names = inherited_environment()
    assert "TKNP_DEBUG" in names
    assert not {"TKNP_DTYPE", "TKNP_RANK"} & set(names)
