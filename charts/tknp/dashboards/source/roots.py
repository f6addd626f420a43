"""Roots: where steps go, what the network carries, and whether roots work at the same time."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import board, heat, lines, number, quantile, rate, series

_NODE = 'node=~"$node"'
_WORK = 'part!="idle"'
_PARTS = "tknp_step_part_seconds_total"
# Every rank of a node works on the same layers at the same time; rank 0 stands for its node where
# nodes are added up.
_FIRST = 'rank="0"'


def made() -> Dashboard:
    """The dashboard."""
    return board(
        "tknp-roots", "TKNP / Roots, exchange and overlap",
        "Steps of decode ranks: dense work, exchange, waiting, and how far they overlap.",
        ("Steps", _steps()), ("Where steps go", _parts()), ("Overlap of roots", _overlap()),
        ("Exchange", _exchange()), by_node=True,
    )  # fmt: skip


def _steps() -> list[object]:
    return [
        lines("A step, p50", "s", "Half of the steps on a node's ranks take less.",
              (quantile(0.5, "tknp_step_seconds", "node", more=(_NODE,)), "node {{node}}")),
        lines("A step, p99", "s", "One of a hundred steps takes longer. Nodes of one pool take "
              "turns, so a slow one slows all.",
              (quantile(0.99, "tknp_step_seconds", "node", more=(_NODE,)), "node {{node}}")),
        lines("Steps", "ops", "Steps launched a second, of all streams.",
              (f"sum({rate('tknp_steps_total')})", "steps")),
        heat("Steps of the chosen nodes", "Every step on every rank by how long it took. Two "
             "bands: batches of two kinds, or a rank that is behind.", "tknp_step_seconds", _NODE),
        lines("Coordinator's work", "percentunit", "Share of its time. Launch: from a step's "
              "result until the next one is sent, which ranks may wait for. Streams: handing "
              "tokens on, which none waits for.",
              (f"sum by (part) ({rate('tknp_coordinator_step_seconds_total')})", "{{part}}"),
              width=12, height=9),
    ]  # fmt: skip


def _parts() -> list[object]:
    root = rate(_PARTS, _NODE, role="root")
    owner = rate(_PARTS, _NODE, role="owner")
    idle = rate(_PARTS, _NODE, part="idle")
    return [
        lines("As root", "percentunit", "Share of the time of the busiest rank among the chosen "
              "nodes, by part: dense, exchange, waiting for owners, control.",
              (f"max by (part) ({root})", "{{part}}")),
        lines("As owner", "percentunit", "Share of the time of the busiest rank among the chosen "
              "nodes, by part: attention, exchange, waiting for roots.",
              (f"max by (part) ({owner})", "{{part}}")),
        lines("Waiting", "percentunit", "Share of its time that a node's most idle rank waits for "
              "a peer, by role. A root waits for attention, an owner for rows.",
              (f"max by (node, role) ({idle})", "node {{node}} as {{role}}")),
    ]  # fmt: skip


def _overlap() -> list[object]:
    dense = rate(_PARTS, _FIRST, role="root", part="dense")
    attention = rate(_PARTS, _FIRST, role="owner", part="attention")
    works = rate(_PARTS, _NODE, _WORK)
    hidden = rate(_PARTS, _NODE, role="root", part="idle")
    return [
        number("Roots at work", "none", "Nodes that do dense work at the same time. One copy and "
               "one microbatch: at most 1. Dual roots: up to 2. m microbatches: up to m.",
               f"sum({dense})", width=4, height=9, decimals=2),
        number("Owners at work", "none", "Nodes that compute attention at the same time.",
               f"sum({attention})", width=4, height=9, decimals=2),
        lines("Nodes at work at the same time", "none", "Sums over nodes of the time that each "
              "works. With dual roots or microbatches dense work of one batch runs under attention "
              "of another: both lines are high together.",
              (f"sum({dense})", "dense"), (f"sum({attention})", "attention"), height=9),
        lines("Busy", "percentunit", "Share of its time that each node's busiest rank works, "
              "waiting excluded. Roots that overlap keep every node busy.",
              (f"max by (node) ({works})", "node {{node}}"), most=1, height=9),
        lines("Dense work by root", "percentunit", "Share of its time that each node does dense "
              "work. Dual roots carry like loads: b and b + N/2.",
              (f"max by (node) ({rate(_PARTS, _NODE, role='root', part='dense')})",
               "node {{node}}"), width=12),
        lines("Roots wait for attention", "percentunit", "Share of its time that a node's root "
              "waits: exchange and attention that no other work covers.",
              (f"max by (node) ({hidden})", "node {{node}}"), width=12),
    ]  # fmt: skip


def _exchange() -> list[object]:
    sent = "tknp_exchange_bytes_total"
    tokens = f"sum({rate('tknp_generation_tokens_total')})"
    return [
        lines("Sent", "binBps", "On the data plane, all ranks. Payload between nodes, inside "
              "nodes, and into collectives, a tensor once a call; framing of messages.",
              (f"sum by (scope) ({rate(sent)})", "{{scope}}")),
        lines("Sent between nodes", "binBps", "By the node that sends.",
              (f"sum by (node) ({rate(sent, _NODE, scope='cross_node')})", "node {{node}}")),
        lines("Bytes between nodes a token", "bytes", "What one output token costs the network. "
              "Equations (1) to (5) of the paper give it for the layout.",
              (f"sum({rate(sent, scope='cross_node')}) / ({tokens} > 0)", "bytes a token")),
        lines("Time in exchange", "percentunit", "Share of its time that the busiest rank of each "
              "node posts and copies rows, by role.",
              (f"max by (node, role) ({rate(_PARTS, _NODE, part='exchange')})",
               "node {{node}} as {{role}}"), width=12),
        lines("Weights", "bytes", "Weights that the ranks of each node keep. Two copies: the "
              "blocks of both roots.",
              (f"sum by (node) ({series('tknp_weight_bytes', _NODE)})", "node {{node}}"), width=12),
    ]  # fmt: skip
