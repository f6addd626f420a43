"""`tknp serve ROLE`: one service of a pool, in this process until SIGTERM.

    pool file + overrides -> PoolConfig -> serve(pool, ...) of the role's package

A role of several TP ranks without `--rank` becomes one process a rank; they end together.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from tknp.cli.options import POOL_VARIABLES, combined, option, pool_settings
from tknp.cli.processes import GRACE_S, Command, Interrupted, Supervisor
from tknp.config import PoolConfig, Role, read_pool, write_pool
from tknp.errors import InvalidValue, TknpError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
F = TypeVar("F", bound=Callable[..., Any])


def service(module: str) -> ModuleType:
    """Import a service; raises TknpError naming the extra whose packages are missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "tknp":
            raise
        raise TknpError(f"{error.name} is not installed: pip install 'tknp[engine]'") from error


def inherited_environment() -> dict[str, str]:
    """This process's environment without what the pool file already says."""
    return {name: value for name, value in os.environ.items() if name not in POOL_VARIABLES}


def serve_argv(role: str, pool_file: Path, *arguments: str) -> list[str]:
    """Command line of one service process."""
    return [sys.executable, "-m", "tknp.cli.main", "serve", role, "--pool", str(pool_file),
            *arguments]  # fmt: skip


def pick(flag: str, index: int | None, count: int, what: str) -> int:
    """`index` if there is such a one; the only one if none is named."""
    if index is None:
        if count == 1:
            return 0
        raise InvalidValue(flag, None, f"choose one of the pool's {what}: 0..{count - 1}")
    if not 0 <= index < count:
        raise InvalidValue(flag, index, f"the pool has {what} 0..{count - 1}")
    return index


async def _serve_ranks(pool: PoolConfig, name: str, role: str, which: Sequence[str],
                       ranks: int) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tknp-") as directory:
        pool_file = Path(directory) / "pool.yaml"
        write_pool(pool, pool_file)
        async with Supervisor(grace_s=pool.drain_s + GRACE_S) as supervisor:
            for rank in range(ranks):
                argv = serve_argv(role, pool_file, *which, "--rank", str(rank))
                await supervisor.start(
                    Command(f"{name} rank {rank}", argv, inherited_environment())
                )
            await supervisor.guard(asyncio.Event().wait())


def run_ranks(
    pool: PoolConfig, role: str, which: Sequence[str], addresses: Sequence[str],
    rank: int | None, serve: Callable[[int], None],
) -> None:  # fmt: skip
    """Call `serve(rank)` here, or supervise one process a rank of `addresses`."""
    ranks = len(addresses)
    if rank is not None or ranks == 1:
        serve(pick("rank", rank, ranks, "ranks"))
        return
    try:
        asyncio.run(_serve_ranks(pool, " ".join([role, *which[1:]]), role, which, ranks))
    except Interrupted:
        return


def serve_node(role: Role, pool: PoolConfig, node: int | None, rank: int | None) -> None:
    """Serve a decode node; raises InvalidValue when the pool file gives it another role."""
    index = pick("node", node, len(pool.nodes), "nodes")
    declared = pool.nodes[index].role
    if declared != role:
        raise InvalidValue(
            f"nodes[{index}].role", declared, f"run `tknp serve {declared}`, or change the role"
        )
    run_ranks(
        pool, role, ("--node", str(index)), pool.nodes[index].addresses, rank,
        lambda t: service("tknp.node.server").serve(pool, index, t),
    )  # fmt: skip


def configured(function: F) -> F:
    """`--pool` and what overrides it: the keywords that `resolve` takes."""
    return combined(
        option("--pool", "pool_file", type=click.Path(path_type=Path), required=True,
               metavar="FILE", help="The pool's configuration, as `tknp up` writes it."),
        option("--model", metavar="DIR|FILE.gguf|NAME", help="Where this process finds the model."),
        option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
               default="info", show_default=True),
        pool_settings,
    )(function)  # fmt: skip


def resolve(pool_file: Path, log_level: str, **overrides: Any) -> PoolConfig:
    """The pool as this process sees it; starts logging."""
    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    return read_pool(pool_file, overrides)


node_option = option("--node", type=int, help="Which node of the pool.")
replica_option = option("--replica", type=int, help="Which prefill replica of the pool.")
rank_option = option("--rank", type=int, help="Which TP rank; unset: all, one process each.")


@click.group()
def command() -> None:
    """Run one service of a pool until SIGTERM.

    Flags win over TKNP_* environment variables, which win over the pool file.
    """


@command.command("coordinator")
@configured
def coordinator(**settings: Any) -> None:
    """The queue, the owner table and the public port."""
    pool = resolve(**settings)
    service("tknp.coordinator.server").serve(pool)


@command.command("prefill")
@replica_option
@rank_option
@configured
def prefill(replica: int | None, rank: int | None, **settings: Any) -> None:
    """Computes prompts and pushes their KV to the owners."""
    pool = resolve(**settings)
    index = pick("replica", replica, len(pool.prefill), "prefill replicas")
    run_ranks(
        pool, "prefill", ("--replica", str(index)), pool.prefill[index].addresses, rank,
        lambda t: service("tknp.prefill.server").serve(pool, index, t),
    )  # fmt: skip


@command.command("decode-node")
@node_option
@rank_option
@configured
def decode_node(node: int | None, rank: int | None, **settings: Any) -> None:
    """Roots a layer block and owns requests: the normal node."""
    serve_node("decode-node", resolve(**settings), node, rank)


@command.command("decode-root")
@node_option
@rank_option
@configured
def decode_root(node: int | None, rank: int | None, **settings: Any) -> None:
    """Roots a layer block only."""
    serve_node("decode-root", resolve(**settings), node, rank)


@command.command("attention-owner")
@node_option
@rank_option
@configured
def attention_owner(node: int | None, rank: int | None, **settings: Any) -> None:
    """Owns requests only: KV pages and attention."""
    serve_node("attention-owner", resolve(**settings), node, rank)
