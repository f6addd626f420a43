"""The table: each metric that any service exposes, once. Pure.

Names are what dashboards, alerts and autoscalers hold on to. `_ratio` lies in 0..1, times are
`_seconds`, and `_total` ends counters and nothing else. A value has one home: the coordinator
exposes what it decides, a rank what it measures, and none repeats another's, so that sums over all
targets count nothing twice.

A decode node runs decode-root and attention-owner in one process and exposes the rows of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Service = Literal["gateway", "coordinator", "prefill", "decode-root", "attention-owner"]

GATEWAY: tuple[Service, ...] = ("gateway",)
COORDINATOR: tuple[Service, ...] = ("coordinator",)
PREFILL: tuple[Service, ...] = ("prefill",)
OWNER: tuple[Service, ...] = ("attention-owner",)
RANK: tuple[Service, ...] = ("decode-root", "attention-owner")
ALL: tuple[Service, ...] = (*GATEWAY, *COORDINATOR, *PREFILL, *RANK)

# Long prompts take minutes, short ones milliseconds.
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
# Fine around the 20 to 100 ms that latency targets are set at.
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2,
            0.3, 0.5, 1, 2.5, 5, 10)  # fmt: skip
_WORK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


@dataclass(frozen=True)
class Metric:
    """One row. `buckets`: upper bounds of a histogram without the infinite one, ascending."""

    name: str
    kind: Kind
    help: str
    services: tuple[Service, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """Unit by the name's ending; empty where things are counted."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in ("seconds", "bytes", "tokens", "ratio") else ""


# --- every service ------------------------------------------------------------------------------

BUILD_INFO = Metric(
    "tknp_build_info", "gauge", "1; the version is in the label.", ALL, ("service", "version")
)
READY = Metric(
    "tknp_ready", "gauge",
    "1 while this process serves: weights loaded, peers joined; at the coordinator, warm steps "
    "run.", ALL, ("service",),
)  # fmt: skip

# --- requests -----------------------------------------------------------------------------------

TIME_TO_FIRST_TOKEN = Metric(
    "tknp_time_to_first_token_seconds", "histogram",
    "TTFT: from a request's arrival until its first token is handed to its stream.",
    COORDINATOR, buckets=_WAIT_S,
)  # fmt: skip
INTER_TOKEN_LATENCY = Metric(
    "tknp_inter_token_latency_seconds", "histogram",
    "ITL: between two tokens of a request, one observation for each token after the first.",
    COORDINATOR, buckets=_TOKEN_S,
)  # fmt: skip
REQUEST_E2E = Metric(
    "tknp_request_e2e_seconds", "histogram",
    "From a request's arrival until its last token; completed requests only.",
    COORDINATOR, buckets=_REQUEST_S,
)  # fmt: skip
NORMALIZED_LATENCY = Metric(
    "tknp_normalized_latency_seconds", "histogram",
    "End-to-end seconds of a completed request over the number of its output tokens.",
    COORDINATOR, buckets=_TOKEN_S,
)  # fmt: skip
REQUEST_QUEUE = Metric(
    "tknp_request_queue_seconds", "histogram",
    "From a request's arrival until it is first placed on an owner; observed at its first token.",
    COORDINATOR, buckets=_WAIT_S,
)  # fmt: skip
REQUEST_PREFILL = Metric(
    "tknp_request_prefill_seconds", "histogram",
    "From placement to the first token: reserving pages, prefill with its own queue, KV transfer.",
    COORDINATOR, buckets=_WAIT_S,
)  # fmt: skip
REQUESTS_WAITING = Metric(
    "tknp_requests_waiting", "gauge", "Requests in the queue.", COORDINATOR
)  # fmt: skip
REQUESTS_PREFILLING = Metric(
    "tknp_requests_prefilling", "gauge",
    "Requests with an owner whose first token is still to come.", COORDINATOR,
)  # fmt: skip
REQUESTS_RUNNING = Metric(
    "tknp_requests_running", "gauge",
    "Requests in the running batch, those that join it next among them.", COORDINATOR,
)  # fmt: skip
REQUESTS = Metric(
    "tknp_requests_total", "counter",
    "Requests that have ended: completed, cancelled, refused or failed.",
    COORDINATOR, ("outcome",),
)  # fmt: skip
REFUSALS = Metric(
    "tknp_refusals_total", "counter",
    "Requests refused, by the gRPC status that the client got: invalid_argument (can never be "
    "served), resource_exhausted (the queue is full), unavailable (the pool doesn't serve), ...",
    COORDINATOR, ("reason",),
)  # fmt: skip
PREEMPTIONS = Metric(
    "tknp_preemptions_total", "counter",
    "Requests that made room for an older one and were computed again (reserve_ratio below 1).",
    COORDINATOR,
)  # fmt: skip
PROMPT_TOKENS = Metric(
    "tknp_prompt_tokens_total", "counter",
    "Prompt tokens of requests that got their first token.", COORDINATOR,
)  # fmt: skip
GENERATION_TOKENS = Metric(
    "tknp_generation_tokens_total", "counter", "Tokens handed to requests' streams.", COORDINATOR
)

# --- the pool -----------------------------------------------------------------------------------

KV_USAGE = Metric(
    "tknp_kv_usage_ratio", "gauge",
    "Share of an owner's pages that requests have, or quarantine withholds, 0 to 1.",
    COORDINATOR, ("node",),
)  # fmt: skip
KV_CAPACITY = Metric(
    "tknp_kv_capacity_tokens", "gauge",
    "Tokens whose KV fits on an owner.", COORDINATOR, ("node",),
)  # fmt: skip
EPOCH = Metric(
    "tknp_epoch", "gauge", "Number of the decode membership that is served.", COORDINATOR
)
STEPS = Metric("tknp_steps_total", "counter", "Steps launched.", COORDINATOR)
COORDINATOR_STEP = Metric(
    "tknp_coordinator_step_seconds_total", "counter",
    "The coordinator's own work on steps. launch: from a step's result until what it allows is "
    "sent, which ranks may wait for. streams: handing its tokens on, which none waits for.",
    COORDINATOR, ("part",),
)  # fmt: skip

# --- decode ranks -------------------------------------------------------------------------------

STEP = Metric(
    "tknp_step_seconds", "histogram",
    "One step on one rank, from its delta to its last operation. A rank is idle between steps for "
    "what the sum of this leaves of the time.",
    RANK, ("node", "rank"), _WORK_S,
)  # fmt: skip
STEP_PART = Metric(
    "tknp_step_part_seconds_total", "counter",
    "Where the seconds of steps went; the parts of all roles add up to tknp_step_seconds. "
    "dense: embedding, projections, MLP, head, sampling. attention: rotary, append, attention. "
    "exchange: posting and copying scatters, gathers, handoffs, ids, and all-reduces whole. idle: "
    "waiting for a peer to send or to take rows. control: the delta, page tables, the program. "
    "role: root for dense work and its exchanges, owner for attention and its exchanges. On CUDA "
    "operations are asynchronous: these are seconds of the host.",
    RANK, ("node", "rank", "role", "part"),
)  # fmt: skip
EXCHANGE_BYTES = Metric(
    "tknp_exchange_bytes_total", "counter",
    "What a rank has sent on the data plane. Payload: to other nodes (cross_node), inside its node "
    "(node_local), and into collectives, a tensor once a call (collective). Besides, of messages "
    "through shared memory: a header of 64 bytes each, and padding to multiples of it (framing).",
    RANK, ("node", "rank", "scope"),
)  # fmt: skip
WEIGHT_BYTES = Metric(
    "tknp_weight_bytes", "gauge", "Weights that a rank keeps.", RANK, ("node", "rank")
)
KV_BYTES = Metric(
    "tknp_kv_bytes", "gauge", "Memory of a rank's KV pages, used or not.", OWNER, ("node", "rank")
)
PAGES = Metric(
    "tknp_pages", "gauge",
    "Pages of a node by state: free, reserved, receiving, live, quarantined. Every TP rank keeps "
    "the same ones; rank 0 tells.", OWNER, ("node", "state"),
)  # fmt: skip
LEASES_EXPIRED = Metric(
    "tknp_leases_expired_total", "counter",
    "Reservations that ended because nobody renewed them; TP rank 0 tells.", OWNER, ("node",),
)  # fmt: skip

# --- prefill ------------------------------------------------------------------------------------

PREFILL_REQUESTS = Metric(
    "tknp_prefill_requests", "gauge",
    "Prompts under way on a rank of a replica.", PREFILL, ("replica", "rank"),
)  # fmt: skip
PREFILL_TOKENS = Metric(
    "tknp_prefill_tokens_total", "counter",
    "Prompt tokens whose KV a replica has delivered, repeated attempts among them.",
    PREFILL, ("replica",),
)  # fmt: skip
PREFILL_COMPUTE = Metric(
    "tknp_prefill_compute_seconds", "histogram",
    "From a prompt's first chunk submitted until its last one computed.",
    PREFILL, ("replica",), _WAIT_S,
)  # fmt: skip
PREFILL_CHUNK = Metric(
    "tknp_prefill_chunk_seconds", "histogram",
    "One chunk on one rank: every layer, and pushing its KV as far as that holds up compute.",
    PREFILL, ("replica", "rank"), _WORK_S,
)  # fmt: skip
TRANSFER = Metric(
    "tknp_transfer_seconds", "histogram",
    "From a prompt's last chunk computed until its owners had all of its KV: what the transfer "
    "adds to TTFT.", PREFILL, ("replica",), _WORK_S,
)  # fmt: skip
TRANSFER_BYTES = Metric(
    "tknp_transfer_bytes_total", "counter",
    "KV that all ranks of a replica have delivered, by how it went: nixl or grpc.",
    PREFILL, ("replica", "kind"),
)  # fmt: skip
TRANSFERS_ABORTED = Metric(
    "tknp_transfers_aborted_total", "counter",
    "Prompts given up before their owners had all of their KV, by the gRPC status of the cause; "
    "cancelled: the caller went away.",
    PREFILL, ("replica", "reason"),
)  # fmt: skip

# --- gateway -------------------------------------------------------------------------------------

GATEWAY_REQUESTS = Metric(
    "tknp_gateway_requests_total", "counter",
    "Answered requests by endpoint and HTTP status, or gRPC status in lower case.",
    GATEWAY, ("endpoint", "status"),
)  # fmt: skip
GATEWAY_INFLIGHT = Metric(
    "tknp_gateway_inflight", "gauge", "Streams of tokens under way, by whose key.",
    GATEWAY, ("tenant",),
)  # fmt: skip
GATEWAY_TOKENS_INFLIGHT = Metric(
    "tknp_gateway_inflight_tokens", "gauge",
    "Tokens, prompt and longest output, of the streams under way, by whose key.",
    GATEWAY, ("tenant",),
)  # fmt: skip
GATEWAY_TTFT = Metric(
    "tknp_gateway_time_to_first_token_seconds", "histogram",
    "From a stream's start at the gateway until its first token is there.",
    GATEWAY, buckets=_WAIT_S,
)  # fmt: skip
GATEWAY_CHUNK_GAP = Metric(
    "tknp_gateway_inter_chunk_seconds", "histogram",
    "Between two chunks of a stream as they come from the pool; tokens ready together are one. Not "
    "of answers that are not streamed, or whose client takes several tokens a message.",
    GATEWAY, buckets=_TOKEN_S,
)  # fmt: skip
GATEWAY_REPLAYS = Metric(
    "tknp_gateway_replays_total", "counter",
    "Streams that lost their pool and were submitted again, by whether tokens had come.",
    GATEWAY, ("stage",),
)  # fmt: skip
GATEWAY_POOLS = Metric(
    "tknp_gateway_pools", "gauge", "Pools that are named, by whether they take requests.",
    GATEWAY, ("state",),
)  # fmt: skip

TABLE: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)


def of(*services: Service) -> tuple[Metric, ...]:
    """The rows of a process that runs `services`, in the table's order."""
    return tuple(metric for metric in TABLE if set(metric.services) & set(services))
