"""One stream of tokens that outlives the pool it began at.

    ids, sampling -> pool A: tokens 0..i | lost
                     pool B: prompt, tokens 0..i given -> tokens i+1..n, finish

Draws depend on (seed, position) alone, so the seed is fixed here and the second pool goes on as the
first would have. Nothing is given out twice: a pool that is told of tokens streams what follows
them. What is not the pool's loss (a refusal, a deadline, a failed request) ends the stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tknp.client import received_ids
from tknp.errors import DeadlineExceeded, ProtocolError, TknpError
from tknp.gateway.losses import Losses
from tknp.gateway.pools import Pools
from tknp.rpc.ids import pack_ids
from tknp.v1.common_pb2 import FinishReason, Logprobs, Sampling
from tknp.v1.inference_pb2 import Finish, GenerateRequest

log = logging.getLogger(__name__)
_SLACK_S = 5.0  # the pool ends an overdue request itself, and says so
WHOLE = 64
"""Tokens of a pool's message where the client wants one answer: what a lost pool costs it, too."""
UNREAD_S = 10.0
"""How long after its deadline an answer that its client does not read is given up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came together: text that goes with `token_ids`, and on the last piece the `finish`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish: Finish | None = None


@dataclass(frozen=True)
class Ask:
    """A request, ready to be sent to any pool of `model`. `sampling` has seed and max_tokens set.

    `deadline_s`: on the clock of `time.monotonic`. `metadata`: of the call, such as its trace.
    `interval`: tokens that may come together (`stream_interval` of inference.proto).
    """

    request_id: str
    model: str
    prompt: Sequence[int]
    sampling: Sampling
    stop: Sequence[str]
    priority: int
    deadline_s: float
    metadata: tuple[tuple[str, str], ...] = ()
    interval: int = 0


class Generations:
    """Runs requests on `pools`. `replayed` is called with the reason each time one is sent again.

    `replays`: at most, a request; `wait_s`: for a pool, each time.
    """

    def __init__(
        self, pools: Pools, replays: int, wait_s: float, replayed: Callable[[str], None]
    ) -> None:
        self._pools = pools
        self._replays = replays
        self._wait_s = wait_s
        self._replayed = replayed

    def losses(self, model: str, deadline_s: float = float("inf")) -> Losses:
        """Of one request that has been let in."""
        return Losses(self._pools, model, self._replays, self._wait_s, deadline_s)

    async def run(self, ask: Ask) -> AsyncIterator[Piece]:
        """Pieces of `ask`, the last with its finish. Raises TknpError; close it to cancel."""
        generated: list[int] = []
        losses = self.losses(ask.model, ask.deadline_s)
        upstream = await losses.first()
        while True:
            had = len(generated)
            try:
                with upstream.taken():
                    request = _request(ask, generated)
                    allowed_s = request.timeout_s + _SLACK_S
                    stream = upstream.client.generate(request, allowed_s, ask.metadata)
                    async with aclosing(stream) as responses:
                        async for response in responses:
                            ids = received_ids(response.token_ids)
                            generated += ids
                            if response.HasField("finish"):
                                finish = _whole(response.finish, ask, generated)
                                yield _piece(response.text, ids, response.logprobs, finish)
                                return
                            if ids or response.text:
                                yield _piece(response.text, ids, response.logprobs)
                raise ProtocolError("the stream ended without a finish reason")
            except TknpError as error:
                upstream = await losses.next(upstream, error, brought=len(generated) > had)
                log.warning("request %s goes on elsewhere: %s", ask.request_id, error)
                self._replayed("started" if generated else "not_started")


def _request(ask: Ask, generated: Sequence[int]) -> GenerateRequest:
    left_s = ask.deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded(f"{len(generated)} tokens had come when the time was up")
    request = GenerateRequest(
        request_id=ask.request_id,
        token_ids=pack_ids(ask.prompt),
        sampling=ask.sampling,
        stop=ask.stop,
        priority=ask.priority,
        timeout_s=left_s,
        stream_interval=ask.interval,
    )
    if generated:
        request.generated_token_ids = pack_ids(generated)
    return request


def _piece(
    text: str, ids: Sequence[int], logprobs: Sequence[Logprobs], finish: Finish | None = None
) -> Piece:
    return Piece(text, tuple(ids), tuple(logprobs), finish)


def _whole(finish: Finish, ask: Ask, generated: Sequence[int]) -> Finish:
    """`finish` of the last pool, counting what earlier ones generated."""
    found = Finish()
    found.CopyFrom(finish)
    found.prompt_tokens = len(ask.prompt)
    found.completion_tokens = len(generated)
    return found


def finish_name(finish: Finish) -> str:
    """OpenAI's word for the reason."""
    return "length" if finish.reason == FinishReason.FINISH_REASON_LENGTH else "stop"
