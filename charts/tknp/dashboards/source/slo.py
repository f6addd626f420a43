"""Targets, and a load test as the pool sees it."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from objectives import (
    AVAILABILITY,
    BAD,
    ENDED,
    FIRST,
    GATEWAY,
    INFERENCE,
    ITL,
    LATER,
    REFUSED,
    TTFT,
    Objective,
)
from panels import SELECT, board, heat, lines, number, quantile, quantiles, rate, series

_WINDOWS = ("5m", "1h", "6h")


def made() -> Dashboard:
    """The dashboard."""
    return board(
        "tknp-slo", "TKNP / SLO and load test",
        "Whether a pool keeps its targets, and what it does under load.",
        ("Targets over the time shown", _targets()), ("Error budget", _budget()),
        ("Load", _load()), ("Latency under load", _latency()), ("At the gateway", _gateway()),
    )  # fmt: skip


def _increase(name: str, window: str, *more: str, **equal: str) -> str:
    return f"sum(increase({series(name, *more, **equal)}[{window}]))"


def _availability(window: str) -> tuple[str, str]:
    """Bad events and all events."""
    refused = _increase("tknp_refusals_total", window, REFUSED)
    bad = f"({_increase('tknp_requests_total', window, outcome='failed')} + {refused})"
    ended = _increase("tknp_requests_total", window, ENDED)
    return bad, f"({ended} + {refused})"


def _answers(window: str) -> tuple[str, str]:
    every = _increase("tknp_gateway_requests_total", window, INFERENCE)
    bad = _increase("tknp_gateway_requests_total", window, INFERENCE, BAD)
    return f"({bad} or 0 * {every})", every


def _late(one: Objective, window: str) -> tuple[str, str]:
    every = _increase(f"{one.histogram}_count", window)
    good = _increase(f"{one.histogram}_bucket", window, le=str(one.bound_s))
    return f"({every} - {good})", every


def _targets() -> list[object]:
    kept = "Shown: the share that kept it, in the time range."

    def one(what: str, promise: str, kept_by: Objective, events: tuple[str, str]) -> object:
        bad, every = events
        return number(
            f"{what}, target {kept_by.percent:g} %", "percentunit", f"{promise} {kept}",
            f"1 - {bad} / ({every} > 0)", width=6,
            steps=((None, "red"), (1 - kept_by.budget, "green")), decimals=2, graph=False,
            empty="no traffic",
        )  # fmt: skip

    span = "$__range"
    return [
        one("Availability", "Requests that end neither failed nor refused for want of room or of "
            "a pool.", AVAILABILITY, _availability(span)),
        one("Gateway", "Answers to inference that are no server errors.", GATEWAY, _answers(span)),
        one(f"First token within {FIRST.bound_s:g} s", "Requests by their first token.", FIRST,
            _late(FIRST, span)),
        one(f"Token within {1000 * LATER.bound_s:g} ms", "Tokens after the first.", LATER,
            _late(LATER, span)),
    ]  # fmt: skip


def _budget() -> list[object]:
    """Burn rates as the alerts have them, with the same free events."""
    shown = (
        ("availability", _availability, AVAILABILITY), ("gateway", _answers, GATEWAY),
        ("first token", lambda w: _late(FIRST, w), FIRST),
        ("token", lambda w: _late(LATER, w), LATER),
    )  # fmt: skip

    def burn(title: str, window: str) -> object:
        queries = []
        for legend, events, one in shown:
            bad, every = events(window)
            share = f"{bad} / ({every} + {one.free_events:g})"
            queries.append((f"{share} / {one.budget:g}", legend))
        return lines(
            f"Burn rate, {window}", "none",
            f"How many times as fast as allowed the error budget was spent in {window}. {title}",
            *queries,
        )  # fmt: skip

    notes = (
        "Above 14.4, as over 1 h, a 30-day budget lasts two days: TknpSloBurnFast.",
        "Above 14.4, as over 5 min, a 30-day budget lasts two days: TknpSloBurnFast.",
        "Above 6, as over 30 min, a 30-day budget lasts five days: TknpSloBurnSlow.",
    )
    return [burn(note, window) for note, window in zip(notes, _WINDOWS, strict=True)]


def _load() -> list[object]:
    return [
        lines("Requests", "reqps", "Offered: what the coordinator ended or refused. Completed is "
              "what it kept up with; an open-loop load shows saturation by the gap.",
              (f"sum({rate('tknp_requests_total')})", "ended"),
              (f"sum({rate('tknp_requests_total', outcome='completed')})", "completed"),
              (f"sum({rate('tknp_requests_total', outcome='refused')})", "refused")),
        lines("Tokens a second", "short", "Delivered by prefill, and handed to streams.",
              (f"sum({rate('tknp_prefill_tokens_total')})", "prompt"),
              (f"sum({rate('tknp_generation_tokens_total')})", "output")),
        lines("Batch and queues", "short", "Requests running, at prefill, and waiting for pages.",
              (f"sum({series('tknp_requests_running')})", "running"),
              (f"sum({series('tknp_requests_prefilling')})", "prefilling"),
              (f"sum({series('tknp_requests_waiting')})", "waiting")),
    ]  # fmt: skip


def _latency() -> list[object]:
    return [
        lines("Time to first token", "s", "At the coordinator.", *quantiles(TTFT, 0.5, 0.9, 0.99)),
        lines("Inter-token latency", "s", "Each token after the first.",
              *quantiles(ITL, 0.5, 0.9, 0.99)),
        lines("Time per output token", "s", "End-to-end time over output tokens (NTPOT) of "
              "completed requests.",
              *quantiles("tknp_normalized_latency_seconds", 0.5, 0.9, 0.99)),
        heat("First tokens", "Every request by its time to first token. A second band: requests "
             "that queued.", TTFT),
        heat("Later tokens", "Every token by its time after the one before. A second band: steps "
             "that waited for a prompt, or a slow node.", ITL),
        lines("Waiting for pages", "s", "From arrival until placed on an owner.",
              *quantiles("tknp_request_queue_seconds"), width=12),
        lines("At prefill", "s", "From placement to the first token.",
              *quantiles("tknp_request_prefill_seconds"), width=12),
    ]  # fmt: skip


def _gateway() -> list[object]:
    return [
        lines("Answers", "reqps", "By HTTP status, or gRPC status in lower case; inference only.",
              (f"sum by (status) ({rate('tknp_gateway_requests_total', INFERENCE)})",
               "{{status}}"), stacked=True),
        lines("Streams", "short", "Streams of tokens under way, by whose key. What the gateway is "
              "scaled by.",
              (f"sum by (tenant) ({series('tknp_gateway_inflight')})", "{{tenant}}"), stacked=True),
        lines("Tokens of open streams", "short", "Prompt and longest output, by whose key.",
              (f"sum by (tenant) ({series('tknp_gateway_inflight_tokens')})", "{{tenant}}"),
              stacked=True),
        lines("First token at the gateway", "s", "p99 there and at the coordinator: the gap is the "
              "gateway, the network, and replays.",
              (quantile(0.99, "tknp_gateway_time_to_first_token_seconds"), "gateway"),
              (quantile(0.99, TTFT), "coordinator")),
        lines("Between chunks", "s", "Chunks of a stream as they come from the pool.",
              *quantiles("tknp_gateway_inter_chunk_seconds")),
        lines("Replays", "ops", "Streams that lost their pool and were submitted again, by whether "
              "tokens had come. Clients see a pause.",
              (f"sum by (stage) (rate(tknp_gateway_replays_total{{{SELECT}}}[$__rate_interval]))",
               "{{stage}}")),
        lines("Pools", "short", "Pools that gateways know, by whether they take requests, at the "
              "gateway that sees fewest.",
              (f"min by (state) ({series('tknp_gateway_pools')})", "{{state}}"), width=24,
              height=6),
    ]  # fmt: skip
