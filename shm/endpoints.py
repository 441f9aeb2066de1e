"""The endpoint table: which endpoints there are, and what the coordinator last saw of each.

Records (what an endpoint is) are the file `endpoints`, a snapshot replaced by rename, with a generation in
the header. Stats (how it is doing) are cells: region `stats`, float64, [StatField][endpoint_slot], and
`stats_seq`, int64, [endpoint_slot]. The coordinator writes both, nobody else does.

Torn reads. Every stats cell is whole, so a decision may read single columns (`EndpointTable.column`); two
columns may then come from two scrapes, which scheduling can bear. Who needs a row from one scrape uses
`stats`: the sequence is odd while a row is written (seqlock; relies on x86's store order, and on CPython not
reordering).

Crash recovery: a coordinator killed inside a row leaves its sequence odd; readers give up waiting after a
bounded number of tries and take what is there, and the next `set_stats` makes it even. A new coordinator's
publisher reads the old table first, so that an endpoint keeps its slot, and with it its in-flight counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec

from conf.errors import LlmgwError
from shm.inflight import InflightSums
from shm.layout import LANES, POOLS, StatField
from shm.marks import CooldownMarks
from shm.segment import Segment, SegmentMismatch

UNASSIGNED = -1
NO_CAP = -1
_SEQLOCK_TRIES = 64


class EndpointTableFull(LlmgwError):
    """More endpoints than the segment has slots; restart with a larger segment."""


class EndpointState(IntEnum):
    """Whether requests may go to an endpoint; value of the column STATE."""

    UNKNOWN = 0  # never scraped; usable
    READY = 1
    STALE = 2  # scrapes fail; usable, judged by in-flight counts alone
    DOWN = 3  # refuses connections, is unhealthy, or does not serve the model; not usable
    DRAINING = 4  # gets nothing new
    STUCK = 5  # would be usable, but a request there makes no progress; not usable

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent there."""
        return self <= EndpointState.STALE


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint is.

    Attributes:
        slot: its place in the regions by endpoint slot; `UNASSIGNED` until published.
        id: unique name, the `replica` label of metrics and logs.
        model: catalog name of the model it serves.
        url: base address, http or https, without /v1.
        engine: kind of engine, names the metric mapping.
        pool: name of its pool.
        served_model: the name the engine knows the model by.
        api_key: what the engine wants as bearer token; never logged.
        tls_ca: path of a CA bundle for https; None: the system's.
        tls_verify: whether the engine's certificate is checked.
        weight: share relative to other endpoints of the model.
        pool_slot: number of its pool, lane: of its (pool, model); `UNASSIGNED` until published.
        batch_capacity: requests it runs at once, as configured; 0: to be learned.
        probe: whether it is asked for health and metrics; else it stays UNKNOWN.
    """

    slot: int = UNASSIGNED
    pool_slot: int = UNASSIGNED
    lane: int = UNASSIGNED
    id: str
    model: str
    url: str
    engine: str
    pool: str
    served_model: str
    api_key: str | None = None
    tls_ca: str | None = None
    tls_verify: bool = True
    weight: float = 1.0
    batch_capacity: int = 0
    probe: bool = True

    def __repr__(self) -> str:
        """Show what tells endpoints apart, and never the key."""
        return f"EndpointRecord(slot={self.slot}, id={self.id!r}, model={self.model!r}, url={self.url!r})"


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """What the coordinator last saw of an endpoint.

    Units: see `shm.layout.StatField`; `kv` None: the engine does not say.
    """

    state: EndpointState = EndpointState.UNKNOWN
    waiting: float = 0.0
    running: float = 0.0
    kv: float | None = None
    scraped_at: float = 0.0
    failures: int = 0
    max_context: int = 0
    block_size: int = 0
    num_blocks: int = 0
    drain_rate: float = 0.0
    batch_capacity: int = 0
    kv_per_request: float = 0.0


_decode_records = msgspec.msgpack.Decoder(tuple[EndpointRecord, ...]).decode


class EndpointPublisher:
    """Writes the endpoint table. Coordinator only."""

    __slots__ = ("_f64", "_i64", "_inflight", "_marks", "_segment", "_slots", "_states", "_stuck", "records")

    def __init__(self, segment: Segment) -> None:
        """Go on from the table that is published, if there is one."""
        self._segment = segment
        self._i64 = segment.cells_i64
        self._f64 = segment.cells_f64
        self._inflight = InflightSums(segment)
        self._marks = CooldownMarks(segment)
        self.records: tuple[EndpointRecord, ...] = ()
        self._states: dict[int, EndpointState] = {}  # slot -> state, were it not stuck
        self._stuck: set[int] = set()
        # The file and not the generation tells: a coordinator may have died between writing the two.
        with suppress(SegmentMismatch):
            self.records = _decode_records(segment.read_endpoints())
        self._slots = {record.id: record.slot for record in self.records}

    def publish(
        self, records: Iterable[EndpointRecord], now: float, caps: Mapping[str, int] | None = None
    ) -> tuple[EndpointRecord, ...]:
        """Replace the table; workers take it up at their next look at the generation.

        An endpoint keeps the slot it has. A new one gets a slot that no published endpoint has, with nothing
        in flight and no cooldown mark in force, and stats that say nothing is known yet. The slot an endpoint
        leaves in this call is not given away in it, since workers still use the old table.

        Args:
            records: all endpoints, ids unique; their `slot` is ignored.
            now: monotonic seconds.
            caps: hard cap of each pool that has one, in force before anybody sees the table; None: leave the
                caps as they are, somebody else sets them.

        Returns:
            The records with their slots.

        Raises:
            EndpointTableFull: no free slot; the old table stays in force.
        """
        wanted = list(records)
        taken = set(self._slots.values())
        free = iter(range(self._segment.layout.sizes.endpoint_slots))
        slots: dict[str, int] = {}
        for record in wanted:
            slot = self._slots.get(record.id)
            if slot is None:
                slot = next((each for each in free if each not in taken and self._is_clean(each, now)), None)
                if slot is None:
                    raise EndpointTableFull(
                        f"no free slot for endpoint {record.id!r} among {len(taken)} in use"
                    )
                self.set_stats(slot, EndpointStats())
                self.set_stuck(slot, 0.0)
                self.set_remote_inflight(slot, 0)
            slots[record.id] = slot
        pools = _numbers(
            {record.pool: record.pool_slot for record in self.records}, [r.pool for r in wanted], POOLS
        )
        lanes = _numbers(
            {(record.pool, record.model): record.lane for record in self.records},
            [(r.pool, r.model) for r in wanted],
            LANES,
        )
        if caps is not None:
            for name, number in pools.items():
                self._i64[self._segment.layout.pool_caps.start + number] = caps.get(name, NO_CAP) + 1
        self.records = tuple(
            msgspec.structs.replace(
                record,
                slot=slots[record.id],
                pool_slot=pools[record.pool],
                lane=lanes[record.pool, record.model],
            )
            for record in wanted
        )
        self._slots = slots
        self._segment.publish_endpoints(msgspec.msgpack.encode(self.records))
        return self.records

    def set_stats(self, slot: int, stats: EndpointStats) -> None:
        """Replace what is known of an endpoint; readers of whole rows never see half of it."""
        layout = self._segment.layout
        width = layout.sizes.endpoint_slots
        at = layout.stats.start + slot
        seq_at = layout.stats_seq.start + slot
        cells = self._f64
        odd = self._i64[seq_at] | 1
        self._i64[seq_at] = odd
        self._states[slot] = stats.state
        cells[at + StatField.STATE * width] = self._shown_state(slot)
        cells[at + StatField.WAITING * width] = stats.waiting
        cells[at + StatField.RUNNING * width] = stats.running
        cells[at + StatField.KV * width] = math.nan if stats.kv is None else stats.kv
        cells[at + StatField.SCRAPED_AT * width] = stats.scraped_at
        cells[at + StatField.FAILURES * width] = stats.failures
        cells[at + StatField.MAX_CONTEXT * width] = stats.max_context
        cells[at + StatField.BLOCK_SIZE * width] = stats.block_size
        cells[at + StatField.NUM_BLOCKS * width] = stats.num_blocks
        cells[at + StatField.DRAIN_RATE * width] = stats.drain_rate
        cells[at + StatField.BATCH_CAPACITY * width] = stats.batch_capacity
        cells[at + StatField.KV_PER_REQUEST * width] = stats.kv_per_request
        self._i64[seq_at] = odd + 1

    def set_remote_inflight(self, slot: int, requests: int) -> None:
        """Set how many requests other instances have under way at an endpoint."""
        layout = self._segment.layout
        at = layout.stats.start + StatField.REMOTE_INFLIGHT * layout.sizes.endpoint_slots
        self._f64[at + slot] = requests

    def set_stuck(self, slot: int, since: float) -> None:
        """Say since when an endpoint counts as stuck, monotonic seconds; 0: it does not."""
        (self._stuck.add if since else self._stuck.discard)(slot)
        layout = self._segment.layout
        width = layout.sizes.endpoint_slots
        at = layout.stats.start + slot
        self._f64[at + StatField.STUCK_SINCE * width] = since
        self._f64[at + StatField.STATE * width] = self._shown_state(slot)

    def _shown_state(self, slot: int) -> EndpointState:
        state = self._states.get(slot, EndpointState.UNKNOWN)
        return EndpointState.STUCK if slot in self._stuck and state.is_usable else state

    def _is_clean(self, slot: int, now: float) -> bool:
        return self._inflight.of(slot) == 0 and self._marks.until(slot) <= now


_Name = TypeVar("_Name", bound=Hashable)


def _numbers(old: dict[_Name, int], wanted: Iterable[_Name], limit: int) -> dict[_Name, int]:
    """Number pools or lanes: known ones keep their number, and none is given away in the call that frees it.

    Raises:
        EndpointTableFull: more of them than the segment has room for.
    """
    taken = set(old.values())
    free = (number for number in range(limit) if number not in taken)
    numbers: dict[_Name, int] = {}
    for name in wanted:
        if name not in numbers:
            number = old.get(name)
            if number is None:
                number = next(free, None)
            if number is None:
                raise EndpointTableFull(
                    f"more than {limit} pools, or pairs of a pool and a model: no room for {name!r}"
                )
            numbers[name] = number
    return numbers


class EndpointTable:
    """Reads the endpoint table; one per process.

    Attributes:
        records: all endpoints.
        by_model: endpoints by catalog model name.
        by_id: endpoints by id.
        generation: which publication this is; 0: none yet, all of the above empty.
    """

    __slots__ = (
        "_f64",
        "_i64",
        "_segment",
        "_stats",
        "_stats_seq",
        "_width",
        "by_id",
        "by_model",
        "generation",
        "records",
    )

    def __init__(self, segment: Segment) -> None:
        """Read the table that is published, if there is one."""
        layout = segment.layout
        self._segment = segment
        self._i64 = segment.cells_i64
        self._f64 = segment.cells_f64
        self._stats = layout.stats.start
        self._stats_seq = layout.stats_seq.start
        self._width = layout.sizes.endpoint_slots
        self.generation = 0
        self.records: tuple[EndpointRecord, ...] = ()
        self.by_model: dict[str, tuple[EndpointRecord, ...]] = {}
        self.by_id: dict[str, EndpointRecord] = {}
        self.refresh_if_changed()

    def refresh_if_changed(self) -> bool:
        """Take up a newer table; costs one cell read when there is none.

        The attributes are replaced, never changed in place: who holds an old one goes on with a whole old
        table.

        Returns:
            Whether there was a newer one.

        Raises:
            SegmentMismatch: the file cannot be read (its directory is gone); the old table stays.
        """
        generation = self._segment.endpoints_generation
        if generation == self.generation:
            return False
        records = _decode_records(self._segment.read_endpoints())
        by_model: dict[str, list[EndpointRecord]] = {}
        for record in records:
            by_model.setdefault(record.model, []).append(record)
        self.records = records
        self.by_model = {model: tuple(group) for model, group in by_model.items()}
        self.by_id = {record.id: record for record in records}
        self.generation = generation
        return True

    def stat(self, slot: int, field: StatField) -> float:
        """Return one value of one endpoint."""
        return self._f64[self._stats + field * self._width + slot]

    def column(self, slots: Sequence[int], field: StatField) -> list[float]:
        """Return one value of each of several endpoints, in the order given. Runs on every request.

        A `range` with step 1, as the endpoints of one model mostly are, is read in one piece.
        """
        cells, base = self._f64, self._stats + field * self._width
        if isinstance(slots, range) and slots.step == 1:
            return list(cells[base + slots.start : base + slots.stop])
        return [cells[base + slot] for slot in slots]

    def stats(self, slot: int) -> EndpointStats:
        """Return all that is known of an endpoint, from one and the same scrape.

        After 64 interrupted tries (a writer that died inside the row, or never pauses) it returns what is
        there.
        """
        for _ in range(_SEQLOCK_TRIES):
            stats = self.try_stats(slot)
            if stats is not None:
                return stats
        return self._read_stats(slot)

    def try_stats(self, slot: int) -> EndpointStats | None:
        """Return all that is known of an endpoint, or None if it was being replaced meanwhile."""
        before = self._i64[self._stats_seq + slot]
        stats = self._read_stats(slot)
        return None if before & 1 or self._i64[self._stats_seq + slot] != before else stats

    def _read_stats(self, slot: int) -> EndpointStats:
        values = [self.stat(slot, field) for field in StatField]
        kv = values[StatField.KV]
        return EndpointStats(
            state=EndpointState(int(values[StatField.STATE])),
            waiting=values[StatField.WAITING],
            running=values[StatField.RUNNING],
            kv=None if math.isnan(kv) else kv,
            scraped_at=values[StatField.SCRAPED_AT],
            failures=int(values[StatField.FAILURES]),
            max_context=int(values[StatField.MAX_CONTEXT]),
            block_size=int(values[StatField.BLOCK_SIZE]),
            num_blocks=int(values[StatField.NUM_BLOCKS]),
            drain_rate=values[StatField.DRAIN_RATE],
            batch_capacity=int(values[StatField.BATCH_CAPACITY]),
            kv_per_request=values[StatField.KV_PER_REQUEST],
        )
