"""Requests in flight, counted per endpoint and worker.

Layout: region `inflight`, int64, [endpoint_slot][worker_slot]; a request is counted from the moment its
endpoint is chosen until its relay has ended. Writer of a cell: the worker that owns the column; shm.rows
zeroes the column of a dead worker. Endpoint-major, so that the sum over workers is one short run of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.rows import WorkerSlot
from shm.segment import Segment


class InflightRow:
    """The column of one worker: what this process has in flight."""

    __slots__ = ("_base", "_cells", "_stride")

    def __init__(self, segment: Segment, slot: WorkerSlot) -> None:
        """Write to the column of `slot`, which this process owns."""
        sizes = segment.layout.sizes
        if slot.index >= sizes.worker_slots:
            raise ValueError(f"slot {slot.index} is not a worker's")
        self._cells = segment.cells_i64
        self._base = segment.layout.inflight.start + slot.index
        self._stride = sizes.worker_slots

    def add(self, endpoint_slot: int) -> None:
        """Count one more request on an endpoint."""
        self._cells[self._base + endpoint_slot * self._stride] += 1

    def sub(self, endpoint_slot: int) -> None:
        """Count one request less on an endpoint.

        Raises:
            ValueError: nothing is counted there, so something was given back twice; the count stays 0.
        """
        at = self._base + endpoint_slot * self._stride
        count = self._cells[at]
        if count <= 0:
            raise ValueError(f"endpoint slot {endpoint_slot}: given back more often than taken")
        self._cells[at] = count - 1

    def of(self, endpoint_slot: int) -> int:
        """Return this worker's own count on an endpoint."""
        return self._cells[self._base + endpoint_slot * self._stride]


class InflightSums:
    """Counts over all workers. Any process may read; each cell is whole."""

    __slots__ = ("_base", "_cells", "_stride")

    def __init__(self, segment: Segment) -> None:
        """Read the rows of `segment`."""
        self._cells = segment.cells_i64
        self._base = segment.layout.inflight.start
        self._stride = segment.layout.sizes.worker_slots

    def of(self, endpoint_slot: int) -> int:
        """Return the requests in flight on an endpoint."""
        at = self._base + endpoint_slot * self._stride
        return sum(self._cells[at : at + self._stride])

    def many(self, endpoint_slots: Sequence[int]) -> list[int]:
        """Return the counts of several endpoints, in the order given. Runs on every request.

        A `range` with step 1, as the endpoints of one model mostly are, is read in one piece.
        """
        cells, base, stride = self._cells, self._base, self._stride
        if isinstance(endpoint_slots, range) and endpoint_slots.step == 1:
            start = base + endpoint_slots.start * stride
            block = cells[start : start + len(endpoint_slots) * stride].tolist()
            return [sum(block[at : at + stride]) for at in range(0, len(block), stride)]
        return [sum(cells[(at := base + slot * stride) : at + stride]) for slot in endpoint_slots]
