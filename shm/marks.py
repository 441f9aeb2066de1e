"""Cooldown marks: until when an endpoint that failed is left alone.

Layout: region `marks`, float64, [endpoint_slot][worker_slot]: a deadline in monotonic seconds (one clock for
all processes of the host), 0 for none. Writer of a cell: the worker that owns the column; what counts is the
latest deadline of all workers. A mark ends by time alone. A worker's death takes its marks away: the
survivors mark a bad endpoint again at their own first failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.rows import WorkerSlot
from shm.segment import Segment


class CooldownMarks:
    """Marks of all workers, and the column of one of them to write to."""

    __slots__ = ("_base", "_cells", "_own", "_stride")

    def __init__(self, segment: Segment, slot: WorkerSlot | None = None) -> None:
        """Read the marks of `segment`, and write to the column of `slot` if one is given."""
        sizes = segment.layout.sizes
        if slot is not None and slot.index >= sizes.worker_slots:
            raise ValueError(f"slot {slot.index} is not a worker's")
        self._cells = segment.cells_f64
        self._base = segment.layout.marks.start
        self._stride = sizes.worker_slots
        self._own = -1 if slot is None else slot.index

    def set(self, endpoint_slot: int, until: float) -> None:
        """Leave an endpoint alone until a time.

        Args:
            endpoint_slot: which.
            until: monotonic seconds; 0 takes this worker's mark away.

        Raises:
            ValueError: made without a slot, so there is no column to write to.
        """
        if self._own < 0:
            raise ValueError("these marks are read-only")
        self._cells[self._base + endpoint_slot * self._stride + self._own] = until

    def until(self, endpoint_slot: int) -> float:
        """Return the latest deadline any worker set, monotonic seconds; 0: none."""
        at = self._base + endpoint_slot * self._stride
        return max(self._cells[at : at + self._stride])

    def many(self, endpoint_slots: Sequence[int]) -> list[float]:
        """Return the deadlines of several endpoints, in the order given. Runs on every request.

        A `range` with step 1, as the endpoints of one model mostly are, is read in one piece.
        """
        cells, base, stride = self._cells, self._base, self._stride
        if isinstance(endpoint_slots, range) and endpoint_slots.step == 1:
            start = base + endpoint_slots.start * stride
            block = cells[start : start + len(endpoint_slots) * stride]
            if not block.tobytes().strip(b"\0"):  # no mark at all: nearly always
                return [0.0] * len(endpoint_slots)
        return [max(cells[(at := base + slot * stride) : at + stride]) for slot in endpoint_slots]
