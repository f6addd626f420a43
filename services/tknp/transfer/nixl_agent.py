"""The few calls of NIXL that KV transfer needs, over UCX.

NIXL is reached through its bindings and not through its `nixl_agent` class, because that class
can't set the progress thread's delay, and with the delay of 0 that it fixes, the thread of every
idle process keeps one core busy (measured, 1.5.1). With a delay the thread sleeps in poll(2) until
the network wakes it. Both sides need it: connections are answered by the receiver, and without
one-sided hardware or shared memory the receiver's thread also places the bytes.

Which networks UCX uses is left to it and to its own environment (UCX_TLS, UCX_NET_DEVICES).
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from tknp.errors import Unavailable
from tknp.kv.storage import KvStorage

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
_PROGRESS_DELAY_US = 100_000
_BACKEND = "UCX"

State = Literal["running", "done", "failed"]


@cache
def nixl_available() -> str | None:
    """None where NIXL can be used, else the reason why not, with the remedy."""
    try:
        _bindings()
    except ImportError as error:
        return f"{error}; install the extra tknp[nixl] or set kv_transfer to grpc"
    return None


@cache
def _bindings() -> Any:
    broken: ImportError | None = None
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            broken = error
    if broken:
        raise ImportError(f"NIXL is installed but can't be loaded: {broken}") from broken
    raise ImportError("NIXL is not installed")


class NixlAgent:
    """One process's NIXL agent with one registered pool. Raises Unavailable if it can't start.

    Its name is unique, so that a restarted process is never taken for its predecessor.
    """

    def __init__(self, storage: KvStorage) -> None:
        reason = nixl_available()
        if reason:
            raise Unavailable(reason)
        self._nixl = _bindings()
        device = storage.data.device
        self.segment = self._nixl.VRAM_SEG if device.type == "cuda" else self._nixl.DRAM_SEG
        self.device = device.index or 0
        config = self._nixl.nixlAgentConfig(True)
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = self._nixl.nixlAgent(f"tknp-{uuid.uuid4().hex}", config)
            self._agent.createBackend(_BACKEND, {})
            pool = (storage.data.data_ptr(), storage.data.nbytes, self.device, "")
            self._registered = self._nixl.nixlRegDList(self.segment, [pool])
            self._agent.registerMem(self._registered, [])
            self.metadata: bytes = self._agent.getLocalMD()
        except Exception as error:
            raise Unavailable(
                f"NIXL can't use {_BACKEND} here ({type(error).__name__}: {error}); check UCX_TLS "
                "and UCX_NET_DEVICES or set kv_transfer to grpc"
            ) from error
        self._storage = storage  # the registered memory must outlive the registration

    def add(self, metadata: bytes) -> str:
        """Learn of a remote agent; returns its name."""
        name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Forget a remote agent and disconnect. No write to it may be running."""
        self._agent.invalidateRemoteMD(name)

    def write(
        self,
        local: Sequence[tuple[int, int, int]],
        remote: Sequence[tuple[int, int, int]],
        remote_segment: int,
        name: str,
    ) -> int:
        """Post writes of (address, bytes, device) runs, pairwise; returns a handle to ask for.

        The handle must be released. Raises whatever NIXL does, with nothing left to release.
        """
        segment = self._nixl.nixl_mem_t(remote_segment)
        handle: int = self._agent.createXferReq(
            self._nixl.NIXL_WRITE,
            self._nixl.nixlXferDList(self.segment, local),
            self._nixl.nixlXferDList(segment, remote),
            name,
        )
        try:
            self._agent.postXferReq(handle)
        except Exception:
            self.release(handle)
            raise
        return handle

    def state(self, handle: int) -> State:
        """How far a posted write is. Raises what NIXL does once its peer is lost."""
        status = self._agent.getXferStatus(handle)
        if status == self._nixl.NIXL_SUCCESS:
            return "done"
        return "running" if status == self._nixl.NIXL_IN_PROG else "failed"

    def release(self, handle: int) -> None:
        """Free the handle of a write that is done or has failed."""
        self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Deregister the pool and drop the agent. Remote writers get an error from then on."""
        self._agent.deregisterMem(self._registered, [])
        del self._agent
