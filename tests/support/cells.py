"""What a gateway's shared cells say of admission, read as any of its processes would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shm.bands import BandCells
from shm.endpoints import EndpointTable
from shm.inflight import InflightSums
from shm.segment import Segment
from tests.support.gateway import Gateway


class Cells:
    """The cells of a gateway with one pool and one model."""

    def __init__(self, segment: Segment) -> None:
        self._bands = BandCells(segment)
        self._inflight = InflightSums(segment)
        self._table = EndpointTable(segment)

    @property
    def leases(self) -> int:
        """Rights to run that any process holds."""
        return self._bands.leases(0)

    @property
    def share(self) -> int:
        """What this instance may use of the pool's hard cap."""
        return self._bands.cap(0)

    @property
    def waiters(self) -> list[int]:
        """Requests that wait, by rank of their band."""
        return self._bands.local_waiters(0)

    @property
    def remote_waiters(self) -> list[int]:
        """Requests that wait at other instances, by rank of their band."""
        return [all_ - own for all_, own in zip(self._bands.waiters(0), self.waiters, strict=True)]

    def all_of_it(self) -> dict[str, int]:
        """Return every count; all are 0 once nothing runs and nobody waits."""
        self._table.refresh_if_changed()
        return {
            "leases": self.leases,
            "pending": self._bands.pending(0),
            "waiters": sum(self.waiters),
            "inflight": sum(self._inflight.many([record.slot for record in self._table.records])),
        }

    def is_zero(self) -> bool:
        """Tell whether nothing is held and nobody waits."""
        return not any(self.all_of_it().values())


@contextmanager
def cells_of(gateway: Gateway) -> Iterator[Cells]:
    """Attach to the segment of a running gateway; to be left before it stops."""
    segment = Segment.attach(gateway.segment)
    try:
        yield Cells(segment)
    finally:
        segment.close()
