"""Counters, gauges and histograms in shared cells.

Layout: one row of `metric_cells` cells per slot. Cell 0 holds how many cells are used; behind it stand the
series, one after the other, in the order in which they first occurred:

    part        cells                              content
    length      1                                  int64: cells of the whole series
    key_bytes   1                                  int64
    key         ceil(key_bytes / 8)                UTF-8: name NUL label value NUL label value ...
    values      1; histogram: buckets + 1 + 1      float64: the value; histogram: buckets, +Inf bucket, sum

Writer: the owner of the slot (shm.rows). A series is written whole before cell 0 makes it visible, so a
writer killed half-way leaves nothing behind. Series are never moved or removed: the next owner of the slot
goes on with the same cells, so that no counter ever goes back; gauges are zeroed when their owner dies.
Bucket cells count their own bucket only; a histogram's count is the sum of its buckets. (Killed between a
bucket and the sum, one observation is in the count and not in the sum.)

A row is bounded. Room is kept back for one series of every definition with all labels `other`; when the rest
is full, new series fold into that one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm.definitions import BY_NAME, DEFINITIONS, OTHER, Definition, Kind
from shm.layout import CELL_BYTES
from shm.segment import Segment

if TYPE_CHECKING:
    from shm.rows import WorkerSlot

_HEAD = 2  # cells before the key
_FIRST = 1  # cell of a row where series begin


class Counter:
    """A series that grows. Keep it: an increment costs a fraction of a microsecond, finding it does not."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: memoryview[float], at: int) -> None:
        """Write to cell `at`; use `MetricsRow.counter`."""
        self._cells = cells
        self._at = at

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, which must not be negative (unchecked: hot)."""
        self._cells[self._at] += amount


class Gauge:
    """A series that holds this process's current value; readers see the sum over processes."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: memoryview[float], at: int) -> None:
        """Write to cell `at`; use `MetricsRow.gauge`."""
        self._cells = cells
        self._at = at

    def set(self, value: float) -> None:
        """Replace the value."""
        self._cells[self._at] = value

    def add(self, amount: float) -> None:
        """Change the value by `amount`."""
        self._cells[self._at] += amount


class Histogram:
    """A series of observations."""

    __slots__ = ("_at", "_bounds", "_cells", "_sum")

    def __init__(self, cells: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        """Write to the cells from `at`; use `MetricsRow.histogram`."""
        self._cells = cells
        self._at = at
        self._bounds = bounds
        self._sum = at + len(bounds) + 1

    def observe(self, value: float) -> None:
        """Count one observation, in the unit of the name. A value on a bound belongs to that bucket."""
        cells = self._cells
        cells[self._at + bisect_left(self._bounds, value)] += 1.0
        cells[self._sum] += value


class MetricsRow:
    """The series of one process."""

    __slots__ = ("_bytes", "_f64", "_i64", "_known", "_limit", "_row", "_unreserved")

    def __init__(self, segment: Segment, slot: WorkerSlot) -> None:
        """Write to the row of `slot`, which this process owns, and go on with the series found there."""
        self._i64 = segment.cells_i64
        self._f64 = segment.cells_f64
        self._bytes = segment.cells_bytes
        row = segment.layout.metrics_row(slot.index)
        self._row = row.start
        self._limit = row.cells
        self._unreserved = row.cells - sum(
            _series_cells(_key(each, (OTHER,) * len(each.labels)), each.values) for each in DEFINITIONS
        )
        self._known: dict[tuple[bytes, int], int] = {}
        if self._i64[self._row] == 0:
            self._i64[self._row] = _FIRST
        for key, at, values in _walk(segment, slot.index, _FIRST):
            self._known.setdefault((key, values), at)

    def counter(self, definition: Definition, labels: tuple[str, ...] = ()) -> Counter:
        """Return the counter of these label values; made when it is new. Keep the result.

        Raises:
            ValueError: not a counter, or another number of labels than defined.
        """
        return Counter(self._f64, self._find(definition, labels, Kind.COUNTER))

    def gauge(self, definition: Definition, labels: tuple[str, ...] = ()) -> Gauge:
        """Return the gauge of these label values; made when it is new. Keep the result."""
        return Gauge(self._f64, self._find(definition, labels, Kind.GAUGE))

    def histogram(self, definition: Definition, labels: tuple[str, ...] = ()) -> Histogram:
        """Return the histogram of these label values; made when it is new. Keep the result."""
        return Histogram(self._f64, self._find(definition, labels, Kind.HISTOGRAM), definition.buckets)

    def _find(self, definition: Definition, labels: tuple[str, ...], kind: Kind) -> int:
        if definition.kind is not kind:
            raise ValueError(f"{definition.name} is a {definition.kind.value}, not a {kind.value}")
        if len(labels) != len(definition.labels):
            raise ValueError(f"{definition.name} has the labels {definition.labels}, got {labels}")
        key = _key(definition, labels)
        at = self._known.get((key, definition.values))
        if at is None:
            at = self._append(definition, key, self._unreserved if labels else self._limit)
        if at is None:
            key = _key(definition, (OTHER,) * len(labels))
            at = self._known.get((key, definition.values)) or self._append(definition, key, self._limit)
        if at is None:
            raise ValueError(f"metrics row is too small for one series of every metric: {self._limit} cells")
        return at

    def _append(self, definition: Definition, key: bytes, limit: int) -> int | None:
        """Write a new series behind the last one; return its first value's cell, None if there is no room."""
        used = self._i64[self._row]
        cells = _series_cells(key, definition.values)
        if used + cells > limit:
            return None
        start = self._row + used
        values_at = start + cells - definition.values
        self._i64[start] = cells
        self._i64[start + 1] = len(key)
        key_at = (start + _HEAD) * CELL_BYTES
        self._bytes[key_at : key_at + len(key)] = key
        for cell in range(values_at, values_at + definition.values):
            self._f64[cell] = 0.0
        self._i64[self._row] = used + cells  # visible from here on
        self._known[key, definition.values] = values_at
        return values_at


@dataclass(frozen=True, slots=True)
class Sample:
    """One series, summed over all processes.

    Attributes:
        definition: the metric.
        labels: label values, in the definition's order.
        value: of a counter or gauge; of a histogram the sum of what was observed.
        buckets: of a histogram: observations per bucket, not cumulative, +Inf last; else empty.
    """

    definition: Definition
    labels: tuple[str, ...]
    value: float
    buckets: tuple[float, ...] = ()

    @property
    def count(self) -> float:
        """Observations of a histogram."""
        return sum(self.buckets)


class MetricsReader:
    """Sums series over the rows of all processes, living and dead; remembers where they lie.

    Never waits. Every cell is whole; counters of one row only grow, so every sum only grows. Buckets and sum
    of a histogram may differ by the observations made while reading.
    """

    __slots__ = ("_cells", "_read", "_segment", "_series")

    def __init__(self, segment: Segment) -> None:
        """Read the rows of `segment`."""
        self._segment = segment
        self._cells = segment.cells_f64
        self._read = [_FIRST] * segment.layout.sizes.total_slots
        self._series: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def read(self) -> list[Sample]:
        """Return every series, ordered by definition and labels."""
        self._find_new()
        cells = self._cells
        samples = []
        for (name, labels), places in self._series.items():
            definition = BY_NAME[name]
            if definition.kind is Kind.HISTOGRAM:
                width = definition.values
                rows = [cells[at : at + width].tolist() for at in places]
                totals = rows[0] if len(rows) == 1 else [sum(column) for column in zip(*rows, strict=True)]
                samples.append(Sample(definition, labels, totals[-1], tuple(totals[:-1])))
            else:
                samples.append(Sample(definition, labels, sum(cells[at] for at in places)))
        return samples

    def _find_new(self) -> None:
        found = False
        for slot, read in enumerate(self._read):
            row = self._segment.layout.metrics_row(slot).start
            for key, at, values in _walk(self._segment, slot, read):
                found = True
                name, *labels = key.decode("utf-8", "replace").split("\0")
                definition = BY_NAME.get(name)
                # A series of a build that defined this metric otherwise is not added to ours.
                if definition and definition.values == values and len(labels) == len(definition.labels):
                    self._series.setdefault((name, tuple(labels)), []).append(at)
                self._read[slot] = at + values - row
        if found:
            order = {definition.name: number for number, definition in enumerate(DEFINITIONS)}
            self._series = dict(
                sorted(self._series.items(), key=lambda item: (order[item[0][0]], item[0][1]))
            )


def read_all(segment: Segment) -> list[Sample]:
    """Return every series once; who reads repeatedly keeps a `MetricsReader`."""
    return MetricsReader(segment).read()


def zero_gauges(segment: Segment, slot: int) -> None:
    """Zero the gauges of a slot's row. The caller holds the slot's lock (shm.rows)."""
    for key, at, _ in _walk(segment, slot, _FIRST):
        definition = BY_NAME.get(key.split(b"\0", 1)[0].decode("utf-8", "replace"))
        if definition and definition.kind is Kind.GAUGE:
            segment.cells_f64[at] = 0.0


def _walk(segment: Segment, slot: int, start: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (key, cell of the first value, number of values) of the series from cell `start` of a row on."""
    cells = segment.cells_i64
    row = segment.layout.metrics_row(slot).start
    used = cells[row]
    while start < used:
        at = row + start
        length, key_bytes = cells[at], cells[at + 1]
        key_at = (at + _HEAD) * CELL_BYTES
        key_cells = -(-key_bytes // CELL_BYTES)
        yield (
            bytes(segment.cells_bytes[key_at : key_at + key_bytes]),
            at + _HEAD + key_cells,
            length - _HEAD - key_cells,
        )
        start += length


def _key(definition: Definition, labels: tuple[str, ...]) -> bytes:
    return "\0".join((definition.name, *(label.replace("\0", "?") for label in labels))).encode(
        "utf-8", "replace"
    )


def _series_cells(key: bytes, values: int) -> int:
    return _HEAD + -(-len(key) // CELL_BYTES) + values
