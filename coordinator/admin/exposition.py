"""`/metrics`: series of all processes summed, and the gauges of endpoints, in Prometheus' text format.

The text is written here and not by prometheus_client, which takes 12 µs a line and so held the hub for 40 ms
with 50 models; this takes about 1 µs. Tests read it with Prometheus' own parser. What the coordinator itself
costs (`process_*`) does come from prometheus_client. The hub runs between two metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.admin.gauges import read_gauges
from coordinator.fleet import Fleet
from shm.definitions import DEFINITIONS, Definition, Kind
from shm.metrics import MetricsReader, Sample

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Exposition:
    """Makes the page. Keeps the names of series, which are most of the text."""

    def __init__(self, fleet: Fleet) -> None:
        """Read cells and gauges of `fleet`'s segment."""
        self._fleet = fleet
        self._reader = MetricsReader(fleet.segment)
        self._process = ProcessCollector(registry=None)
        # Of cells only, whose series never end; a gauge's end with its endpoint.
        self._names: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    def page(self) -> bytes:
        """Return the page as it is now."""
        parts = []
        for lines in self._metrics():
            parts.append("".join(lines))
            self._fleet.pause()
        return "".join(parts).encode() + generate_latest(self._process)

    def _metrics(self) -> Iterator[list[str]]:
        """Yield each metric's lines; of those without series as well, so that one sees what exists."""
        by_name = {
            name: list(samples)
            for name, samples in groupby(self._reader.read(), key=lambda sample: sample.definition.name)
        }
        for definition in DEFINITIONS:
            samples = by_name.get(definition.name, [])
            if not samples and not definition.labels and definition.kind is not Kind.HISTOGRAM:
                samples = [Sample(definition, (), 0.0)]  # before the first event it is 0, not absent
            yield [*_head(definition), *self._cell_lines(samples)]
        for definition, values in read_gauges(self._fleet):
            lines = (
                f"{definition.name}{_braces(_labels(definition.labels, labels))} {_number(value)}\n"
                for labels, value in values
            )
            yield [*_head(definition), *lines]

    def _cell_lines(self, samples: Sequence[Sample]) -> Iterator[str]:
        for sample in samples:
            key = (sample.definition.name, sample.labels)
            names = self._names.get(key)
            if names is None:
                names = self._names[key] = _names(sample)
            yield from (
                f"{name} {_number(value)}\n" for name, value in zip(names, _values(sample), strict=True)
            )


def _head(definition: Definition) -> tuple[str, str]:
    text = definition.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {definition.name} {text}\n", f"# TYPE {definition.name} {definition.kind.value}\n"


def _names(sample: Sample) -> tuple[str, ...]:
    """Return the lines of a series without their values; a histogram has its buckets, sum and count."""
    definition = sample.definition
    labels = _labels(definition.labels, sample.labels)
    name = definition.name
    if definition.kind is not Kind.HISTOGRAM:
        return (f"{name}{_braces(labels)}",)
    bounds = [*map(str, definition.buckets), "+Inf"]
    comma = "," if labels else ""
    return (
        *(f'{name}_bucket{{{labels}{comma}le="{bound}"}}' for bound in bounds),
        f"{name}_sum{_braces(labels)}",
        f"{name}_count{_braces(labels)}",
    )


def _values(sample: Sample) -> tuple[float, ...]:
    if sample.definition.kind is not Kind.HISTOGRAM:
        return (sample.value,)
    counts = tuple(accumulate(sample.buckets))
    return (*counts, sample.value, counts[-1])


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)
    )


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(value)
    return repr(value).replace("inf", "Inf").replace("nan", "NaN")
