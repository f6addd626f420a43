"""What one process exposes: its services' rows of the table, and where each value is read.

    registry = Registry("decode-root", "attention-owner")
    steps = registry.histogram(STEP, "0", "1")              observed wherever steps run
    registry.read(PAGES, lambda: {("0", "free"): 17.0})     called whenever somebody scrapes
    serve_metrics(registry, "127.0.0.1:9400")

A row that nothing was given for is exposed with its type and help, and no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

import tknp
from tknp.errors import InvalidValue
from tknp.metrics.instruments import Counter, Histogram, Labels
from tknp.metrics.table import BUILD_INFO, READY, Metric, Service, of

Reader = Callable[[], Mapping[Labels, float]]


class Registry:
    """A prometheus_client collector. `collect` calls readers: call it where they may run."""

    def __init__(self, *services: Service) -> None:
        self.services = services
        self._rows = {metric.name: metric for metric in of(*services)}
        self._readers: dict[str, list[Reader]] = {name: [] for name in self._rows}
        self._histograms: dict[str, dict[Labels, Histogram]] = {name: {} for name in self._rows}
        self.read(BUILD_INFO, lambda: {(s, tknp.__version__): 1.0 for s in services})

    def __contains__(self, metric: Metric) -> bool:
        """Whether this process exposes `metric`."""
        return self._rows.get(metric.name) == metric

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The series of `metric` with these label values. Raises InvalidValue, as all do here, for
        a row of another service, another kind, or another number of labels.
        """
        self._check(metric, ("histogram",), labels)
        return self._histograms[metric.name].setdefault(labels, Histogram(metric.buckets))

    def counter(self, metric: Metric, *initial: str) -> Counter:
        """A new counter of `metric`. `initial`: label values, of a row with one label, that count
        from 0 at once, so that the first increase shows in a rate.
        """
        counter = Counter()
        for value in initial:
            counter.add(0.0, value)
        if not metric.labels:
            counter.add(0.0)
        self._check(metric, ("counter",), None)
        self.read(metric, counter.values)
        return counter

    def read(self, metric: Metric, reader: Reader) -> None:
        """Let `reader` give values of a counter or gauge by label values, in the table's order."""
        self._check(metric, ("counter", "gauge"), None)
        self._readers[metric.name].append(reader)

    def ready(self, check: Callable[[], bool]) -> None:
        """Let `check` say whether the process serves."""
        self.read(READY, lambda: {(s,): float(check()) for s in self.services})

    def describe(self) -> Iterator[Family]:
        """Every family without samples."""
        yield from (_family(row) for row in self._rows.values())

    def collect(self) -> Iterator[Family]:
        """Every family with its samples as they are now."""
        for name, row in self._rows.items():
            family = _family(row)
            for reader in self._readers[name]:
                for labels, value in sorted(reader().items()):
                    if len(labels) != len(row.labels):
                        raise _misfit(row, labels)
                    family.add_metric(labels, value)  # type: ignore[attr-defined]
            for labels, histogram in self._histograms[name].items():
                buckets, total = histogram.read()
                counts = [(_bound(bound), count) for bound, count in buckets]
                family.add_metric(labels, counts, total)  # type: ignore[attr-defined]
            yield family

    def _check(self, metric: Metric, kinds: tuple[str, ...], labels: Labels | None) -> None:
        if metric not in self:
            raise InvalidValue("metric", metric.name, f"no row of {', '.join(self.services)}")
        if metric.kind not in kinds:
            raise InvalidValue("metric", metric.name, f"is a {metric.kind}")
        if labels is not None and len(labels) != len(metric.labels):
            raise _misfit(metric, labels)


def _family(row: Metric) -> Family:
    if row.kind == "histogram":
        return HistogramMetricFamily(row.name, row.help, labels=row.labels, unit=row.unit)
    if row.kind == "counter":
        return CounterMetricFamily(row.name, row.help, labels=row.labels, unit=row.unit)
    return GaugeMetricFamily(row.name, row.help, labels=row.labels, unit=row.unit)


def _bound(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def _misfit(metric: Metric, labels: Labels) -> InvalidValue:
    return InvalidValue("labels", labels, f"{metric.name} has labels {metric.labels}")
