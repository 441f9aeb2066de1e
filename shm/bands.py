"""Admission in shared cells: leases, grants on their way, and who waits.

Words: a *pool* is what a hard cap holds for; a *lane* is a (pool, model), whose requests wait together;
band 0 is the highest. Which pool and lane an endpoint belongs to stands in its `EndpointRecord`.

Layout, int64 each; a slot is a worker's or a fixed process's (shm.layout):

    leases          [pool][slot]               rights to run that the process holds
    pending         [lane][slot]               leases that are not counted in `inflight` of an endpoint yet
    waiters         [lane][band][worker_slot]  requests of the worker that wait for a grant
    pool_caps       [pool]                     this instance's share of the hard cap, +1; 0: no cap
    remote_leases   [pool]                     leases of other instances
    remote_waiters  [lane][band]               waiters of other instances

Writers: of a slot's cells the process that owns it; shm.rows zeroes them when it dies, so nothing has to be
given back for a dead process. The last three: the coordinator.

The hard cap is exact without a lock. Who wants a lease first adds it to its own cell, then lets the store be
seen by all (`barrier`), then reads all cells: two may both see too many and step back, but never both go on.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Sequence
from typing import NamedTuple

from shm.endpoints import EndpointRecord, EndpointTable
from shm.inflight import InflightSums
from shm.layout import BANDS, StatField
from shm.marks import CooldownMarks
from shm.rows import WorkerSlot
from shm.segment import Segment

# NOTE: gevent puts locks of its own in the place of threading's, without any such instruction; not of this.
_fence = RLock()


def barrier() -> None:
    """Make this process's stores visible before its following loads.

    x86 lets a load pass an earlier store to another address; a locked instruction, which every mutex holds,
    does not.
    """
    _fence.acquire()
    _fence.release()


class LeaseRow:
    """The cells of one process: what it holds, and who of it waits."""

    __slots__ = ("_cells", "_leases", "_pending", "_slots", "_waiter_stride", "_waiters")

    def __init__(self, segment: Segment, slot: WorkerSlot) -> None:
        """Write to the cells of `slot`, which this process owns."""
        layout = segment.layout
        self._cells = segment.cells_i64
        self._slots = layout.sizes.total_slots
        self._leases = layout.leases.start + slot.index
        self._pending = layout.pending.start + slot.index
        self._waiter_stride = layout.sizes.worker_slots
        self._waiters = layout.waiters.start + slot.index

    def take(self, pool: int, lane: int) -> None:
        """Add a lease that is on its way to an endpoint."""
        self._cells[self._leases + pool * self._slots] += 1
        self._cells[self._pending + lane * self._slots] += 1

    def take_back(self, pool: int, lane: int) -> None:
        """Undo `take`."""
        self._cells[self._leases + pool * self._slots] -= 1
        self._cells[self._pending + lane * self._slots] -= 1

    def dispatched(self, lane: int) -> None:
        """The lease is counted in `inflight` from now on."""
        self._cells[self._pending + lane * self._slots] -= 1

    def undispatched(self, lane: int) -> None:
        """The lease has left its endpoint and is on its way to another one."""
        self._cells[self._pending + lane * self._slots] += 1

    def give_back(self, pool: int) -> None:
        """Give back a lease that has been dispatched."""
        self._cells[self._leases + pool * self._slots] -= 1

    def add_waiter(self, lane: int, band: int, amount: int) -> None:
        """Count a request that begins (1) or ceases (-1) to wait. Workers only."""
        self._cells[self._waiters + (lane * BANDS + band) * self._waiter_stride] += amount


class BandCells:
    """Sums over all processes, and what the coordinator knows of other instances. Any process may read."""

    __slots__ = (
        "_caps",
        "_cells",
        "_leases",
        "_pending",
        "_remote_leases",
        "_remote_waiters",
        "_slots",
        "_waiters",
        "_workers",
    )

    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self._cells = segment.cells_i64
        self._slots = layout.sizes.total_slots
        self._workers = layout.sizes.worker_slots
        self._leases = layout.leases.start
        self._pending = layout.pending.start
        self._waiters = layout.waiters.start
        self._caps = layout.pool_caps.start
        self._remote_leases = layout.remote_leases.start
        self._remote_waiters = layout.remote_waiters.start

    def leases(self, pool: int) -> int:
        """Return the leases that this instance holds in a pool."""
        at = self._leases + pool * self._slots
        return sum(self._cells[at : at + self._slots])

    def pending(self, lane: int) -> int:
        """Return the leases of a lane that are on their way to an endpoint."""
        at = self._pending + lane * self._slots
        return sum(self._cells[at : at + self._slots])

    def cap(self, pool: int) -> int:
        """Return this instance's share of the pool's hard cap, `NO_CAP` if there is none."""
        return self._cells[self._caps + pool] - 1

    def waiters(self, lane: int) -> list[int]:
        """Return who waits in each band, other instances included; index 0 is the highest band."""
        first = self._waiters + lane * BANDS * self._workers
        block = self._cells[first : first + BANDS * self._workers]
        at = self._remote_waiters + lane * BANDS
        remote = self._cells[at : at + BANDS].tolist()
        if not block.tobytes().strip(b"\0"):
            return remote
        local = block.tolist()
        return [
            sum(local[band * self._workers : (band + 1) * self._workers]) + remote[band]
            for band in range(BANDS)
        ]

    def local_waiters(self, lane: int) -> list[int]:
        """Return how many requests of this instance wait in each band."""
        first = self._waiters + lane * BANDS * self._workers
        local = self._cells[first : first + BANDS * self._workers].tolist()
        return [sum(local[at : at + self._workers]) for at in range(0, len(local), self._workers)]

    def anybody_waits(self, lanes: Sequence[int]) -> bool:
        """Tell whether a request of this instance waits in any of these lanes."""
        width = BANDS * self._workers
        for lane in lanes:
            first = self._waiters + lane * width
            if self._cells[first : first + width].tobytes().strip(b"\0"):
                return True
        return False

    def remote_leases(self, pool: int) -> int:
        """Return the leases that other instances hold in a pool."""
        return self._cells[self._remote_leases + pool]


class LaneColumns(NamedTuple):
    """The endpoints of a lane at one moment, as parallel columns; see `shm.layout.StatField` for units.

    Attributes:
        capacity: requests the engine runs at a time: as configured, else as learned; 0: not known.
        inflight: of this instance; `remote_inflight`: of the others.
    """

    state: Sequence[float]
    cooldown_until: Sequence[float]
    scraped_at: Sequence[float]
    waiting: Sequence[float]
    kv: Sequence[float]
    capacity: Sequence[float]
    inflight: Sequence[int]
    remote_inflight: Sequence[float]
    running: Sequence[float]
    kv_per_request: Sequence[float]


class LaneEndpoints:
    """Reads what admission wants to know of the endpoints of one lane, as of one endpoint table."""

    __slots__ = ("_capacities", "_inflight", "_marks", "_slots", "_table")

    def __init__(
        self,
        records: Sequence[EndpointRecord],
        table: EndpointTable,
        inflight: InflightSums,
        marks: CooldownMarks,
    ) -> None:
        self._slots = as_range([record.slot for record in records])
        configured = [record.batch_capacity for record in records]
        self._capacities = configured if any(configured) else None
        self._table = table
        self._inflight = inflight
        self._marks = marks

    def read(self) -> LaneColumns:
        """Read the cells as they are now."""
        column, slots = self._table.column, self._slots
        capacity: Sequence[float] = column(slots, StatField.BATCH_CAPACITY)
        if self._capacities is not None:
            capacity = [own or learned for own, learned in zip(self._capacities, capacity, strict=True)]
        return LaneColumns(
            column(slots, StatField.STATE),
            self._marks.many(slots),
            column(slots, StatField.SCRAPED_AT),
            column(slots, StatField.WAITING),
            column(slots, StatField.KV),
            capacity,
            self._inflight.many(slots),
            column(slots, StatField.REMOTE_INFLIGHT),
            column(slots, StatField.RUNNING),
            column(slots, StatField.KV_PER_REQUEST),
        )


def as_range(slots: list[int]) -> Sequence[int]:
    """Return slots that follow each other as a `range`, whose columns are read in one piece."""
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        return range(slots[0], slots[0] + len(slots))
    return slots


class BandPublisher(BandCells):
    """Writes what the coordinator decides or learns. Coordinator only."""

    __slots__ = ()

    def set_cap(self, pool: int, share: int) -> None:
        """Set this instance's share of a hard cap; `NO_CAP` for none."""
        self._cells[self._caps + pool] = share + 1

    def set_remote_leases(self, pool: int, leases: int) -> None:
        self._cells[self._remote_leases + pool] = leases

    def set_remote_waiters(self, lane: int, waiters: Sequence[int]) -> None:
        """Set how many wait in each band at other instances."""
        at = self._remote_waiters + lane * BANDS
        for band in range(BANDS):
            self._cells[at + band] = waiters[band] if band < len(waiters) else 0
