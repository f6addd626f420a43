"""What a worker writes while it runs: one line a request, one entry a chunk of tokens.

Nothing of a finished request stays in memory, and of an open one only a few numbers. Files grow
while requests end, so that whatever stops a run leaves what was measured.

    requests.K.jsonl   one object a request, when it has ended
    tokens.K.bin       14 bytes a chunk, little-endian: ns since release (int64), row (uint32),
                       tokens (uint16); in order of arrival
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tknp_loadgen.target.base import Call, Clock, Ending

CHUNK = struct.Struct("<qIH")
MOST_TOKENS = 65535  # of one entry
FLUSH_BYTES = 1 << 16
# How a request ended. `cancelled` is deliberate, `interrupted` is Ctrl-C: neither is the server's.
STATUSES = ("ok", "error", "timeout", "wrong_length", "empty", "cancelled", "interrupted")


class Files:
    """A worker's two files."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._requests = (directory / f"requests.{worker}.jsonl").open(
            "w", encoding="utf-8", buffering=1
        )
        self._tokens = (directory / f"tokens.{worker}.bin").open("wb", buffering=0)
        self._chunks = bytearray()

    def chunk(self, since_ns: int, row: int, tokens: int) -> None:
        self._chunks += CHUNK.pack(since_ns, row, tokens)
        if len(self._chunks) >= FLUSH_BYTES:
            self._flush()

    def request(self, record: dict[str, Any]) -> None:
        self._requests.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._flush()
        self._tokens.close()
        self._requests.close()

    def _flush(self) -> None:
        self._tokens.write(self._chunks)
        self._chunks.clear()


@dataclass(slots=True)
class Request:
    """One request under way: a Sink. Times are nanoseconds of the run's clock."""

    row: int
    scheduled_ns: int
    release_ns: int  # when the run as a whole began
    wanted_tokens: int
    clock: Clock
    files: Files
    on_end: Callable[[Request, Ending | None, str], None]  # an ending, or a reason
    answer: str | None = None
    call: Call | None = None  # while it is open
    timers: tuple[asyncio.TimerHandle, ...] = ()
    permitted: bool = False
    permitted_ns: int = 0  # when --max-concurrency let it go; 0 without
    released_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    counted: int = 0
    first_tokens: int = 0
    chunks: int = 0
    max_gap_ns: int = 0
    retries: int = 0
    pieces: list[str] | None = None

    def released(self) -> None:
        if not self.released_ns:
            self.released_ns = self.clock()

    def retried(self) -> None:
        self.retries += 1

    def tokens(self, count: int, at_ns: int) -> None:
        if self.chunks:
            gap = at_ns - self.last_ns
            if gap > self.max_gap_ns:
                self.max_gap_ns = gap
        else:
            self.first_ns, self.first_tokens = at_ns, count
        self.last_ns = at_ns
        self.chunks += 1
        self.counted += count
        self.files.chunk(at_ns - self.release_ns, self.row, min(count, MOST_TOKENS))

    def text(self, piece: str) -> None:
        if self.answer is not None:
            self.pieces = self.pieces or []
            self.pieces.append(piece)

    def ended(self, ending: Ending) -> None:
        self.on_end(self, ending, "")

    def failed(self, reason: str) -> None:
        self.on_end(self, None, reason)

    @property
    def lag_ns(self) -> int:
        """How much later than it could have, the client let the request go."""
        return self.released_ns - max(self.scheduled_ns, self.permitted_ns)

    def verdict(self, ending: Ending, any_length: bool) -> tuple[str, str]:
        """Status and reason of a stream that ended well by its own account.

        A stream of no tokens, or of another length than asked for, is a failure: otherwise the
        server that answers least looks best. The server's count is believed, never text.
        """
        total = self.counted if ending.completion_tokens is None else ending.completion_tokens
        if not total or not self.chunks:
            return "empty", "the stream brought no token"
        stopped = any_length and ending.finish == "stop" and total < self.wanted_tokens
        if total != self.wanted_tokens and not stopped:
            return "wrong_length", f"{total} tokens came, {self.wanted_tokens} were asked for"
        return "ok", ""

    def record(self, status: str, reason: str, ending: Ending, ended_ns: int) -> dict[str, Any]:
        """The line of `requests.K.jsonl`. Seconds count from the release of the run."""

        def since(at_ns: int) -> float | None:
            return round((at_ns - self.release_ns) / 1e9, 9) if at_ns else None

        total = self.counted if ending.completion_tokens is None else ending.completion_tokens
        said: dict[str, Any] = {
            "row": self.row,
            "status": status,
            "scheduled_s": round((self.scheduled_ns - self.release_ns) / 1e9, 9),
            "released_s": since(self.released_ns),
            "lag_s": round(self.lag_ns / 1e9, 9) if self.released_ns else None,
            "first_token_s": since(self.first_ns),
            "last_token_s": since(self.last_ns),
            "ended_s": since(ended_ns),
            "wanted_tokens": self.wanted_tokens,
            "completion_tokens": total,
            "counted_tokens": self.counted,
            "first_chunk_tokens": self.first_tokens,
            "chunks": self.chunks,
            "max_gap_s": round(self.max_gap_ns / 1e9, 9) if self.chunks > 1 else None,
            "prompt_tokens": ending.prompt_tokens,
            "finish": ending.finish,
            "queue_s": ending.queue_s,
            "prefill_s": ending.prefill_s,
            "server_ttft_s": ending.server_ttft_s,
            "owner": ending.owner,
        }
        if self.permitted_ns:
            said["permitted_s"] = since(self.permitted_ns)
        if self.retries:
            said["retries"] = self.retries
        if self.answer is not None:
            said["answer_found"] = self.answer in "".join(self.pieces or ())
        if reason:
            said["error"] = reason
        return said
