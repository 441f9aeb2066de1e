"""`/metrics`: series of all processes summed, and the gauges of endpoints, in Prometheus' text format.

Cost: see docs/metrics.md. The text is made family by family, and the hub runs in between: with a thousand
endpoints a page takes longer than anything else in this process may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, groupby

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from coordinator.admin.gauges import Value, read_gauges
from coordinator.fleet import Fleet
from shm.definitions import DEFINITIONS, Definition, Kind
from shm.metrics import MetricsReader, Sample

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class InstanceCollector(Collector):
    """Everything this instance has to say, as prometheus_client wants it."""

    def __init__(self, fleet: Fleet) -> None:
        """Read cells and gauges of `fleet`'s segment."""
        self._fleet = fleet
        self._reader = MetricsReader(fleet.segment)

    def collect(self) -> Iterator[Metric]:
        """Yield a family per metric, those without series as well: a dashboard sees what exists."""
        by_name = {
            name: list(samples)
            for name, samples in groupby(self._reader.read(), key=lambda sample: sample.definition.name)
        }
        for definition in DEFINITIONS:
            yield _cells_family(definition, by_name.get(definition.name, []))
        for definition, values in read_gauges(self._fleet):
            yield _gauge_family(definition, values)


def render(collector: Collector, *, pause: Callable[[], None]) -> bytes:
    """Return the page.

    Args:
        collector: what to write.
        pause: called between families; lets others run.
    """
    parts = []
    for family in collector.collect():
        parts.append(prometheus_client.generate_latest(_One(family)))
        pause()
    return b"".join(parts)


class _One(Collector):
    """A registry of one family that has been collected already."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _cells_family(definition: Definition, samples: list[Sample]) -> Metric:
    if definition.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(definition.name, definition.help, labels=definition.labels)
        bounds = [*map(str, definition.buckets), "+Inf"]
        for sample in samples:
            counts = accumulate(sample.buckets)
            histogram.add_metric(
                sample.labels, buckets=list(zip(bounds, counts, strict=True)), sum_value=sample.value
            )
        return histogram
    # A series without labels exists before the first event: it is 0, not absent.
    values = [Value(sample.labels, sample.value) for sample in samples]
    if not values and not definition.labels:
        values = [Value((), 0.0)]
    if definition.kind is Kind.GAUGE:
        return _gauge_family(definition, values)
    counter = CounterMetricFamily(definition.name, definition.help, labels=definition.labels)
    for labels, value in values:
        counter.add_metric(labels, value)
    return counter


def _gauge_family(definition: Definition, values: list[Value]) -> Metric:
    gauge = GaugeMetricFamily(definition.name, definition.help, labels=definition.labels)
    for labels, value in values:
        gauge.add_metric(labels, value)
    return gauge
