"""Every strategy's programs on the engine alone: ids equal transformers', whatever the layout.

Ranks are threads that exchange over a LocalHub and are driven by delta messages; there are no
services. Instead of a prefill, the keys and values of transformers' own cache are written into the
pages of every owner, each its tokens, layers and heads.

One file, as all of it drives the same engine: the ids of every layout, wide and growing rows, the
bits of logits over either data plane, and how streams end with a peer.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tknp.engine.backend import choose_backend
from tknp.engine.batch import Admit, Delta, Grow
from tknp.engine.decode import TORCH_DTYPES, DecodeRank, Outcome
from tknp.engine.lanes import Lanes
from tknp.engine.thread import EngineThread
from tknp.errors import TknpError
from tknp.kernels.library import available
from tknp.kernels.mailbox import NativeLane
from tknp.kv.holding import Key
from tknp.kv.storage import KvStorage
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.rank import Rank
from tknp.layout.shares import Shares
from tknp.layout.strategy import Strategy
from tknp.model.checkpoint import open_checkpoint
from tknp.model.dense import BlocksDense
from tknp.sampling.history import RowState
from tknp.sampling.params import SamplingParams
from tknp.sampling.sampler import Sampled, Sampler
from tknp.transport import shared_memory
from tknp.transport.base import Transport
from tknp.transport.local import LocalHub

PAGES, ROWS = 80, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, logprobs=4)
CPU = torch.device("cpu")


@dataclass
class Request:
    prompt: list[int]
    tokens: int
    shares: Shares
    owners: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class Oracle:
    """transformers: greedy ids, and keys and values of a prompt."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def cache(self, prompt: Sequence[int]) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The first token, and per layer K and V [heads, tokens, head size]."""
        out = self.model(torch.tensor([list(prompt)]), use_cache=True)
        layers = [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]
        return int(out.logits[0, -1].argmax()), layers


class Engine:
    """All ranks of a layout, as threads; `shared`: over shared memory, by compiled lanes."""

    def __init__(self, layout: Layout, path: Path, oracle: Oracle, *, shared: bool = False) -> None:
        self.layout, self.oracle = layout, oracle
        dtype = TORCH_DTYPES[layout.dtype]
        # The kernels, which bfloat16 runs on, have pages of 16 tokens at least.
        self.page = 4 if dtype == torch.float32 else 16
        self.transports = _shared(layout) if shared else _local(layout)
        checkpoint = open_checkpoint(path)
        self.storages: dict[Rank, KvStorage] = {}
        self.ranks: dict[Rank, DecodeRank] = {}
        for rank in layout.ranks():
            heads = layout.heads(rank)
            backend = choose_backend(
                heads, page_size=self.page, max_positions=512, dtype=dtype, device=CPU
            )
            shards = layout.shards(rank)
            parts = [backend.dense(checkpoint.load(s, dtype)) for s in shards]
            layers = layout.kv_layers(rank)
            if layers:
                self.storages[rank] = KvStorage(
                    len(layers), PAGES, len(layout.kv_heads(rank)), self.page,
                    layout.config.head_dim, dtype,
                )  # fmt: skip
            dense = parts[0] if len(parts) == 1 else BlocksDense(shards, parts) if parts else None
            self.ranks[rank] = DecodeRank(
                layout, rank, self.transports[rank], dense=dense,
                attention=backend.decode_attention() if layers else None,
                storage=self.storages.get(rank),
                epoch=1, max_batch=ROWS, device=CPU,
            )  # fmt: skip
        self.lanes = {rank: Lanes(engine, CPU) for rank, engine in self.ranks.items()}
        self.threads = {rank: EngineThread(str(rank)) for rank in self.ranks}
        self.free = {node: iter(range(1, PAGES)) for node in range(layout.nodes)}
        self.pages: dict[tuple[int, int, int], tuple[int, ...]] = {}  # stream, slot, node
        self.running: dict[int, dict[int, Request]] = {s: {} for s in range(layout.streams)}
        self.steps = [0] * layout.streams

    def close(self) -> None:
        for thread in self.threads.values():
            thread.close(10)
        for transport in self.transports.values():
            transport.close()

    def request(
        self, prompt: Sequence[int], tokens: int, owners: tuple[int, ...], interleave: int = 3
    ) -> Request:
        divided = owners if self.layout.divides == "tokens" else owners[:1]
        shares = Shares(divided, len(prompt), interleave)
        return Request(list(prompt), tokens, shares, owners)

    def admit(self, stream: int, slot: int, request: Request) -> Admit:
        """Write the prompt's KV to its owners."""
        first, cache = self.oracle.cache(request.prompt)
        request.ids = [first]
        self.running[stream][slot] = request
        last = len(request.prompt) + request.tokens
        for node in request.owners:
            self.reserve(stream, slot, node, request.shares, last)
            span = range(len(request.prompt))
            if len(request.shares.owners) > 1:
                span = request.shares.prompt_span(request.shares.owners.index(node))
            for t in range(self.layout.tp):
                self._write(Rank(node, t), self.pages[stream, slot, node], span, cache)
        return Admit(
            slot, Key(str(slot), 1), request.owners, request.shares, len(request.prompt), first,
            GREEDY,
        )  # fmt: skip

    def reserve(self, stream: int, slot: int, node: int, shares: Shares, tokens: int) -> None:
        """Pages on `node` for what it keeps of `tokens` tokens, behind those it has."""
        kept = tokens
        if len(shares.owners) > 1:
            kept = shares.length(shares.owners.index(node), tokens)
        had = self.pages.get((stream, slot, node), ())
        more = max(-(-kept // self.page), 1) - len(had)
        self.pages[stream, slot, node] = had + tuple(
            itertools.islice(self.free[node], max(more, 0))
        )

    def _write(self, rank: Rank, pages: tuple[int, ...], span: range, cache: Any) -> None:
        heads = self.layout.kv_heads(rank)
        for index, layer in enumerate(self.layout.kv_layers(rank)):
            for kept, source in zip(self.storages[rank].layer(index), cache[layer], strict=True):
                for slot, token in enumerate(span):
                    page, offset = pages[slot // self.page], slot % self.page
                    kept[page, :, offset] = source[heads.start : heads.stop, token]

    def launch(
        self,
        stream: int,
        ends: Sequence[int] = (),
        admits: Sequence[Admit] = (),
        grows: Sequence[Grow] = (),
        silent: Sequence[Rank] = (),
    ) -> dict[Rank, Any]:
        """Send a step to every member of `stream` but `silent`."""
        delta = Delta(1, stream, self.steps[stream], tuple(ends), (), ())
        self.steps[stream] += 1
        futures = {}
        for rank in self.layout.ranks():
            if rank.node not in self.layout.members(stream) or rank in silent:
                continue

            def filled(item: Any, node: int = rank.node) -> Any:
                pages = self.pages.get((stream, item.slot, node), ())
                return type(item)(**{**vars(item), "pages": pages})

            mine = Delta(
                delta.epoch, stream, delta.step, delta.ends,
                tuple(map(filled, admits)), tuple(map(filled, grows)),
            )  # fmt: skip
            futures[rank] = self.lanes[rank].submit(mine)
            self.threads[rank].submit(self.lanes[rank].run)
        return futures

    def take(self, stream: int, futures: dict[Rank, Any]) -> None:
        """Wait for a step, and append what it drew."""
        outcomes: dict[Rank, Outcome] = {rank: f.result(60) for rank, f in futures.items()}
        drawn = outcomes[Rank(self.layout.sampler(stream), 0)]
        assert not drawn.errors
        assert all(not o.slots for rank, o in outcomes.items() if o is not drawn)
        rows = zip(drawn.slots, drawn.tokens, drawn.logprobs, strict=True)
        for slot, token, logprobs in rows:
            self.running[stream][slot].ids.append(token)
            self.running[stream][slot].logprobs.append(logprobs)

    def serve(self, arrivals: Sequence[tuple[int, int, int, Request]]) -> None:
        """Run (step, stream, slot, request) to their ends, streams side by side, two in flight."""
        waiting = sorted(arrivals, key=lambda a: a[0])
        flying: dict[int, list[dict[Rank, Any]]] = {s: [] for s in self.running}
        launched = {s: dict[int, int]() for s in self.running}  # slot -> tokens asked for
        for step in itertools.count():
            for stream, running in self.running.items():
                asked = launched[stream]
                ends = [slot for slot, count in asked.items() if count == running[slot].tokens]
                joins = [
                    a for a in waiting if a[1] == stream and a[0] <= step and a[2] not in asked
                ]
                admits = [self.admit(stream, slot, request) for _, _, slot, request in joins]
                waiting = [a for a in waiting if a not in joins]
                for slot in ends:
                    del asked[slot]
                asked.update(dict.fromkeys([slot for _, _, slot, _ in joins], 1))
                for slot in asked:
                    asked[slot] += 1
                if asked or ends:
                    flying[stream].append(self.launch(stream, ends, admits))
            for stream, flights in flying.items():
                while len(flights) > (1 if launched[stream] else 0):
                    self.take(stream, flights.pop(0))
            if not waiting and not any(launched.values()):
                return


def _local(layout: Layout) -> dict[Rank, Transport]:
    hub = LocalHub(layout.nodes, layout.tp, timeout_s=60)
    return {rank: hub.transport(rank) for rank in layout.ranks()}


def _shared(layout: Layout) -> dict[Rank, Transport]:
    name, ranks = secrets.token_hex(8), list(layout.ranks())

    def connect(rank: Rank) -> Transport:
        return shared_memory.connect(
            rank, layout.nodes, layout.tp, pool=name, epoch=1, timeout_s=60,
            streams=layout.streams, lanes=NativeLane,
        )  # fmt: skip

    with ThreadPoolExecutor(len(ranks)) as meeting:
        return dict(zip(ranks, meeting.map(connect, ranks), strict=True))


@pytest.fixture(scope="module")
def engines(random_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    """`engines(nodes, tp, strategy, model={...}, **options)`."""
    made: list[Engine] = []
    oracles: dict[Path, Oracle] = {}

    def make(
        nodes: int, tp: int, strategy: str, model: Any = None, dtype: Any = "float32",
        **options: Any,
    ) -> Engine:  # fmt: skip
        path = random_checkpoint(**{"layers": 4, **(model or {})})
        config = open_checkpoint(path).config
        specs = options.pop("specs", None) or [NodeSpec(1 << 30)] * nodes
        shared = options.pop("shared", False)
        layout = make_layout(config, dtype, tp, specs, strategy=Strategy(strategy), **options)
        oracle = oracles.setdefault(path, Oracle(path))
        made.append(Engine(layout, path, oracle, shared=shared))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(n)] for i, n in enumerate((5, 1, 17, 2, 9, 3))]
TOKENS = (12, 3, 7, 20, 2, 9)

CASES = {
    "tknp-1x1": (1, 1, "tknp", {}),
    "tknp-2x1": (2, 1, "tknp", {}),
    "tknp-3x2": (3, 2, "tknp", {}),
    "tknp-4x1-tied": (4, 1, "tknp", {"model": {"tied": True}}),
    "tknp-2x4-hkv1": (2, 4, "tknp", {"model": {"kv_heads": 1}}),
    "tknp-microbatches": (2, 1, "tknp", {"microbatches": 2}),
    "tknp-copies": (2, 2, "tknp", {"copies": 2}),
    "tknp-copies-4": (4, 1, "tknp", {"copies": 2, "model": {"tied": True}}),
    "tknp-roles": (
        3, 1, "tknp",
        {"specs": [NodeSpec(1, owner=False), NodeSpec(1), NodeSpec(1, root=False)]},
    ),
    "dp-2x2": (2, 2, "dp", {}),
    "pp-serial": (2, 2, "pp", {"microbatches": 1}),
    "pp-overlapped": (3, 1, "pp", {}),
    "tp-1x4": (1, 4, "tp", {}),
    "tp-1x2-tied": (1, 2, "tp", {"model": {"tied": True}}),
    "dcp-2x2": (2, 2, "dcp", {}),
    "dcp-4x1-hkv2": (4, 1, "dcp", {}),
    "helix-2x2": (2, 2, "helix", {}),
    "helix-3x1": (3, 1, "helix", {"model": {"q_heads": 3, "kv_heads": 3}}),
    "helix-2x2-overlap": (2, 2, "helix", {"overlap": 3, "model": {"tied": True}}),
    "helix-2x1-heads-cut": (2, 1, "helix", {"model": {"q_heads": 3, "kv_heads": 3}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_gives_the_oracles_ids(
    case: str, engines: Callable[..., Engine], random_greedy: Callable[[Path], Any],
    random_checkpoint: Callable[..., Path],
) -> None:  # fmt: skip
    """Requests join and leave at different steps, two steps in flight."""
    nodes, tp, strategy, options = CASES[case]
    options = dict(options)
    model = options.pop("model", None)
    engine = engines(nodes, tp, strategy, model, **options)
    layout = engine.layout
    greedy = random_greedy(random_checkpoint(**{"layers": 4, **(model or {})}))
    arrivals = []
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True)):
        stream = i % layout.streams
        owners = layout.owners[stream]
        if layout.divides == "tokens" and not layout.spread:
            owners = (owners[i % len(owners)],)
        arrivals.append((2 * i, stream, i, engine.request(prompt, tokens, owners)))
    engine.serve(arrivals)
    for (_, _, _, request), prompt, tokens in zip(arrivals, PROMPTS, TOKENS, strict=True):
        assert request.ids == greedy(prompt, tokens)


def test_wide_rows_beside_narrow_ones(
    engines: Callable[..., Engine], random_greedy: Callable[[Path], Any],
    random_checkpoint: Callable[..., Path],
) -> None:  # fmt: skip
    """Widths 1, 2 and 3 in one batch, owners in any order, prompts below the shard count."""
    engine = engines(3, 2, "tknp")
    greedy = random_greedy(random_checkpoint(layers=4))
    owners = [(0, 1, 2), (2, 0), (1,), (1, 2, 0), (2,), (2, 1)]
    arrivals = [
        (i, 0, i, engine.request(prompt, tokens, mine, interleave=1 + i % 3))
        for i, (prompt, tokens, mine) in enumerate(zip(PROMPTS, TOKENS, owners, strict=True))
    ]
    engine.serve(arrivals)
    for (_, _, _, request), prompt, tokens in zip(arrivals, PROMPTS, TOKENS, strict=True):
        assert request.ids == greedy(prompt, tokens)


@pytest.mark.parametrize(("nodes", "tp", "strategy"), [(2, 1, "tknp"), (3, 1, "tknp")])
def test_a_request_that_outgrows_its_owner_gets_another(
    engines: Callable[..., Engine], random_greedy: Callable[[Path], Any],
    random_checkpoint: Callable[..., Path], nodes: int, tp: int, strategy: str,
) -> None:  # fmt: skip
    """Its pages grow first; then every further node appends in turn, another row beside it."""
    engine = engines(nodes, tp, strategy)
    greedy = random_greedy(random_checkpoint(layers=4))
    prompt, neighbour, tokens = PROMPTS[0], PROMPTS[2], 6 + 8 * nodes
    grown, beside = engine.request(prompt, 1, (0,)), engine.request(neighbour, tokens, (1,))
    admits = [engine.admit(0, slot, r) for slot, r in enumerate((grown, beside))]
    engine.take(0, engine.launch(0, admits=admits))
    shares = grown.shares
    engine.reserve(0, 0, 0, shares, len(prompt) + 8)
    engine.take(0, engine.launch(0, grows=[Grow(0, shares)]))
    for node in range(1, nodes):
        for _ in range(6):
            engine.take(0, engine.launch(0))
        position = len(prompt) + len(grown.ids) - 1
        shares = shares.grown((node,), position, tuple(range(node + 1)) if node > 1 else (1,))
        for owner in shares.owners:
            engine.reserve(0, 0, owner, shares, len(prompt) + tokens)
        engine.take(0, engine.launch(0, grows=[Grow(0, shares)]))
    while len(grown.ids) < tokens:
        engine.take(0, engine.launch(0))
    assert grown.ids == greedy(prompt, tokens)
    assert beside.ids[: len(grown.ids)] == greedy(neighbour, tokens)


SAME_TP = {
    1: (
        (1, "tknp", 1, {}), (1, "tknp", 2, {}), (3, "tknp", 2, {}), (2, "tknp", 1, {"copies": 2}),
        (2, "tknp", 1, {"microbatches": 2}), (2, "pp", 1, {}), (2, "dp", 1, {}),
        (2, "tknp", 1, {"shared": True}), (2, "tknp", 1, {"microbatches": 2, "shared": True}),
        (4, "tknp", 1, {"copies": 2, "shared": True}), (2, "pp", 1, {"shared": True}),
        (3, "tknp", 2, {"microbatches": 3, "shared": True}),
    ),
    2: (
        (1, "tknp", 1, {}), (2, "tknp", 2, {}), (1, "tp", 1, {}), (2, "pp", 1, {"microbatches": 1}),
    ),
}  # fmt: skip


@pytest.fixture
def logits_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[torch.Tensor]]:
    """`logits_from(position)`: [vocabulary] of all rows drawn there or further since last asked."""
    seen: list[tuple[int, torch.Tensor]] = []
    sample = Sampler.sample

    def watched(self: Sampler, logits: torch.Tensor, rows: Sequence[RowState]) -> Sampled:
        seen.extend(zip([row.position for row in rows], logits.clone(), strict=True))
        return sample(self, logits, rows)

    def found(position: int) -> list[torch.Tensor]:
        kept = [logits for at, logits in sorted(seen, key=lambda row: row[0]) if at >= position]
        seen.clear()
        return kept

    monkeypatch.setattr(Sampler, "sample", watched)
    return found


@pytest.mark.parametrize("tp", SAME_TP)
def test_rows_of_one_owner_are_equal_to_the_bit_under_every_strategy(
    tp: int, engines: Callable[..., Engine], threads: Callable[[int], None],
    logits_from: Callable[[int], list[torch.Tensor]],
) -> None:  # fmt: skip
    """Logits of bfloat16 on the kernels: alone, in other batches, beside wide rows, on other nodes,
    by one thread and by two. No other request comes as far as the prompt of the watched one.
    """
    found = available()
    if not found:
        pytest.skip(found.reason)
    seen = []
    for nodes, strategy, count, options in SAME_TP[tp]:
        threads(count)
        engine = engines(nodes, tp, strategy, dtype="bfloat16", **options)
        layout = engine.layout
        stream = layout.streams - 1
        own = layout.owners[stream] if strategy in ("pp", "tp") else layout.owners[stream][-1:]
        watched = engine.request(PROMPTS[2], 10, own)
        arrivals = [(1, stream, 0, watched)]
        if nodes > 1:
            arrivals.append((0, stream, 1, engine.request(PROMPTS[0], 6, own)))
        if stream > 0:
            beside = layout.owners[0] if strategy == "pp" else layout.owners[0][:1]
            arrivals.append((0, 0, 0, engine.request(PROMPTS[1], 8, beside)))
        if (nodes, strategy) == (3, "tknp"):
            arrivals.append((4, stream, 2, engine.request(PROMPTS[3], 6, (0, 2))))
        engine.serve(arrivals)
        logits = torch.stack(logits_from(len(PROMPTS[2])))
        assert logits.shape == (9, layout.config.vocab_size)
        seen.append((watched.ids, watched.logprobs, logits))
    ids, logprobs, logits = seen[0]
    assert None not in logprobs
    for others in seen[1:]:
        assert others[:2] == (ids, logprobs)
        assert torch.equal(others[2], logits)


@pytest.mark.parametrize("strategy", ["tknp", "pp"])
def test_steps_of_all_streams_end_with_a_peer_that_is_lost(
    engines: Callable[..., Engine], strategy: str
) -> None:
    """Also those in the middle of whole layers, whose turn it isn't, and those that come later."""
    found = available()
    if not found:
        pytest.skip(found.reason)
    engine = engines(2, 1, strategy, dtype="bfloat16", microbatches=2, shared=True)
    lost = Rank(1, 0)
    steps = []
    for stream in (0, 1):
        owners = engine.layout.owners[stream] if strategy == "pp" else (1,)
        admit = engine.admit(stream, 0, engine.request(PROMPTS[0], 6, owners))
        steps += engine.launch(stream, (), [admit], silent=[lost]).values()
        steps += engine.launch(stream, silent=[lost]).values()
    engine.transports[lost].abort("gone")
    for step in steps:
        with pytest.raises(TknpError, match="gone"):
            step.result(60)
