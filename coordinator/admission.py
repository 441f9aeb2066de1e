"""Queues and grants: the slow path of admission, for the workers of this host.

One greenlet per worker's connection reads what it says; a grant goes out in the same turn in which room was
noticed. Who waits is known twice: here in the queues, for order and fairness, and in the workers' cells, for
everybody who asks "may I overtake?". After a restart the queues are empty and the cells are not: the workers
say again who waits, and nothing is granted until they had the time to.

A grant is counted in this process's own lease cells until the worker has it in its own; if the worker dies
or the request has left meanwhile, it is given back here. If this process dies its cells are zeroed like any
other process's.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import gevent
import msgspec
from gevent import socket as gevent_socket
from gevent.event import Event

from conf.schema import Config
from coordinator.core.peer_rows import LaneDemand
from coordinator.core.queue import BandFull, BandQueue, Waiter, queue_settings
from gateway.core import admission
from gateway.core import admission_wire as wire
from shm.bands import BandCells, LaneEndpoints, LeaseRow, barrier
from shm.endpoints import EndpointRecord, EndpointState, EndpointTable
from shm.inflight import InflightSums
from shm.layout import BANDS, StatField
from shm.marks import CooldownMarks
from shm.rows import WorkerSlot
from shm.segment import ADMISSION_FILE, Segment, SegmentMismatch

TURN_S = 0.02
"""While somebody waits, room is looked for this often beside the workers' notices."""
SETTLE_S = 0.3
"""After a restart with requests waiting: how long workers have to say so before the first grant."""
READ_BYTES = 65536
EXACT_PLACES = 256
"""Up to so many waiters a place is worth finding: it costs time for each of them."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lane:
    """One lane: its queue and what grants look at."""

    number: int
    pool: str
    pool_slot: int
    model: str
    queue: BandQueue
    settings: admission.LaneSettings
    endpoints: LaneEndpoints
    slots: tuple[int, ...]
    names: tuple[str, ...]
    tick: int = 0
    is_full: bool = False
    could_run: bool = True
    turn: int = 0
    places: dict[int, int] = field(default_factory=dict)


class _Worker:
    """One worker's connection."""

    def __init__(self, number: int, sock: gevent_socket.socket) -> None:
        self.number = number
        self._sock = sock
        self._out: list[bytes] = []
        self._wake = Event()
        self.is_open = True

    def key(self, request_id: int) -> int:
        """Return an id that no other worker's request has."""
        return self.number << 40 | request_id

    def send(self, message: wire.FromCoordinator) -> None:
        """Have a message sent; never blocks."""
        if self.is_open:
            self._out.append(wire.encode(message))
            self._wake.set()

    def write(self) -> None:
        """Send what was given to `send`; its own greenlet, until the connection ends."""
        while self.is_open:
            self._wake.wait()
            self._wake.clear()
            out, self._out = b"".join(self._out), []
            try:
                self._sock.sendall(out)
            except OSError:
                return

    def close(self) -> None:
        self.is_open = False
        self._wake.set()
        self._sock.close()


@dataclass(slots=True)
class _Request:
    """Where a waiting or just granted request came from."""

    worker: _Worker
    id: int
    lane: _Lane


class ClusterTurns(Protocol):
    """Whose turn it is among instances; see `coordinator.peers`."""

    def may_grant(self, pool: str, model: str) -> bool: ...
    def note_grant(self, pool: str, model: str) -> None: ...
    def kick(self) -> None: ...


class AdmissionServer:
    """The queues of the instance."""

    def __init__(
        self,
        segment: Segment,
        slot: WorkerSlot,
        config: Config,
        *,
        hurry: Callable[[Sequence[str]], None] = lambda _endpoints: None,
        turns: ClusterTurns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is listened to before `start`.

        Args:
            slot: the coordinator's.
            hurry: have endpoints looked at soon; must not block.
            turns: of the instances that share the pools; None: this one is alone.
        """
        self._cluster = turns
        self._hurry = hurry
        self._segment = segment
        self._config = config
        self._clock = clock
        self._cells = BandCells(segment)
        self._row = LeaseRow(segment, slot)
        self._table = EndpointTable(segment)
        self._inflight = InflightSums(segment)
        self._marks = CooldownMarks(segment)
        self._lanes: dict[int, _Lane] = {}
        self._waiting: dict[int, _Request] = {}
        self._granted: dict[int, _Request] = {}
        self._workers_seen = 0
        self._turn = 0
        self._listener: socket.socket | None = None
        self._somebody_waits = Event()
        self._settled_at = 0.0

    # Life.

    def start(self, spawn: Callable[[str, Callable[[], None]], object]) -> None:
        """Listen and grant.

        Args:
            spawn: starts a named greenlet that its owner ends.
        """
        path = self._segment.directory / ADMISSION_FILE
        path.unlink(missing_ok=True)
        self._listener = gevent_socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)
        self.apply(self._config)
        if any(self._cells.anybody_waits([lane]) for lane in self._lanes):
            self._settled_at = self._clock() + SETTLE_S
        self._spawn = spawn
        spawn("admission", self._accept)
        spawn("grants", self._grant_in_turns)

    def apply(self, config: Config) -> None:
        """Take up a configuration or a new endpoint table."""
        self._config = config
        try:
            self._table.refresh_if_changed()
        except SegmentMismatch:
            _log.warning("endpoint_table_unreadable", exc_info=True)
            return
        groups: dict[int, list[EndpointRecord]] = {}
        for record in self._table.records:
            groups.setdefault(record.lane, []).append(record)
        now = self._clock()
        for number, records in groups.items():
            self._set_lane(number, records, now)
        for number, lane in self._lanes.items():
            if number not in groups:
                self._let_go(lane, now)
        self._lanes = {number: lane for number, lane in self._lanes.items() if number in groups}

    def _set_lane(self, number: int, records: list[EndpointRecord], now: float) -> None:
        first = records[0]
        settings = admission.lane_settings(self._config, first.pool)
        endpoints = LaneEndpoints(records, self._table, self._inflight, self._marks)
        slots = tuple(record.slot for record in records)
        names = tuple(record.id for record in records)
        lane = self._lanes.get(number)
        if lane is None or (lane.pool, lane.model) != (first.pool, first.model):
            if lane is not None:
                self._let_go(lane, now)
            queue = BandQueue(queue_settings(self._config), now)
            self._lanes[number] = _Lane(
                number, first.pool, first.pool_slot, first.model, queue, settings, endpoints, slots, names
            )
            return
        lane.settings, lane.endpoints, lane.slots, lane.names = settings, endpoints, slots, names
        lane.queue.apply_settings(queue_settings(self._config), now)

    def _let_go(self, lane: _Lane, now: float) -> None:
        """Let all run who wait in a lane whose last endpoint has left: each finds another way or says so."""
        for waiter in lane.queue:
            self._row.take(lane.pool_slot, lane.number)
            self._tell_granted(lane, waiter, 0)
            lane.queue.cancel(waiter.id, now)

    def pump_all(self) -> None:
        """Look for room in every pool: other instances have left some. Never blocks."""
        now = self._clock()
        for pool in {lane.pool for lane in self._lanes.values() if len(lane.queue)}:
            self._pump(pool, now)

    def demand(self, lane_number: int) -> LaneDemand:
        """Tell the other instances' side what waits in a lane."""
        lane = self._lanes.get(lane_number)
        if lane is None or not len(lane.queue):
            return LaneDemand()
        tenants = tuple(len(lane.queue.tenants(band)) for band in range(len(lane.queue.depths())))
        return LaneDemand(tenants, lane.is_full, lane.could_run)

    # What workers say.

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            sock, _ = self._listener.accept()
            self._workers_seen += 1
            worker = _Worker(self._workers_seen, sock)
            gevent.spawn(self._serve, worker, sock)
            gevent.spawn(worker.write)

    def _serve(self, worker: _Worker, sock: gevent_socket.socket) -> None:
        splitter = wire.Splitter()
        try:
            while data := sock.recv(READ_BYTES):
                for message in splitter.feed(data):
                    self._hear(worker, wire.decode_from_worker(message))
        except OSError:
            pass
        except (wire.WireError, msgspec.DecodeError):
            _log.warning("admission_message_refused", exc_info=True)
        finally:
            worker.close()
            self._forget(worker)

    def _hear(self, worker: _Worker, message: wire.FromWorker) -> None:
        now = self._clock()
        if isinstance(message, wire.Enqueue):
            self._enqueue(worker, message, now)
        elif isinstance(message, wire.Taken):
            request = self._granted.pop(worker.key(message.id), None)
            if request is not None:
                self._row.take_back(request.lane.pool_slot, request.lane.number)
        elif isinstance(message, wire.Cancel):
            self._cancel(worker.key(message.id), now)
        else:
            lane = self._lanes.get(message.lane)
            if lane is not None:
                if message.tokens and 0 <= message.band < len(lane.settings.ceilings):
                    lane.queue.charge(message.band, message.tenant, message.tokens, now)
                self._pump(lane.pool, now)

    def _enqueue(self, worker: _Worker, message: wire.Enqueue, now: float) -> None:
        if self._table.generation != self._segment.endpoints_generation:
            self.apply(self._config)
        lane = self._lanes.get(message.lane)
        if lane is None or not 0 <= message.band < len(lane.settings.ceilings):
            # The worker knows a newer table or an older one; let it look for itself.
            worker.send(wire.Refuse(message.id, "no_endpoint", 1.0, ()))
            return
        key = worker.key(message.id)
        waiter = Waiter(
            key, message.band, message.tenant, message.enqueued_at, message.expires_at, float(message.cost)
        )
        try:
            displaced = lane.queue.enqueue(waiter, now)
        except BandFull:
            wait_s = lane.queue.retry_after_s(message.band, now)
            worker.send(wire.Refuse(message.id, "band_full", wait_s, lane.queue.depths()))
            return
        self._waiting[key] = _Request(worker, message.id, lane)
        if displaced is not None:
            self._refuse(displaced, "displaced", now)
        lane.places[key] = self._place(lane, key, message.band)
        self._pump(lane.pool, now)
        self._somebody_waits.set()

    def _place(self, lane: _Lane, key: int, band: int) -> int:
        """Return the place that a request is told; in a long queue without regard to whose turns come."""
        place = lane.queue.place(key) if len(lane.queue) <= EXACT_PLACES else None
        return place or sum(lane.queue.depths()[: band + 1])

    def _cancel(self, key: int, now: float) -> None:
        request = self._waiting.pop(key, None)
        if request is not None:
            request.lane.queue.cancel(key, now)
            request.lane.places.pop(key, None)
            return
        request = self._granted.pop(key, None)
        if request is not None:
            self._row.take_back(request.lane.pool_slot, request.lane.number)
            self._pump(request.lane.pool, now)

    def _forget(self, worker: _Worker) -> None:
        """A connection ended: its requests are enqueued again by the same worker, or gone with it."""
        now = self._clock()
        mine = [
            key
            for requests in (self._waiting, self._granted)
            for key, r in requests.items()
            if r.worker is worker
        ]
        for key in mine:
            self._cancel(key, now)

    # Grants.

    def _grant_in_turns(self) -> None:
        while True:
            self._somebody_waits.wait()
            gevent.sleep(TURN_S)
            now = self._clock()
            for pool in {lane.pool for lane in self._lanes.values() if len(lane.queue)}:
                self._pump(pool, now)
            for lane in self._lanes.values():
                if len(lane.queue):
                    self._hurry(lane.names)
            if not self._waiting:
                self._somebody_waits.clear()

    def _pump(self, pool: str, now: float) -> None:
        """Grant all that may run now in a pool: the highest band of all its lanes first."""
        if now < self._settled_at:
            return
        lanes = [lane for lane in self._lanes.values() if lane.pool == pool and len(lane.queue)]
        for lane in lanes:
            for waiter in lane.queue.expire(now):
                self._refuse(waiter, "queue_timeout", now)
            if len(lane.queue) and self._is_stuck(lane):
                for waiter in list(lane.queue):
                    lane.queue.cancel(waiter.id, now)
                    self._refuse(waiter, "runner_stuck", now)
        lanes = [lane for lane in lanes if len(lane.queue)]
        while lanes:
            # Lanes of equal rank take turns: what they wait for may be the pool's cap.
            lane = min(lanes, key=lambda each: (each.queue.top() or 0, each.turn))
            granted = None
            if self._cluster is None or self._cluster.may_grant(lane.pool, lane.model):
                granted = self._next(lane, now)
            if granted is None:
                if self._cluster is not None and lane.is_full:
                    self._cluster.kick()
                lanes.remove(lane)
                continue
            if self._cluster is not None:
                self._cluster.note_grant(lane.pool, lane.model)
            self._turn += 1
            lane.turn = self._turn
            self._tell_granted(lane, granted, lane.places.pop(granted.id, 0))
            if not len(lane.queue):
                lanes.remove(lane)

    def _next(self, lane: _Lane, now: float) -> Waiter | None:
        """Take out the waiter whose turn it is, if it may run; its lease stands in our cells then."""
        lane.tick += 1
        cells = self._cells
        remote = self._remote_waiters(lane)
        view = admission.LaneView(
            admission.Replicas._make(lane.endpoints.read()),
            remote,
            cells.pending(lane.number),
            cells.leases(lane.pool_slot),
            cells.cap(lane.pool_slot),
        )
        level = admission.saturation(view.replicas, view.pending, lane.settings, now)

        is_taken = False

        def may_start(band: int) -> bool:
            nonlocal is_taken
            verdict = admission.may_grant(view, band, level, lane.settings, tick=lane.tick)
            lane.is_full = verdict.outcome is admission.Outcome.FULL
            lane.could_run = verdict.outcome is not admission.Outcome.NO_REPLICA
            if not (
                verdict.starts or (verdict.outcome is admission.Outcome.NO_REPLICA and self._all_down(lane))
            ):
                return False
            # As on the fast path: only who sees the cap kept after having taken may go on (shm.bands).
            is_taken = True
            self._row.take(lane.pool_slot, lane.number)
            barrier()
            return view.cap == admission.NO_CAP or cells.leases(lane.pool_slot) <= view.cap

        granted = lane.queue.grant_next(may_start, now)
        if granted is None and is_taken:
            self._row.take_back(lane.pool_slot, lane.number)
        return granted

    def _remote_waiters(self, lane: _Lane) -> list[int]:
        everyone, own = self._cells.waiters(lane.number), self._cells.local_waiters(lane.number)
        return [all_ - mine for all_, mine in zip(everyone, own, strict=True)][:BANDS]

    def _all_down(self, lane: _Lane) -> bool:
        """Whether waiting is in vain: then requests run, so that each finds a fallback or says so at once."""
        states = self._table.column(lane.slots, StatField.STATE)
        return all(state >= EndpointState.DOWN for state in states)

    def _is_stuck(self, lane: _Lane) -> bool:
        """Whether nothing can run because an engine is stuck: the slots it holds would hold all others up."""
        states = self._table.column(lane.slots, StatField.STATE)
        return EndpointState.STUCK in states and self._all_down(lane)

    def _tell_granted(self, lane: _Lane, waiter: Waiter, place: int) -> None:
        """Hand over a lease that stands in our cells."""
        request = self._waiting.pop(waiter.id)
        self._granted[waiter.id] = request
        request.worker.send(wire.Grant(request.id, place))

    def _refuse(self, waiter: Waiter, code: str, now: float) -> None:
        request = self._waiting.pop(waiter.id)
        lane = request.lane
        lane.places.pop(waiter.id, None)
        wait_s = lane.queue.retry_after_s(waiter.band, now)
        request.worker.send(wire.Refuse(request.id, code, wait_s, lane.queue.depths()))
