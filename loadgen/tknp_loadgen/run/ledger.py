"""What has ended: counted and written down when there is time.

Making a record and writing its line takes a tenth of a millisecond or so, by which the next release
would be late. It waits until nothing is due; what waits when a process is killed is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from tknp_loadgen.measure.slo import Slo, request_values_ms
from tknp_loadgen.run.records import Files, Request
from tknp_loadgen.target.base import Ending

MOST_WAITING = 512  # beyond it records are written whether there is time or not
_RECENT = 512
_NO_ENDING = Ending()


class Ledger:
    """Ended requests of one worker, on their way to its files."""

    def __init__(self, files: Files, slo: Slo) -> None:
        self._files, self._slo = files, slo
        self._waiting: deque[tuple[Request, str, str, Ending | None, int]] = deque()
        self._statuses: dict[str, int] = {}
        self._good = self._tokens = 0
        self._recent: dict[str, deque[float]] = {
            name: deque(maxlen=_RECENT) for name in ("lag_ms", "ttft_ms", "tpot_ms")
        }

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, request: Request, status: str, reason: str, ending: Ending | None, ended_ns: int
    ) -> None:
        """`status` as in records.STATUSES; `ending`: what the server said, if it did."""
        self._waiting.append((request, status, reason, ending, ended_ns))

    def write_next(self) -> None:
        """Write down the one that waits longest."""
        request, status, reason, ending, ended_ns = self._waiting.popleft()
        record = request.record(status, reason, ending or _NO_ENDING, ended_ns)
        self._files.request(record)
        self._statuses[status] = self._statuses.get(status, 0) + 1
        self._tokens += request.counted
        if request.released_ns:
            self._recent["lag_ms"].append(request.lag_ns / 1e6)
        if status != "ok":
            return
        values = request_values_ms(
            record["scheduled_s"], record["first_token_s"], record["last_token_s"],
            record["completion_tokens"], request.first_tokens, record["max_gap_s"],
        )  # fmt: skip
        self._good += self._slo.good(values)
        for name, key in (("ttft_ms", "ttft"), ("tpot_ms", "tpot")):
            value = values[key]
            if value is not None:
                self._recent[name].append(value)

    def progress(self) -> Mapping[str, Any]:
        """Cumulative counts of what has been written, and medians of the most recent."""
        return {
            "statuses": self._statuses, "good": self._good, "tokens": self._tokens,
            **{name: _median(values) for name, values in self._recent.items()},
        }  # fmt: skip

    def write_all(self) -> None:
        while self._waiting:
            self.write_next()


def _median(values: deque[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
