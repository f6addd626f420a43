"""Writes docs/metrics.md from the table."""

from __future__ import annotations

from tknp.metrics.table import ALL, TABLE, Metric

_HEAD = """\
# Metrics

<!-- Generated: python -m tknp.metrics.docs > docs/metrics.md -->

Every service serves `GET /metrics` in Prometheus' formats once it is given an address:
`metrics_address` of the pool file for the coordinator, `metrics_addresses` of a node or a prefill
replica for its TP ranks, one each. Without an address nothing listens. With `tls_cert`, `tls_key`
and `tls_ca` it is HTTPS, and the scraper has to show a certificate of that CA; without them only
loopback addresses are accepted, others with `insecure: true` where the network keeps others out.

Ratios lie in 0..1, times are in seconds. No service repeats another's metrics, so sums over all
targets count nothing twice. A decode node exposes the rows of decode-root and attention-owner.
Labels: `node` and `rank` (TP rank) as in the pool file, `replica` a prefill replica.

| metric | type | labels | exposed by | meaning |
|---|---|---|---|---|
"""
_TAIL = """
Dashboards are in `charts/tknp/dashboards`, alerts and recording rules in `charts/tknp/alerts`, what
to do about an alert in [runbooks](runbooks), what pools are scaled by in
[autoscaling.md](autoscaling.md). They name a pool by the labels `namespace` and `pool`, which the
chart's pod monitor sets. `tknp top` shows a pool live, from the coordinator's status and metrics.

## Questions

| question | expression |
|---|---|
| 99th percentile of TTFT | `histogram_quantile(0.99, sum by (le) (rate(tknp_time_to_first_token_seconds_bucket[5m])))` |
| tokens per second | `rate(tknp_generation_tokens_total[1m])` |
| fullest owner | `max(tknp_kv_usage_ratio)` |
| where a rank's steps go | `sum by (node, rank, role, part) (rate(tknp_step_part_seconds_total[5m]))` |
| share of the time that a rank runs steps | `rate(tknp_step_seconds_sum[5m])` |
| share of the time that a rank works | `sum by (node, rank) (rate(tknp_step_part_seconds_total{part!="idle"}[5m]))` |
| coordinator's work a step | `sum(rate(tknp_coordinator_step_seconds_total[5m])) / rate(tknp_steps_total[5m])` |
| bytes between nodes a token | `sum(rate(tknp_exchange_bytes_total{scope="cross_node"}[5m])) / rate(tknp_generation_tokens_total[5m])` |
"""  # noqa: E501


def markdown() -> str:
    """The whole page."""
    return _HEAD + "".join(map(_row, TABLE)) + _TAIL


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    services = "all" if metric.services == ALL else ", ".join(metric.services)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {services} | {metric.help} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
