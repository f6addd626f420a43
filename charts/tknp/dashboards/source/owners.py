"""Owners: whose KV fills up, and how long its attention takes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import bars, board, heat, lines, quantile, quantiles, rate, series

_NODE = 'node=~"$node"'


def made() -> Dashboard:
    """The dashboard."""
    return board(
        "tknp-owners", "TKNP / Owners: KV and attention",
        "KV cache of each owner, its attention, and KV on its way from prefill.",
        ("KV cache", _kv()), ("Attention", _attention()), ("KV transfer", _transfer()),
        by_node=True,
    )  # fmt: skip


def _kv() -> list[object]:
    pages = series("tknp_pages", _NODE)
    return [
        bars("KV in use", "percentunit", "Share of each owner's pages that requests have or "
             "quarantine withholds.",
             (f"max by (node) ({series('tknp_kv_usage_ratio', _NODE)})", "node {{node}}"), most=1),
        lines("KV in use over time", "percentunit", "The scheduler gives a request "
              "to the owner with the lowest load, so lines should stay close.",
              (f"max by (node) ({series('tknp_kv_usage_ratio', _NODE)})", "node {{node}}"), most=1),
        lines("Fullest less emptiest", "percentunit", "How unequal owners are, of their pages. A "
              "step's attention takes as long as on the fullest.",
              (f"max({series('tknp_kv_usage_ratio')}) - min({series('tknp_kv_usage_ratio')})",
               "spread"), most=1),
        lines("Pages by state", "short", "Reserved: granted, nothing written. Receiving: prefill "
              "writes. Live: a running request's. Quarantined: a writer may still write.",
              (f"sum by (state) ({pages})", "{{state}}"), stacked=True),
        bars("Capacity", "short", "Tokens whose KV fits on each owner. Blocks are cut so that "
             "these are as equal as whole layers allow.",
             (f"max by (node) ({series('tknp_kv_capacity_tokens', _NODE)})", "node {{node}}"),
             steps=((None, "blue"),)),
        bars("Memory of the fullest rank", "bytes", "Weights and KV pages that a rank of each node "
             "keeps, the largest of its ranks.",
             (f"max by (node) ({series('tknp_weight_bytes', _NODE)})", "node {{node}} weights"),
             (f"max by (node) ({series('tknp_kv_bytes', _NODE)})", "node {{node}} KV"),
             steps=((None, "blue"),)),
    ]  # fmt: skip


def _attention() -> list[object]:
    attention = rate("tknp_step_part_seconds_total", _NODE, role="owner", part="attention")
    idle = rate("tknp_step_part_seconds_total", _NODE, role="owner", part="idle")
    return [
        lines("Time in attention", "percentunit", "Share of its time that the busiest rank of each "
              "owner spends on rotary embedding, appending and attention. On CUDA: of the host.",
              (f"max by (node) ({attention})", "node {{node}}"), most=1),
        lines("Busiest over idlest owner", "percentunit", "Difference of the shares on the left; "
              "the others wait for the busiest.",
              (f"max({attention}) - min({attention})", "difference")),
        lines("Owners wait for rows", "percentunit", "Share of its time that each owner waits for "
              "a root to send rows or to take results, its worst rank.",
              (f"max by (node) ({idle})", "node {{node}}")),
        lines("Reservations that nobody renewed", "short", "Leases that ended in the last hour: "
              "the coordinator or a prefill replica went silent.",
              (f"sum by (node) (increase({series('tknp_leases_expired_total', _NODE)}[1h]))",
               "node {{node}}"), width=24, height=6),
    ]  # fmt: skip


def _transfer() -> list[object]:
    aborted = rate("tknp_transfers_aborted_total")
    return [
        lines("Transfer", "s", "From a prompt's last chunk computed until its owners had all of "
              "its KV: what the transfer adds to the time to first token.",
              *quantiles("tknp_transfer_seconds")),
        lines("KV delivered", "binBps", "By how it went: NIXL's one-sided writes, or a gRPC "
              "stream.", (f"sum by (kind) ({rate('tknp_transfer_bytes_total')})", "{{kind}}")),
        lines("Prompts given up", "reqps", "Before their owners had all of the KV, by gRPC status; "
              "cancelled: the client left.",
              (f"sum by (reason) ({aborted})", "{{reason}}"), stacked=True),
        lines("Prompts at prefill", "short", "Under way at each replica, waiting ones among them.",
              (f"max by (replica) ({series('tknp_prefill_requests')})", "replica {{replica}}")),
        lines("Computing a prompt, p99", "s", "From its first chunk submitted to its last one "
              "computed.",
              (quantile(0.99, "tknp_prefill_compute_seconds", "replica"), "replica {{replica}}")),
        lines("Prompt tokens", "short", "Tokens a second whose KV a replica has delivered.",
              (f"sum by (replica) ({rate('tknp_prefill_tokens_total')})", "replica {{replica}}")),
        heat("Transfers", "Every transfer by how long it took.", "tknp_transfer_seconds"),
        heat("Chunks of prefill", "Every chunk on every rank: all layers, and pushing its KV as "
             "far as that holds up computing.", "tknp_prefill_chunk_seconds"),
    ]  # fmt: skip
