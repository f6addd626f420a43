"""A pool of processes on this machine: what `tknp up` and `tknp demo` start.

    LocalPool -> check() -> PoolConfig -> pool file -> Supervisor -> wait_until_ready -> RunningPool

Everything that can be refused is refused before the first process starts: the checkpoint, TP
degrees, layer blocks, budgets, ports. The pool ends with the `async with` block, all processes of
it. Its directory is removed then, except after a failure, where the logs are what is left to read.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tknp.cli.options import client_for
from tknp.cli.ports import check_free, free_ports
from tknp.cli.processes import Command, Interrupted, ProcessDied, Supervisor
from tknp.cli.readiness import wait_until_ready
from tknp.cli.serve import inherited_environment, serve_argv
from tknp.cli.watch import beside, lost, stopped
from tknp.client import Client
from tknp.config import PoolConfig, pool_from, write_pool
from tknp.errors import InvalidValue, TknpError
from tknp.v1.coordinator_pb2 import Status

if TYPE_CHECKING:
    from tknp.layout.strategies import Grid

LOOPBACK = "127.0.0.1"
ANY_HOSTS = ("0.0.0.0", "::", "[::]")
DEFAULT_KV_MEMORY_BYTES = 512 * 2**20
THREADS = "OMP_NUM_THREADS"
# How long an idle thread of a rank spins before it sleeps (libgomp's default: milliseconds): longer
# than from one operation of a step to the next, since waking it costs more than that, but no more.
# The processes of a local pool share its cores, and one that spins keeps another from its work.
SPINS = {"GOMP_SPINCOUNT": "8000"}
# Flags of `tknp up` whose names differ from the setting of the pool file that they fill.
FLAGS = {
    "kv_memory_bytes": "kv_memory",
    "nodes.memory_bytes": "memory",
    "prefill.addresses": "prefill_tp",
}


@dataclass(frozen=True)
class LocalPool:
    """A pool on this machine. `settings`: fields of PoolConfig that the user gave.

    `nodes`, `tp`: as machines of a cluster would stand; the strategy may group their ranks
    otherwise, see `tknp.layout.strategies.grid`. `kvp`: sequence shards. `roles`: of each node;
    empty: decode-node for all.
    `memories`: weights plus KV on each rank of each node, in bytes; empty: `kv_memory_bytes`.
    `port`: of the coordinator; 0: any free one. Other services listen on loopback only.
    """

    model: str
    nodes: int
    tp: int
    prefill: int
    prefill_tp: int
    host: str
    port: int
    memories: tuple[int, ...] = ()
    kvp: int | None = None
    roles: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def compute_ranks(self) -> int:
        return self.nodes * self.tp + self.prefill * self.prefill_tp

    def configure(self) -> PoolConfig:
        """The pool's file; chooses ports. Raises InvalidValue for what can't be combined."""
        given = {name: value for name, value in self.settings.items() if value is not None}
        if self.memories and "kv_memory_bytes" in given:
            raise InvalidValue("kv_memory", given["kv_memory_bytes"], "give it or memory, not both")
        if self.memories and len(self.memories) != self.nodes:
            raise InvalidValue("memory", self.memories, f"give one size for each of {self.nodes}")
        if not self.memories:
            given.setdefault("kv_memory_bytes", DEFAULT_KV_MEMORY_BYTES)
        grid = self.grid()
        given["domain_ranks"] = grid.domain_ranks
        if self.port:
            check_free("port", self.host, self.port)
        # Services, their metrics, and where the ranks of the pool and of each replica meet.
        ports = iter(free_ports(2 * (self.compute_ranks + 1) + self.prefill + 1))

        def addresses(count: int) -> tuple[str, ...]:
            return tuple(f"{LOOPBACK}:{next(ports)}" for _ in range(count))

        nodes = [
            {"addresses": addresses(grid.tp), "role": role, "memory_bytes": memory,
             "metrics_addresses": addresses(grid.tp)}
            for role, memory in zip(grid.roles or ("decode-node",) * grid.nodes,
                                    self._memories(grid), strict=True)
        ]  # fmt: skip
        replicas = [
            {"addresses": addresses(self.prefill_tp), "data_plane": addresses(1)[0],
             "metrics_addresses": addresses(self.prefill_tp)}
            for _ in range(self.prefill)
        ]  # fmt: skip
        return pool_from(
            {
                "model": self.model,
                "coordinator": f"{self.host}:{self.port or next(ports)}",
                "metrics_address": addresses(1)[0],
                "data_plane": addresses(1)[0],
                "nodes": nodes,
                "prefill": replicas,
                **given,
            }
        )

    def grid(self) -> Grid:
        """The logical nodes that the strategy makes of the machines; reads the model's headers."""
        from tknp.layout.strategies import grid
        from tknp.layout.strategy import Strategy
        from tknp.model.checkpoint import open_checkpoint

        settings = self.settings
        asked: dict[str, Any] = {
            name: settings.get(name)
            for name in ("copies", "microbatches", "width", "overlap", "inside")
        }
        return grid(
            open_checkpoint(self.model).config, Strategy(str(settings.get("strategy") or "tknp")),
            nodes=self.nodes, tp=self.tp, kvp=self.kvp, roles=self.roles, **asked,
        )  # fmt: skip

    def _memories(self, grid: Grid) -> Sequence[int | None]:
        """Of each rank of each logical node."""
        if not self.memories or grid.nodes == self.nodes:
            return self.memories or (None,) * grid.nodes
        if len(set(self.memories)) > 1:
            raise InvalidValue(
                "memory", self.memories,
                f"give equal sizes: {grid.strategy} groups the ranks of {self.nodes} nodes into "
                f"{grid.nodes}",
            )  # fmt: skip
        return self.memories[:1] * grid.nodes


def check(pool: PoolConfig) -> None:
    """Refuse what no process of `pool` could serve, from the checkpoint's headers alone.

    Raises CheckpointError for a broken checkpoint, InvalidValue naming the flag to change for a
    combination that can't be.
    """
    from tknp.pool import open_pool

    try:
        open_pool(pool)
    except InvalidValue as error:
        setting = re.sub(r"\[\d+\]", "", error.field)
        raise InvalidValue(FLAGS.get(setting, error.field), error.value, error.remedy) from error


async def prepare_kernels(pool: PoolConfig, console: Console) -> None:
    """Compile the CPU kernels that `pool` will use, before its ranks wait for them."""
    from tknp.kernels.build import prepare

    if pool.device != "cpu" or pool.dtype != "bfloat16":
        return
    try:
        await asyncio.to_thread(prepare)
    except TknpError as error:
        console.print(f"[yellow]bfloat16 runs without compiled kernels, slowly:[/] {error}")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commands(pool: PoolConfig, pool_file: Path, environment: Mapping[str, str]) -> list[Command]:
    """One command for each process of `pool`, the coordinator first.

    Cores are shared evenly between the ranks that compute, unless `environment` says otherwise.
    """
    groups: list[tuple[str, str, str, Sequence[str]]] = [
        ("prefill", "--replica", str(i), replica.addresses)
        for i, replica in enumerate(pool.prefill)
    ]
    groups += [(node.role, "--node", str(i), node.addresses) for i, node in enumerate(pool.nodes)]
    ranks = sum(len(addresses) for *_, addresses in groups)
    threads = {THREADS: str(max(1, cores() // ranks)), **SPINS}
    variables = {**threads, "PYTHONUNBUFFERED": "1", **environment}
    result = [Command("coordinator", serve_argv("coordinator", pool_file), variables)]
    for role, flag, index, addresses in groups:
        for rank in range(len(addresses)):
            name = f"{role}-{index}" + (f"-rank-{rank}" if len(addresses) > 1 else "")
            argv = serve_argv(role, pool_file, flag, index, "--rank", str(rank))
            result.append(Command(name, argv, variables))
    return result


@dataclass(frozen=True)
class RunningPool:
    """A pool whose every service is ready."""

    pool: PoolConfig
    target: str
    directory: Path
    pids: Mapping[str, int]
    status: Status
    supervisor: Supervisor
    client: Client

    async def run(self) -> None:
        """For as long as the pool is well.

        Raises Unavailable naming the process that is stopped, silent or has failed, ProcessDied
        and Interrupted as `Supervisor.guard` does.
        """
        watches = beside(lost(self.client), stopped(self.supervisor.children))
        await self.supervisor.guard(watches)

    @property
    def pool_file(self) -> Path:
        return self.directory / "pool.yaml"


def target_of(pool: PoolConfig) -> str:
    """Where a client on this machine reaches the coordinator."""
    host, _, port = pool.coordinator.rpartition(":")
    return f"{LOOPBACK if host in ANY_HOSTS else host}:{port}"


def client_of(pool: PoolConfig) -> Client:
    """A client of `pool`'s coordinator, on this machine and with the pool's own files."""
    return client_for(target_of(pool), pool.tls_ca, pool.api_token_file or pool.token_file)


@asynccontextmanager
async def running(
    pool: PoolConfig, console: Console, ready_timeout_s: float, run_directory: Path | None = None
) -> AsyncIterator[RunningPool]:
    """Start `pool` and yield once it is ready; stop all of it on the way out.

    Progress goes to `console`. Raises ProcessDied, Interrupted, DeadlineExceeded after
    `ready_timeout_s`, or what the coordinator gave as the reason of a failed start.
    `run_directory` is kept in any case.
    """
    directory = run_directory or Path(tempfile.mkdtemp(prefix="tknp-"))
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    pool_file = directory / "pool.yaml"
    write_pool(pool, pool_file)
    clean = False
    try:
        async with Supervisor(logs) as supervisor, client_of(pool) as client:
            await supervisor.guard(prepare_kernels(pool, console))
            pids = {}
            for command in commands(pool, pool_file, inherited_environment()):
                pids[command.name] = (await supervisor.start(command)).pid
            waiting = wait_until_ready(client, console, ready_timeout_s)
            status = await supervisor.guard(beside(waiting, stopped(supervisor.children)))
            yield RunningPool(pool, client.target, directory, pids, status, supervisor, client)
        clean = True
    except Interrupted:
        clean = True
        raise
    except TknpError as error:
        if not isinstance(error, ProcessDied):  # which names its own log
            error.add_note(f"logs are in {logs}")
        raise
    finally:
        if clean and run_directory is None:
            shutil.rmtree(directory, ignore_errors=True)
