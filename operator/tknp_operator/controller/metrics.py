"""What the operator tells of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """In a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rounds = Counter(
            "tknp_operator_reconciles", "Rounds of planning and doing.", ["result"],
            registry=self.registry,
        )  # fmt: skip
        for result in ("done", "failed"):
            self.rounds.labels(result)  # from 0 on, so that the first one counts as an increase
        self.seconds = Histogram(
            "tknp_operator_reconcile_seconds", "One round.", registry=self.registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
        )  # fmt: skip
        self.steps = Counter(
            "tknp_operator_steps", "What was done, by verb.", ["verb"], registry=self.registry
        )
        self.leading = Gauge(
            "tknp_operator_leader", "1 while this replica acts.", registry=self.registry
        )
        self.epoch = Gauge(
            "tknp_operator_pool_epoch", "Present membership of a pool.", ["namespace", "pool"],
            registry=self.registry,
        )  # fmt: skip
        self.ready = Gauge(
            "tknp_operator_pool_ready", "1 while a pool serves.", ["namespace", "pool"],
            registry=self.registry,
        )  # fmt: skip
