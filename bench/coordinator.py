"""What the coordinator adds to a decode step: its own work between a result and the next step.

    python bench/coordinator.py                  128 running requests, a table
    python bench/coordinator.py --rows 512 --json

    parse    the sampler's StepResult off the wire
    take     tokens -> requests, ends, pages of finished steps
    launch   the next delta, as a message on the wire
    emit     an event for every client
    respond  detokenize and build every client's message; runs after the step is on its way

`exposed` is parse, take and launch: what stands between a result and the next step. Two steps are
in flight, so even that delays nothing unless it takes longer than a step. Requests come and go
as on a busy pool: each has `--tokens` of output, and another takes its place. No network is in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from harness.options import finish, parser
from harness.report import Row, Target

from tknp.coordinator.division import Division
from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Event, Request
from tknp.coordinator.scheduler import Scheduler, Taken
from tknp.engine.batch import Delta
from tknp.kv.holding import Key
from tknp.model.checkpoint import open_checkpoint
from tknp.model.detokenizer import Detokenizer
from tknp.model.tokenizer import load_tokenizer
from tknp.rpc.convert import delta_to
from tknp.rpc.ids import pack_ids
from tknp.sampling.params import SamplingParams
from tknp.v1.common_pb2 import Token
from tknp.v1.inference_pb2 import GenerateResponse
from tknp.v1.step_pb2 import StepResult

STEP_MS = 20.0
PROMPT_TOKENS = 512
NODES = 4
EXPOSED = ("parse", "take", "launch")
PARTS = (*EXPOSED, "emit", "respond")
MOST_OF_STEP = 0.05


@dataclass
class Stopwatch:
    """Milliseconds of each part of each step."""

    parts_ms: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PARTS})

    def lap(self, part: str, began: float) -> float:
        now = perf_counter()
        self.parts_ms[part].append((now - began) * 1e3)
        return now

    def median_ms(self, part: str) -> float:
        return statistics.median(self.parts_ms[part])


class Pool:
    """A scheduler that always has `rows` requests running, and the sampler's answers."""

    def __init__(self, rows: int, tokens: int) -> None:
        pages = 2 * rows * (PROMPT_TOKENS + tokens) // 64
        division = Division(64, (tuple(range(NODES)),))
        limits = Limits((pages,) * NODES, division, rows, rows, 1 << 20, 1 << 20, frozenset({2}))
        self.scheduler = Scheduler(limits, epoch=1)
        self.rows = rows
        self._tokens = tokens
        self._numbers = count()

    def fill(self) -> None:
        """Replace those that have ended. Lengths are spread, so that ends are too."""
        missing = self.rows - len(self.scheduler.live)
        for number in (next(self._numbers) for _ in range(missing)):
            length = self._tokens if number >= self.rows else 2 + number % (self._tokens - 1)
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            request = Request(Key(f"{number:032x}", 0), range(PROMPT_TOKENS), params, 0.0)
            self.scheduler.submit(request)
        for request in self.scheduler.place():
            self.scheduler.first_token(request, 7)

    def answer(self, delta: Delta) -> bytes:
        """What the sampling rank would send for the step of `delta`."""
        slots = sorted(self.scheduler.streams[0].in_flight[delta.step])
        tokens = [Token(token_id=100 + (slot + delta.step) % 1000) for slot in slots]
        return StepResult(epoch=1, step=delta.step, slots=slots, tokens=tokens).SerializeToString()


def measure(
    rows: int, tokens: int, steps: int, respond: Callable[[Sequence[Taken]], None]
) -> Stopwatch:
    """Run `steps` steps, two in flight."""
    pool, watch = Pool(rows, tokens), Stopwatch()
    flying: list[Delta] = []
    pool.fill()
    while (delta := pool.scheduler.delta()) is not None:
        flying.append(delta)
    for _ in range(steps):
        step = flying.pop(0)
        wire = pool.answer(step)
        at = perf_counter()
        result = StepResult.FromString(wire)
        sampled = list(result.tokens)
        ids = [None if token.error else token.token_id for token in sampled]
        at = watch.lap("parse", at)
        taken = pool.scheduler.tokens(result.step, list(result.slots), ids)
        pool.scheduler.finished(result.step)
        at = watch.lap("take", at)
        while (delta := pool.scheduler.delta()) is not None:
            delta_to(delta).SerializeToString()
            flying.append(delta)
        at = watch.lap("launch", at)
        for row, request, reason in taken:
            request.events.put_nowait(Event((sampled[row],), reason))
        at = watch.lap("emit", at)
        respond(taken)
        watch.lap("respond", at)
        pool.fill()
    return watch


def responder(model: str) -> Callable[[Sequence[Taken]], None]:
    """Takes each request's event and builds the message that its client gets."""
    tokenizer = load_tokenizer(open_checkpoint(model))
    streams: dict[Request, Detokenizer] = {}

    def respond(taken: Sequence[Taken]) -> None:
        for _, request, reason in taken:
            stream = streams.get(request)
            if stream is None:
                stream = streams[request] = tokenizer.stream()
            event = request.events.get_nowait()
            ids = [token.token_id for token in event.tokens]
            text = "".join(map(stream.push, ids))
            GenerateResponse(token_ids=pack_ids(ids), text=text).SerializeToString()
            if reason is not None:
                del streams[request]

    return respond


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=128, help="running requests")
    arguments.add_argument("--tokens", type=int, default=200, help="output of each request")
    arguments.add_argument("--model", default="smollm2", help="whose tokenizer clients use")
    options = arguments.parse_args()
    steps = 40 if options.quick else 400
    watch = measure(options.rows, options.tokens, steps, responder(options.model))
    exposed = statistics.median(map(sum, zip(*(watch.parts_ms[p] for p in EXPOSED), strict=True)))
    name = f"{options.rows} running requests"
    bound = Target("ratio", most=MOST_OF_STEP)
    rows = [
        Row(f"{name}: exposed, to a step of {STEP_MS:g} ms", exposed, "ms", STEP_MS, bound),
        *(Row(f"{name}: {part}", watch.median_ms(part), "ms") for part in PARTS),
    ]
    finish("Coordinator", rows, options)


if __name__ == "__main__":
    main()
