"""Pool overview: does it serve, how much, how fast, and who is there."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    ANY_IS_BAD,
    USE,
    board,
    lines,
    number,
    quantile,
    quantiles,
    rate,
    rows,
    series,
)

_TTFT, _ITL = "tknp_time_to_first_token_seconds", "tknp_inter_token_latency_seconds"
_READY = {"0": ("not ready", "red"), "1": ("ready", "green")}
_KV = (
    f"sum({series('tknp_kv_usage_ratio')} * {series('tknp_kv_capacity_tokens')})"
    f" / sum({series('tknp_kv_capacity_tokens')})"
)


def made() -> Dashboard:
    """The dashboard."""
    return board(
        "tknp-overview", "TKNP / Pool overview",
        "Whether a pool serves, how much and how fast, and which processes are there.",
        ("Now", _now()), ("Traffic", _traffic()), ("Latency", _latency()),
        ("Membership", _membership()), ("Operator", _operator()),
    )  # fmt: skip


def _now() -> list[object]:
    return [
        number("Pool", "none", "Ready: every process has its weights, all have joined, and warm "
               "steps ran.", f"max({series('tknp_ready', service='coordinator')})", words=_READY),
        number("KV in use", "percentunit", "Pages that requests have or quarantine withholds, of "
               "all pages of all owners.", _KV, steps=USE, decimals=0),
        number("Running", "short", "Requests in the running batch.",
               f"sum({series('tknp_requests_running')})"),
        number("Waiting", "short", "Requests that wait for pages. They wait when no owner has "
               "room.", f"sum({series('tknp_requests_waiting')})",
               steps=((None, "green"), (1, "yellow"))),
        number("Output", "short", "Tokens a second that are handed to streams.",
               f"sum({rate('tknp_generation_tokens_total')})"),
        number("TTFT p99", "s", "99 of 100 requests get their first token within this time.",
               quantile(0.99, _TTFT), empty="no traffic"),
        number("ITL p99", "s", "99 of 100 tokens come within this time of the one before.",
               quantile(0.99, _ITL), empty="no traffic"),
        number("Failed in 1 h", "short", "Requests that ended with an error of the pool.",
               f"sum(increase({series('tknp_requests_total', outcome='failed')}[1h]))",
               steps=ANY_IS_BAD, decimals=0),
    ]  # fmt: skip


def _traffic() -> list[object]:
    return [
        lines("Tokens", "short", "Tokens a second. Prompt tokens count when their request has its "
              "first token.",
              (f"sum({rate('tknp_generation_tokens_total')})", "output"),
              (f"sum({rate('tknp_prompt_tokens_total')})", "prompt")),
        lines("Requests in the pool", "short", "Where the open requests are. Waiting: no owner has "
              "pages. Prefilling: pages reserved, first token to come.",
              (f"sum({series('tknp_requests_running')})", "running"),
              (f"sum({series('tknp_requests_prefilling')})", "prefilling"),
              (f"sum({series('tknp_requests_waiting')})", "waiting"), stacked=True),
        lines("Ended", "reqps", "Requests that ended, by how.",
              (f"sum by (outcome) ({rate('tknp_requests_total')})", "{{outcome}}"), stacked=True),
    ]  # fmt: skip


def _latency() -> list[object]:
    return [
        lines("Time to first token", "s", "From arrival at the coordinator to the first token.",
              *quantiles(_TTFT)),
        lines("Inter-token latency", "s", "Between two tokens of a request, each token once.",
              *quantiles(_ITL)),
        lines("Whole requests", "s", "From arrival to the last token; completed requests.",
              *quantiles("tknp_request_e2e_seconds")),
        lines("What the slowest first tokens wait for", "s", "p99 of each stage, which need not be "
              "of the same request. Queue: until an owner has pages. Prefill: its own queue, "
              "computing, KV transfer. Transfer: what the transfer adds after computing.",
              (quantile(0.99, "tknp_request_queue_seconds"), "queue"),
              (quantile(0.99, "tknp_request_prefill_seconds"), "prefill"),
              (quantile(0.99, "tknp_transfer_seconds"), "transfer"), width=12),
        lines("Refused and made to start again", "reqps", "By the gRPC status that the client got; "
              "preempted requests made room for older ones and are computed again.",
              (f"sum by (reason) ({rate('tknp_refusals_total')})", "refused: {{reason}}"),
              (f"sum({rate('tknp_preemptions_total')})", "preempted"), width=12),
    ]  # fmt: skip


def _membership() -> list[object]:
    return [
        lines("Epoch", "none", "Number of the decode membership. It steps up when a node is "
              "replaced or a rollout goes on, and open requests are replayed.",
              (f"max({series('tknp_epoch')})", "epoch")),
        lines("Ready processes", "short", "Processes that serve, by service; a decode node counts "
              "for both of its services, each TP rank for itself.",
              (f"sum by (service) ({series('tknp_ready')})", "{{service}}")),
        rows("Versions", "Processes by service and version. Two versions of one service: a "
             "rollout is under way.",
             f"count by (service, version) ({series('tknp_build_info')})"),
    ]  # fmt: skip


def _operator() -> list[object]:
    return [
        number("Operator", "none", "Whether a replica leads.", "max(tknp_operator_leader)",
               words={"0": ("nobody leads", "red"), "1": ("leads", "green")}, width=4, height=6),
        number("Pools not ready", "short", "TokenParallelServices in all namespaces.",
               "sum(1 - tknp_operator_pool_ready)", width=4, height=6,
               steps=ANY_IS_BAD),
        lines("Reconciliations", "ops", "By result; failed ones are tried again with longer and "
              "longer pauses.",
              ("sum by (result) (rate(tknp_operator_reconciles_total[$__rate_interval]))",
               "{{result}}"), height=6),
        lines("One reconciliation", "s", "From looking at the cluster to the last step applied.",
              ("histogram_quantile(0.5, sum by (le) "
               "(rate(tknp_operator_reconcile_seconds_bucket[$__rate_interval])))", "p50"),
              ("histogram_quantile(0.99, sum by (le) "
               "(rate(tknp_operator_reconcile_seconds_bucket[$__rate_interval])))", "p99"),
              height=6),
    ]  # fmt: skip
