"""Pools of three ranks that run cases: functions of a transport, at module level of a test file.

Ranks are threads for the in-process transport and processes for the others. The processes are
this file run as a script, which imports torch once and forks them. They serve one pool after
another, so each test is also a new epoch in an old process.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
import torch

from tknp.kernels.mailbox import choose_lanes
from tknp.layout.rank import Rank
from tknp.transport import distributed, shared_memory
from tknp.transport.base import Transport
from tknp.transport.lane import LaneFactory, PythonLane
from tknp.transport.local import LocalHub

TIMEOUT_S = 30.0
WORKERS = 3
LANES: dict[str, Callable[[], LaneFactory]] = {
    "shared_memory": choose_lanes,
    "shared_memory_in_python": lambda: PythonLane,
}


class Pool(Protocol):
    def run(self, case: Callable[[Transport], None], ranks: range = range(WORKERS)) -> None:
        """Run `case` on the ranks of these flat indices at once; raise what any of them raises."""

    def close(self) -> None: ...


class ThreadPool:
    def __init__(self, nodes: int, tp: int, timeout_s: float) -> None:
        hub = LocalHub(nodes, tp, timeout_s)
        self.wires = [hub.transport(Rank.from_index(i, tp)) for i in range(nodes * tp)]
        self.threads = ThreadPoolExecutor(WORKERS)

    def run(self, case: Callable[[Transport], None], ranks: range = range(WORKERS)) -> None:
        futures = [self.threads.submit(case, self.wires[i]) for i in ranks]
        for future in futures:
            future.result()

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        self.threads.shutdown()


class Worker:
    """A process that runs cases on its ranks; see `serve`."""

    def __init__(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            self.stream = connection.makefile("rw")
        self.pid = int(self.stream.readline())
        self.alive = True

    def ask(self, **command: Any) -> None:
        self.stream.write(json.dumps(command) + "\n")
        self.stream.flush()

    def answer(self) -> None:
        line = self.stream.readline()
        assert line, "the worker has died"
        failure = json.loads(line)["failure"]
        assert failure is None, failure

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.stream.close()
        self.alive = False


class ProcessPool:
    epochs = itertools.count(1)

    def __init__(
        self, workers: list[Worker], kind: str, store: str, nodes: int, tp: int, timeout_s: float
    ) -> None:
        self.epoch = next(self.epochs)
        self.workers = workers
        for i, worker in enumerate(workers):
            worker.ask(
                do="connect", kind=kind, store=store, epoch=self.epoch,
                rank=i, nodes=nodes, tp=tp, timeout_s=timeout_s,
            )  # fmt: skip
        self.gather(range(WORKERS))

    def start(self, case: Callable[[Transport], None], ranks: range) -> None:
        for i in ranks:
            self.workers[i].ask(
                do="run", file=case.__code__.co_filename, case=case.__name__, epoch=self.epoch
            )

    def gather(self, ranks: range) -> None:
        """Take every worker's answer, then raise the first failure."""
        failures = []
        for i in ranks:
            try:
                self.workers[i].answer()
            except AssertionError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def run(self, case: Callable[[Transport], None], ranks: range = range(WORKERS)) -> None:
        self.start(case, ranks)
        self.gather(ranks)

    def close(self) -> None:
        living = [w for w in self.workers if w.alive]
        for worker in living:
            worker.ask(do="close", epoch=self.epoch)
        for worker in living:
            worker.answer()


def fork_workers(path: str) -> None:
    """Answer every connection at `path` with a worker, which has imported torch already."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    serve(connection)
                    os._exit(0)


def serve(connection: socket.socket) -> None:
    """A worker's life: one JSON command a line, one answer a line, until its test has gone."""
    wires: dict[int, Transport] = {}
    stream = connection.makefile("rw")
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    for line in stream:
        failure = None
        try:
            obey(json.loads(line), wires)
        except BaseException:
            failure = traceback.format_exc()
        stream.write(json.dumps({"failure": failure}) + "\n")
        stream.flush()


@cache
def load(file: str) -> ModuleType:
    """The test file that has the cases."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def obey(command: dict[str, Any], wires: dict[int, Transport]) -> None:
    epoch = command["epoch"]
    if command["do"] == "connect":
        rank = Rank.from_index(command["rank"], command["tp"])
        pool = (rank, command["nodes"], command["tp"])
        common = {
            "epoch": epoch,
            "timeout_s": command["timeout_s"],
            "rendezvous_timeout_s": TIMEOUT_S,
        }
        if command["kind"] == "gloo":
            wires[epoch] = distributed.connect(
                *pool,
                backend="gloo",
                store_address=command["store"],
                device=torch.device("cpu"),
                interface="lo",
                **common,
            )
        else:
            name = command["store"].replace(":", "-").replace(".", "-")
            lanes = LANES[command["kind"]]()
            wires[epoch] = shared_memory.connect(*pool, pool=name, streams=6, lanes=lanes, **common)
    elif command["do"] == "run":
        getattr(load(command["file"]), command["case"])(wires[epoch])
    else:
        wires.pop(epoch).close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where to connect for a new worker."""
    path = tmp_path_factory.mktemp("workers") / "socket"
    command = [sys.executable, __file__, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.kill()


@pytest.fixture(scope="module")
def workers(nursery: Path) -> Iterator[list[Worker]]:
    made = [Worker(nursery) for _ in range(WORKERS)]
    yield made
    for worker in made:
        worker.stream.close()


@pytest.fixture(scope="module")
def store() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(params=["local", "gloo", *LANES])
def pool(request: pytest.FixtureRequest, store: str) -> Iterator[Callable[..., Pool]]:
    """Make pools of the implementation under test; they are closed with the test."""
    pools: list[Pool] = []

    def make(nodes: int, tp: int, timeout_s: float = TIMEOUT_S) -> Pool:
        if request.param == "local":
            pools.append(ThreadPool(nodes, tp, timeout_s))
            return pools[-1]
        nursery = request.getfixturevalue("nursery")
        workers = request.getfixturevalue("workers")
        workers[:] = [w if w.alive else Worker(nursery) for w in workers]
        pools.append(ProcessPool(workers, request.param, store, nodes, tp, timeout_s))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


if __name__ == "__main__":
    fork_workers(sys.argv[1])
