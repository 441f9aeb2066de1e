"""Offsets of everything in the shared segment; the one place they are written.

Rules of this file
    * The segment is an array of 8-byte cells, little-endian, each an int64 or a float64. An aligned 8-byte
      store is atomic on x86-64, so a reader sees a cell's old or its new value, never a mixture. No cell is
      wider.
    * Every cell has one writer at a time. Regions say which. A shared figure is a row of cells, one per
      process, summed by readers.
    * Offsets are in cells, regions begin on a cache line (8 cells). To add a region: a field in `Layout`, a
      line in `Layout.of`, and a new `LAYOUT_VERSION`.

    region       cells                                writer
    header       HEADER_CELLS, see `Header`           launcher; endpoints_generation: coordinator
    slots        total_slots x SLOT_CELLS             the holder of the slot's lock (owner or reaper)
    inflight     [endpoint_slot][worker_slot] int64   the holder of the worker slot's lock
    marks        [endpoint_slot][worker_slot] f64     the holder of the worker slot's lock
    silent       [endpoint_slot][worker_slot] f64     the holder of the worker slot's lock, see shm.progress
    moved        [endpoint_slot][worker_slot] f64     the holder of the worker slot's lock, see shm.progress
    stats        [stat field][endpoint_slot] f64      coordinator
    stats_seq    [endpoint_slot] int64                coordinator (odd: a row of `stats` is being written)
    leases       [pool][slot] int64                   the holder of the slot's lock
    pending      [lane][slot] int64                   the holder of the slot's lock
    waiters      [lane][band][worker_slot] int64      the holder of the worker slot's lock
    pool_caps    [pool] int64                         coordinator
    remote       see shm.bands                        coordinator
    metrics      [slot][metric_cells]                 the holder of the slot's lock

Slots 0 .. worker_slots-1 belong to workers; behind them stands one per `FixedSlot` (coordinator, launcher,
arbiter), which has a slot and a metrics row but no inflight and marks column.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum

MAGIC = int.from_bytes(b"llmgwSEG", "little")
LAYOUT_VERSION = 3

CELL_BYTES = 8
LINE_CELLS = 8  # one cache line
SLOT_CELLS = LINE_CELLS
HEADER_CELLS = 64
STAT_FIELDS = 16
POOLS = 64
LANES = 256  # (pool, model)
BANDS = 8


class Header(IntEnum):
    """Cells of the header, by index."""

    MAGIC = 0
    LAYOUT_VERSION = 1
    FINGERPRINT = 2  # crc32 of the whole layout: catches a change that forgot LAYOUT_VERSION
    WORKER_SLOTS = 3
    ENDPOINT_SLOTS = 4
    METRIC_CELLS = 5
    CREATED_NS = 6  # wall clock, for people
    LAUNCHER_PID = 7
    CONFIG_GENERATION = 8  # counts publications of the file `config`
    ENDPOINTS_GENERATION = 9  # counts publications of the file `endpoints`; written by the coordinator
    PHASE = 10  # Phase, written by the launcher


class Phase(IntEnum):
    """What the launcher is doing, in `Header.PHASE`."""

    RUNNING = 0
    DRAINING = 1


class SlotField(IntEnum):
    """Cells of a slot, by index within its line."""

    PID = 0  # 0: free. Written last when a slot is taken, and cleared last when it is given back
    GENERATION = 1  # counts the owners the slot has had
    STARTED_NS = 2  # monotonic
    HEARTBEAT_NS = 3  # monotonic
    STATE = 4  # SlotState


class SlotState(IntEnum):
    """What the owner of a slot says about itself."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2


class FixedSlot(IntEnum):
    """Processes of which there is one; their slots stand behind the workers' slots in this order."""

    COORDINATOR = 0
    LAUNCHER = 1
    ARBITER = 2


class StatField(IntEnum):
    """Columns of the region `stats`: what the coordinator knows of an endpoint; at most STAT_FIELDS."""

    STATE = 0  # shm.endpoints.EndpointState
    WAITING = 1  # requests queued in the engine
    RUNNING = 2  # requests in the engine's batch
    KV = 3  # ratio of KV blocks in use, 0..1; NaN: the engine does not say
    SCRAPED_AT = 4  # monotonic seconds of the last good scrape; 0: none yet
    FAILURES = 5  # consecutive failed scrapes
    MAX_CONTEXT = 6  # tokens; 0: unknown
    BLOCK_SIZE = 7  # tokens per KV block; 0: unknown
    NUM_BLOCKS = 8  # KV blocks; 0: unknown
    DRAIN_RATE = 9  # finished requests per second, smoothed; 0: unknown
    BATCH_CAPACITY = 10  # requests: high-water mark of observed running; 0: unknown
    REMOTE_INFLIGHT = 11  # requests that other instances have under way there
    STUCK_SINCE = 12  # monotonic seconds since which it counts as stuck; 0: it does not
    KV_PER_REQUEST = 13  # ratio of KV blocks that a running request has used at most of late; 0: unknown


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each thing a segment has room for; fixed when it is made.

    Attributes:
        worker_slots: workers alive at once, with those still draining after their arbiter died.
        endpoint_slots: endpoints in the table, with removed ones that still have requests.
        metric_cells: cells of one process's metrics row; a counter takes about 8, a histogram about 30.
    """

    worker_slots: int = 8
    endpoint_slots: int = 1024
    metric_cells: int = 32768

    def __post_init__(self) -> None:
        if self.worker_slots < 1 or self.endpoint_slots < 1 or self.metric_cells < LINE_CELLS:
            raise ValueError(f"a segment needs at least one slot of each kind: {self}")

    @classmethod
    def for_workers(cls, workers: int) -> Sizes:
        """Return sizes for `workers` workers: three generations may overlap while old ones drain."""
        return cls(worker_slots=_up(3 * workers + 2))

    @property
    def total_slots(self) -> int:
        """Worker slots and fixed slots together."""
        return self.worker_slots + len(FixedSlot)


@dataclass(frozen=True, slots=True)
class Region:
    """A run of cells.

    Attributes:
        start: index of its first cell in the segment.
        cells: how many.
    """

    start: int
    cells: int

    @property
    def end(self) -> int:
        """Index behind the last cell."""
        return self.start + self.cells


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each region lies for given sizes. See the table at the head of this file."""

    sizes: Sizes
    header: Region
    slots: Region
    inflight: Region
    marks: Region
    silent: Region
    moved: Region
    stats: Region
    stats_seq: Region
    leases: Region
    pending: Region
    waiters: Region
    pool_caps: Region
    remote_leases: Region
    remote_waiters: Region
    metrics: Region
    total_bytes: int

    @classmethod
    def of(cls, sizes: Sizes) -> Layout:
        """Compute the layout for `sizes`."""
        pairs = sizes.endpoint_slots * sizes.worker_slots
        at = 0

        def region(cells: int) -> Region:
            nonlocal at
            made = Region(at, cells)
            at = _up(at + cells)
            return made

        return cls(
            sizes=sizes,
            header=region(HEADER_CELLS),
            slots=region(sizes.total_slots * SLOT_CELLS),
            inflight=region(pairs),
            marks=region(pairs),
            silent=region(pairs),
            moved=region(pairs),
            stats=region(STAT_FIELDS * sizes.endpoint_slots),
            stats_seq=region(sizes.endpoint_slots),
            leases=region(POOLS * sizes.total_slots),
            pending=region(LANES * sizes.total_slots),
            waiters=region(LANES * BANDS * sizes.worker_slots),
            pool_caps=region(POOLS),
            remote_leases=region(POOLS),
            remote_waiters=region(LANES * BANDS),
            metrics=region(sizes.total_slots * sizes.metric_cells),
            total_bytes=at * CELL_BYTES,
        )

    @property
    def fingerprint(self) -> int:
        """Return a checksum over every name and offset, kept in the header."""
        parts = (
            LAYOUT_VERSION,
            repr(self),
            [list(enum.__members__.items()) for enum in (Header, SlotField, FixedSlot, StatField)],
        )
        return zlib.crc32(repr(parts).encode())

    def slot_cell(self, slot: int, field: SlotField) -> int:
        """Return the cell of `field` of a slot."""
        return self.slots.start + slot * SLOT_CELLS + field

    def fixed_slot(self, process: FixedSlot) -> int:
        """Return the slot number of a process of which there is one."""
        return self.sizes.worker_slots + process

    def metrics_row(self, slot: int) -> Region:
        """Return the metrics row of a slot."""
        return Region(self.metrics.start + slot * self.sizes.metric_cells, self.sizes.metric_cells)


def _up(cells: int) -> int:
    return -(-cells // LINE_CELLS) * LINE_CELLS
