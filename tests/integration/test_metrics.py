"""What running pools expose: the rows of the table, and values that follow from what was asked.

Every process of a pool of several ranks is scraped over HTTP. Expected values come from the
requests, the checkpoint and the programs, never from the services.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tknp.cli.ports import free_ports
from tknp.client import Client, request_for
from tknp.engine.batch import Batch, Delta
from tknp.engine.decode import Outcome
from tknp.errors import TknpError
from tknp.layout.derive import derive
from tknp.layout.program import Kind, sent_bytes
from tknp.layout.rank import Rank
from tknp.local import InProcessPool
from tknp.metrics.table import Service, of
from tknp.pool import Pool, open_pool
from tknp.rpc.ids import pack_ids
from tknp.v1.attention_owner_pb2 import ReserveRequest
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import Placement, RequestKey, Sampling
from tknp.v1.prefill_pb2 import PrefillRequest
from tknp.v1.prefill_pb2_grpc import PrefillStub
from tknp.worker.runtime import DecodeRuntime

LAYERS, KV_HEADS, HEAD_DIM, ITEM_BYTES = 5, 2, 16, 4
PAGE_SIZE, CHUNK = 16, 32
PROMPTS = (3, 16, 50, 100)
OUTPUTS = (5, 1, 17, 8)
ROLES: dict[str, tuple[Service, ...]] = {
    "decode-node": ("decode-root", "attention-owner"),
    "decode-root": ("decode-root",),
    "attention-owner": ("attention-owner",),
}
Deltas = Mapping[Rank, list[Delta]]
Families = dict[str, Metric]


@pytest.fixture
def pool_of(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> Callable[..., Pool]:
    """`pool_of(nodes=2, ...)` as `make_pool`, of a small model, every process with metrics."""

    def make(**settings: Any) -> Pool:
        path = random_checkpoint(
            layers=LAYERS, q_heads=4, kv_heads=KV_HEADS, head_dim=HEAD_DIM, tied=True
        )
        made = make_pool(
            path, page_size=PAGE_SIZE, prefill_chunk=CHUNK, kv_memory_bytes="512KiB",
            kv_transfer="grpc", **settings,
        ).config  # fmt: skip
        groups = (*made.nodes, *made.prefill)
        ports = iter(free_ports(1 + sum(len(group.addresses) for group in groups)))

        def own(count: int) -> tuple[str, ...]:
            return tuple(f"127.0.0.1:{next(ports)}" for _ in range(count))

        def served(group: Any) -> Any:
            return replace(group, metrics_addresses=own(len(group.addresses)))

        config = replace(
            made,
            metrics_address=own(1)[0],
            nodes=tuple(map(served, made.nodes)),
            prefill=tuple(map(served, made.prefill)),
        )
        return open_pool(config)

    return make


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> Deltas:
    """The steps that each rank is given, by rank, as they come."""
    seen: defaultdict[Rank, list[Delta]] = defaultdict(list)
    submit = DecodeRuntime.submit

    def recorded(self: DecodeRuntime, delta: Delta) -> Future[Outcome]:
        seen[self.rank].append(delta)
        return submit(self, delta)

    monkeypatch.setattr(DecodeRuntime, "submit", recorded)
    return seen


async def scrape(address: str) -> Families:
    """Families at `address` by name; counters' without _total, as the parser names them."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
            text: str = response.read().decode()
            return text

    return {f.name: f for f in text_string_to_metric_families(await asyncio.to_thread(get))}


def value(families: Families, name: str, **labels: str) -> float:
    """The one sample `name` with these label values."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def by_label(families: Families, family: str, label: str) -> dict[str, float]:
    """Values of `family`, summed over every label but `label`."""
    sums: defaultdict[str, float] = defaultdict(float)
    for sample in families[family].samples:
        sums[sample.labels[label]] += sample.value
    return dict(sums)


async def settled(pool: Pool) -> Families:
    """The coordinator's metrics once nothing is under way: the last page is back."""
    while True:
        found = await scrape(pool.config.metrics_address)
        if not any(by_label(found, "tknp_kv_usage_ratio", "node").values()):
            return found


async def generate(client: Client, prompt_tokens: int, output_tokens: int) -> int:
    """Number of tokens that came back."""
    prompt = [n % 256 for n in range(prompt_tokens)]
    sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
    tokens = 0
    async for response in client.generate(request_for(prompt, sampling)):
        tokens += len(response.token_ids) // 4
    return tokens


def check_rows(families: Families, *services: Service) -> None:
    """Exactly the rows of `services`: names, types, helps, labels."""
    rows = {metric.name.removesuffix("_total"): metric for metric in of(*services)}
    assert families.keys() == rows.keys()
    for name, family in families.items():
        row = rows[name]
        assert (family.type, family.documentation) == (row.kind, row.help)
        for sample in family.samples:
            bucket = {"le"} if sample.name.endswith("_bucket") else set()
            assert sample.labels.keys() == {*row.labels, *bucket}
            assert sample.value >= 0
            if name.endswith("_ratio"):
                assert sample.value <= 1


async def test_every_process_exposes_its_rows_and_true_values(
    pool_of: Callable[..., Pool], deltas: Deltas
) -> None:
    pool = pool_of(nodes=2, tp=2, prefill_tp=2)
    config = pool.config
    async with InProcessPool(pool), Client(config.coordinator) as client:
        warm = [await scrape(config.prefill[0].metrics_address(t)) for t in range(2)]
        tokens = await asyncio.gather(*map(generate, [client] * 4, PROMPTS, OUTPUTS))
        assert tokens == list(OUTPUTS)
        with pytest.raises(TknpError, match="max_tokens"):
            await generate(client, 3, 10_000)
        whole = await settled(pool)
        ranks = {
            Rank(n, t): await scrape(config.nodes[n].metrics_address(t))
            for n in range(2)
            for t in range(2)
        }
        prefill = [await scrape(config.prefill[0].metrics_address(t)) for t in range(2)]

    check_rows(whole, "coordinator")
    check_coordinator(pool, whole, steps=len(deltas[Rank(0, 0)]))
    for rank, found in ranks.items():
        check_rows(found, "decode-root", "attention-owner")
        check_rank(pool, rank, found, deltas[rank])
    for t in range(2):
        check_rows(prefill[t], "prefill")
        check_prefill(t, warm[t], prefill[t])


def check_prefill(t: int, before: Families, after: Families) -> None:
    def grown(name: str) -> float:
        return value(after, name, replica="0") - value(before, name, replica="0")

    assert grown("tknp_prefill_chunk_seconds_count") == sum(-(-n // CHUNK) for n in PROMPTS)
    assert value(after, "tknp_prefill_requests", rank=str(t)) == 0
    assert value(after, "tknp_ready", service="prefill") == 1
    assert not after["tknp_transfers_aborted"].samples
    if t > 0:
        return
    assert grown("tknp_prefill_tokens_total") == sum(PROMPTS)
    assert grown("tknp_prefill_compute_seconds_count") == len(PROMPTS)
    assert grown("tknp_transfer_seconds_count") == len(PROMPTS)
    kv_bytes = sum(PROMPTS) * LAYERS * 2 * KV_HEADS * HEAD_DIM * ITEM_BYTES
    assert grown("tknp_transfer_bytes_total") == kv_bytes


def check_coordinator(pool: Pool, found: Families, steps: int) -> None:
    requests, tokens = len(PROMPTS), sum(OUTPUTS)
    outcomes = {"completed": requests, "cancelled": 0, "refused": 1, "failed": 0}
    assert by_label(found, "tknp_requests", "outcome") == outcomes
    refusals = {"invalid_argument": 1, "resource_exhausted": 0, "unavailable": 0}
    assert by_label(found, "tknp_refusals", "reason") == refusals
    assert value(found, "tknp_prompt_tokens_total") == sum(PROMPTS)
    assert value(found, "tknp_generation_tokens_total") == tokens
    for name in (
        "time_to_first_token", "request_e2e", "normalized_latency", "request_queue",
        "request_prefill",
    ):  # fmt: skip
        assert value(found, f"tknp_{name}_seconds_count") == requests
    assert value(found, "tknp_inter_token_latency_seconds_count") == tokens - requests
    seconds = {
        name: value(found, f"tknp_{name}_seconds_sum")
        for name in (
            "time_to_first_token", "request_queue", "request_prefill", "request_e2e",
            "inter_token_latency",
        )
    }  # fmt: skip
    first = seconds["time_to_first_token"]
    assert first == pytest.approx(seconds["request_queue"] + seconds["request_prefill"])
    assert first + seconds["inter_token_latency"] == pytest.approx(seconds["request_e2e"])
    for name in ("waiting", "prefilling", "running"):
        assert value(found, f"tknp_requests_{name}") == 0
    assert by_label(found, "tknp_kv_usage_ratio", "node") == {"0": 0, "1": 0}
    capacity = (pool.pages(0, 0) - 1) * PAGE_SIZE
    assert by_label(found, "tknp_kv_capacity_tokens", "node") == {"0": capacity, "1": capacity}
    assert value(found, "tknp_epoch") == pool.config.epoch
    assert value(found, "tknp_steps_total") == steps
    assert value(found, "tknp_ready") == 1
    assert all(by_label(found, "tknp_coordinator_step_seconds", "part").values())


def check_rank(pool: Pool, rank: Rank, found: Families, deltas: list[Delta]) -> None:
    batch = Batch(pool.config.epoch, pool.layout, pool.config.max_batch)
    programs = []
    for delta in deltas:
        batch.apply(delta)
        programs.append(derive(pool.layout, batch.stream, batch.groups, rank))
    assert any(programs)
    exchanged = {
        "cross_node": sum(sent_bytes(program, cross_node=True) for program in programs),
        "node_local": sum(sent_bytes(program, cross_node=False) for program in programs),
        "collective": sum(
            op.operand_bytes for program in programs for op in program if op.kind is Kind.ALL_REDUCE
        ),
        "framing": 0,  # ranks are threads
    }
    assert by_label(found, "tknp_exchange_bytes", "scope") == exchanged
    assert all(exchanged[scope] for scope in ("cross_node", "collective"))
    place = {"node": str(rank.node), "rank": str(rank.t)}
    assert value(found, "tknp_step_seconds_count", **place) == len(deltas)
    parts = by_label(found, "tknp_step_part_seconds", "part")
    assert parts.keys() == {"dense", "attention", "exchange", "idle", "control"}
    assert sum(parts.values()) == pytest.approx(value(found, "tknp_step_seconds_sum", **place))
    assert all(parts[part] for part in ("dense", "attention", "exchange"))
    for role in ("root", "owner"):
        assert value(found, "tknp_step_part_seconds_total", role=role, part="idle") > 0
    assert value(found, "tknp_ready", service="decode-root") == 1
    assert value(found, "tknp_weight_bytes", **place) > 0
    assert value(found, "tknp_kv_bytes", **place) > 0
    if rank.t == 0:
        pages = by_label(found, "tknp_pages", "state")
        others = dict.fromkeys(("reserved", "receiving", "live", "quarantined"), 0)
        assert pages == {"free": pool.pages(rank.node, 0) - 1, **others}
    else:
        assert not found["tknp_pages"].samples


async def test_a_node_exposes_the_rows_of_its_role(pool_of: Callable[..., Pool]) -> None:
    roles = ("decode-root", "attention-owner", "decode-node")
    pool = pool_of(nodes=3, roles=roles)
    async with InProcessPool(pool), Client(pool.config.coordinator) as client:
        await generate(client, 20, 4)
        found = [await scrape(node.metrics_address(0)) for node in pool.config.nodes]
        capacity = by_label(
            await scrape(pool.config.metrics_address), "tknp_kv_capacity_tokens", "node"
        )
    for role, families in zip(roles, found, strict=True):
        check_rows(families, *ROLES[role])
    assert capacity.keys() == {"1", "2"}
    parts = [families["tknp_step_part_seconds"].samples for families in found]
    spent = [
        {(s.labels["role"], s.labels["part"]) for s in of_node if s.value} for of_node in parts
    ]
    assert ("owner", "attention") not in spent[0]
    assert ("root", "dense") in spent[0]
    assert {role for role, _ in spent[1]} == {"owner"}
    assert {("owner", "attention"), ("root", "dense")} <= spent[2]


async def test_reservations_and_cancelled_requests_show(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(nodes=1)
    ahead_s = [0.0]
    async with (
        InProcessPool(pool, lambda: time.monotonic() + ahead_s[0]),
        Client(pool.config.coordinator) as client,
        aio.insecure_channel(pool.config.nodes[0].addresses[0]) as channel,
    ):
        owner = pool.config.nodes[0].metrics_address(0)
        stream = client.generate(request_for([1, 2, 3], Sampling(max_tokens=360, ignore_eos=True)))
        async for response in stream:
            if response.token_ids:
                break
        busy = await scrape(pool.config.metrics_address)
        pages = by_label(await scrape(owner), "tknp_pages", "state")
        await stream.aclose()
        idle = await settled(pool)

        message = ReserveRequest(
            key=RequestKey(request_id="forgotten"), epoch=pool.config.epoch,
            tokens=2 * PAGE_SIZE, lease_s=30.0,
        )  # fmt: skip
        await AttentionOwnerStub(channel).Reserve(message)
        reserved = await scrape(owner)
        ahead_s[0] = 31.0
        expired = reserved
        while not value(expired, "tknp_leases_expired_total"):
            expired = await scrape(owner)

    need = -(-363 // PAGE_SIZE)
    assert value(busy, "tknp_requests_running") == 1
    assert value(busy, "tknp_kv_usage_ratio") == need / (pool.pages(0, 0) - 1)
    assert pages["live"] == need
    assert value(idle, "tknp_requests_running") == 0
    assert value(idle, "tknp_requests_total", outcome="cancelled") == 1
    assert value(idle, "tknp_request_e2e_seconds_count") == 0
    assert value(reserved, "tknp_leases_expired_total") == 0
    assert by_label(reserved, "tknp_pages", "state")["reserved"] == 2
    assert value(expired, "tknp_leases_expired_total") == 1
    assert by_label(expired, "tknp_pages", "state")["reserved"] == 0


async def test_transfers_to_a_lost_owner_count_as_aborted(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(nodes=1)
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    placement = Placement(layer_stop=LAYERS, head_stop=KV_HEADS, token_stop=PAGE_SIZE, pages=[1])
    async with (
        InProcessPool(pool),
        aio.insecure_channel(pool.config.prefill[0].addresses[0]) as channel,
    ):
        message = PrefillRequest(
            key=RequestKey(request_id="lost"), epoch=pool.config.epoch, token_ids=pack_ids([1, 2]),
            sampling=Sampling(max_tokens=1), placements=[placement], owners=[nobody],
        )  # fmt: skip
        with pytest.raises(aio.AioRpcError) as error:
            await PrefillStub(channel).Run(message)
        found = await scrape(pool.config.prefill[0].metrics_address(0))
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert by_label(found, "tknp_transfers_aborted", "reason") == {"unavailable": 1}
    assert value(found, "tknp_transfer_seconds_count") == 1  # the warm-up's
