"""How long requests have been silent at each endpoint, for the watchdog.

Layout, float64 each, monotonic seconds, 0 for none:

    silent  [endpoint_slot][worker_slot]  last progress of that request of the worker that is silent longest
    moved   [endpoint_slot][worker_slot]  last progress of any request of the worker, an ended one included

Progress is a byte of the response; until the first one, a request is silent since it was sent. A worker
writes its column a few times a second and not at each byte; shm.rows zeroes it when the worker dies.
"""

from __future__ import annotations

from shm.rows import WorkerSlot
from shm.segment import Segment


class ProgressRow:
    """The column of one worker."""

    __slots__ = ("_cells", "_moved", "_silent", "_stride")

    def __init__(self, segment: Segment, slot: WorkerSlot) -> None:
        """Write to the column of `slot`, which this process owns."""
        layout = segment.layout
        self._cells = segment.cells_f64
        self._stride = layout.sizes.worker_slots
        self._silent = layout.silent.start + slot.index
        self._moved = layout.moved.start + slot.index

    def set_silent(self, endpoint_slot: int, since: float) -> None:
        """Say since when the most silent request is; 0: nothing is under way."""
        self._cells[self._silent + endpoint_slot * self._stride] = since

    def set_moved(self, endpoint_slot: int, at: float) -> None:
        """Say when a request made progress last."""
        self._cells[self._moved + endpoint_slot * self._stride] = at


class ProgressCells:
    """All workers together. Any process may read."""

    __slots__ = ("_cells", "_moved", "_silent", "_stride")

    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self._cells = segment.cells_f64
        self._stride = layout.sizes.worker_slots
        self._silent = layout.silent.start
        self._moved = layout.moved.start

    def silent_since(self, endpoint_slot: int) -> float | None:
        """Return the last progress of the request that is silent longest; None: nothing is under way."""
        at = self._silent + endpoint_slot * self._stride
        return min((since for since in self._cells[at : at + self._stride] if since), default=None)

    def moved_at(self, endpoint_slot: int) -> float:
        """Return the last progress of any request; 0: none yet."""
        at = self._moved + endpoint_slot * self._stride
        return max(self._cells[at : at + self._stride])
