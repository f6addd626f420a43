"""Which writers of KV are dead for certain.

NIXL can't recall a write, so the pages of a writer that has gone silent stay quarantined until it
can't write any more. A lease says nothing about that, nor does a broken connection: a process that
was stopped, or a network that was cut, may come back with its writes. What does say it:

    every process of the writer was reached once    so its host answers this one
    since then each refuses connections             its port closes with the process, or after the
                                                    process has ended its writes (PrefillServer)
    at several looks in a row                       bytes that the kernel still held have arrived

An address that another writer has begun from counts as refusing: only one process can listen there.
Looks are counted, not timed, so that an owner that was stopped itself doesn't skip any.

Every prefill process that starts is another writer. Those with nothing in flight are forgotten, but
for the latest: they save the look when they begin again, and a Begin that comes late from a process
that has ended isn't taken for that of its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

log = logging.getLogger(__name__)
LOOKS = 3
KEPT = 256  # writers with nothing in flight
_CONNECT_S = 1.0


class Contact(Enum):
    """What an address did with a connection."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


async def contact(address: str) -> Contact:
    """Connect to HOST:PORT and hang up."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, stream = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return Contact.REFUSED
    except OSError:  # a time-out is one too
        return Contact.UNKNOWN
    stream.close()
    return Contact.ACCEPTED


@dataclass
class _Process:
    """One process of a writer. `refusals`: looks in a row at which nothing listened."""

    reached: bool = False
    replaced: bool = False
    refusals: int = 0


@dataclass
class _Writer:
    """`one_sided`: it may write without this service's doing."""

    processes: dict[str, _Process] = field(default_factory=dict)
    one_sided: bool = True


class Writers:
    """Belongs to one event loop. `contact` is asked; a test may answer for the network."""

    def __init__(self, contact: Callable[[str], Awaitable[Contact]] = contact) -> None:
        self._contact = contact
        self._writers: dict[str, _Writer] = {}  # in the order in which they began last

    async def learn(self, writer: str, addresses: Sequence[str]) -> None:
        """`writer` is about to write for the first time, or again."""
        if writer in self._writers:
            self._writers[writer] = self._writers.pop(writer)
            return
        for former in self._writers.values():
            for address in former.processes.keys() & set(addresses):
                former.processes[address].replaced = True
        processes = {address: _Process() for address in addresses}
        self._writers[writer] = _Writer(processes)
        await self._look(processes)
        unreached = [a for a, p in processes.items() if not p.reached]
        if unreached or not addresses:
            log.warning(
                "writer %s can't be reached at %s: if it goes silent while it writes, its pages "
                "stay quarantined until it speaks again",
                writer,
                ", ".join(unreached) or "any address",
            )

    def note(self, writer: str, *, one_sided: bool) -> None:
        """How `writer` has been let write, this time; it may have been found dead meanwhile."""
        self._writers.setdefault(writer, _Writer()).one_sided = one_sided

    def one_sided(self, writer: str) -> bool:
        """Whether `writer` may write by itself; true of those that nothing is known of."""
        return writer not in self._writers or self._writers[writer].one_sided

    def forget(self, writing: Collection[str]) -> None:
        """Forget all that aren't in `writing`, but for the `KEPT` that began last."""
        idle = [writer for writer in self._writers if writer not in writing]
        for writer in idle[:-KEPT]:
            del self._writers[writer]

    async def dead(self, suspects: Collection[str]) -> list[str]:
        """Take a look at each of `suspects`; return those that are dead for certain."""
        known = [writer for writer in suspects if writer in self._writers]
        await asyncio.gather(*(self._look(self._writers[writer].processes) for writer in known))
        gone = [writer for writer in known if self._is_dead(writer)]
        for writer in gone:
            del self._writers[writer]
        return gone

    async def _look(self, processes: dict[str, _Process]) -> None:
        await asyncio.gather(*(self._ask(a, p) for a, p in processes.items()))

    async def _ask(self, address: str, process: _Process) -> None:
        seen = Contact.REFUSED if process.replaced else await self._contact(address)
        process.reached = process.reached or seen is Contact.ACCEPTED
        process.refusals = process.refusals + 1 if seen is Contact.REFUSED else 0

    def _is_dead(self, writer: str) -> bool:
        processes = self._writers[writer].processes.values()
        return bool(processes) and all(
            process.reached and process.refusals >= LOOKS for process in processes
        )
