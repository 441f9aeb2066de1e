"""Several instances: one greenlet that exchanges with the others through the ledger in Redis.

Every `exchange_interval` (sooner while shares move) it tells what this instance runs and who waits, learns
the same of the others, and writes to the segment what workers and the grant loop want to know:

    pool_caps         this instance's share of each hard cap
    remote_leases, remote_waiters, REMOTE_INFLIGHT    sums over the other instances

Without Redis: shares stay as they are, so the cap holds; the others' figures are forgotten after a second or
two, so that nobody waits for waiters whom nobody hears of; it tries again with growing pauses, and a line is
logged when Redis goes and when it comes. An instance that starts while Redis is away has no share of a capped
pool until Redis is there; a coordinator that comes back has the share its workers see.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping

import gevent
from gevent import socket
from gevent.event import Event

from conf.schema import Config
from coordinator.core.lane_turns import LaneTurns, Turns
from coordinator.core.peer_rows import (
    SILENT_S,
    LaneDemand,
    LaneRow,
    Peer,
    Row,
    Watch,
    encode,
    replaced,
)
from coordinator.core.shares import Need, PoolShare, Statement, plan_shares
from coordinator.greenlets import Greenlets
from coordinator.ledger import Answer, Ledger, LedgerAway
from shm.bands import BandPublisher, barrier
from shm.definitions import PEERS, PEERS_REMOVED, POOL_SHARE, REDIS_EXCHANGES, REDIS_UP
from shm.endpoints import NO_CAP, EndpointPublisher
from shm.inflight import InflightSums
from shm.layout import BANDS
from shm.metrics import Gauge, MetricsRow
from shm.segment import Segment

LOG = logging.getLogger(__name__)

# While shares move, and somebody waits for them.
QUICK_S = 0.02
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 0.5
PROBE_S = 0.3
STOP_S = 1.0


class Peers:
    """The exchange of this instance.

    Attributes:
        is_up: whether the last exchange worked.
    """

    def __init__(
        self,
        segment: Segment,
        metrics: MetricsRow,
        publisher: EndpointPublisher,
        config: Config,
        *,
        instance: str,
        listen: str,
        demand: Callable[[int], LaneDemand],
        on_change: Callable[[], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire it; nothing runs yet.

        Args:
            publisher: the one that publishes the table.
            config: with `redis.url`.
            instance: unique name in the cluster, the same after a restart of the coordinator, another one
                after a restart of the launcher; no slash.
            listen: `host:port` where clients connect, port bound; the others look there whether this instance
                lives when it is not heard of. Empty: they go by silence alone.
            demand: of a lane; called at each exchange, must not block.
            on_change: a share has grown or others' waiters have become fewer, so that waiters may run now;
                must not block.
            on_failure: see `Greenlets`.
        """
        self._segment = segment
        self._publisher = publisher
        self._listen = listen
        self._address = ""
        self._demand = demand
        self._on_change = on_change
        self._clock = clock
        self._interval = config.redis.exchange_interval
        self._bands = BandPublisher(segment)
        self._inflight = InflightSums(segment)
        self._ledger = Ledger(config.redis, instance, clock)
        self._instance = instance
        self._metrics = metrics
        self._up = metrics.gauge(REDIS_UP)
        self._ok = metrics.counter(REDIS_EXCHANGES, ("ok",))
        self._failed = metrics.counter(REDIS_EXCHANGES, ("failed",))
        self._peers_gauge = metrics.gauge(PEERS)
        self._removed = metrics.counter(PEERS_REMOVED)
        self._share_gauges: dict[str, Gauge] = {}
        self._greenlets = Greenlets(on_failure)
        self._kick = Event()
        self._watch = Watch()
        self._shares: dict[str, PoolShare] = {}
        self._caps: dict[str, int] = {}
        self._turns: dict[tuple[str, str], LaneTurns] = {}
        self._peers: dict[str, Peer] = {}
        self._silent: frozenset[str] = frozenset()
        self._dead: dict[str, int] = {}
        self._held: Mapping[str, int] = {}
        self._is_settled = False
        self._remote_waiters: dict[int, list[int]] = {}
        self.is_up = False
        self._is_known_away = False
        self._heard_at = clock()
        self._random = random.Random()
        self._forget_others()
        self.apply(config)

    def start(self) -> None:
        """Begin to exchange."""
        self._greenlets.spawn("peers", self._run)

    def stop(self) -> None:
        """End it, and take this instance out if nothing of it runs any more. Blocks for a second at most."""
        self._greenlets.stop()
        self._ledger.close()
        if self.is_up and not any(self._bands.leases(slot) for slot in self._pool_slots().values()):
            for share in self._shares.values():
                share.aim(0)
            self._publish_shares()
            barrier()
            try:
                with gevent.Timeout(STOP_S, False):
                    self._ledger.connect()
                    self._ledger.leave()
            except LedgerAway as exc:
                LOG.debug("redis_leave_failed", extra={"reason": str(exc)})
        self._ledger.close()
        self._up.set(0)

    def kick(self) -> None:
        """Exchange soon: somebody waits for a share. Never blocks."""
        self._kick.set()

    def apply(self, config: Config) -> None:
        """Take up caps; to be called before the endpoints of `config` are published. Never blocks."""
        self._caps = {
            name: pool.max_concurrent
            for name, pool in config.pools.items()
            if pool.max_concurrent is not None
        }
        self._take_up_pools()
        self.kick()

    def caps(self) -> dict[str, int]:
        """Return the caps to publish a table with: what this instance has of each, nothing of a new one."""
        return {name: self._shares[name].in_force if name in self._shares else 0 for name in self._caps}

    def may_grant(self, pool: str, model: str) -> bool:
        """Whether, with waiters of the same band elsewhere, it is this instance's turn in a lane."""
        turns = self._turns.get((pool, model))
        return turns is None or turns.may_grant()

    def note_grant(self, pool: str, model: str) -> None:
        """Count a grant to a waiter."""
        turns = self._turns.get((pool, model))
        if turns is None:
            turns = self._turns[pool, model] = LaneTurns()
        turns.note_grant()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                if not self.is_up:
                    self._address = _reachable(self._listen, self._ledger.connect())
                    self._watch.reset()
                is_moving = self._exchange()
            except LedgerAway as exc:
                self._note_away(exc)
                gevent.sleep(pause * (0.5 + self._random.random() / 2))
                pause = min(2 * pause, LAST_PAUSE_S)
                continue
            pause = FIRST_PAUSE_S
            self._kick.clear()
            if is_moving or self._kick.wait(self._interval):
                gevent.sleep(min(QUICK_S, self._interval))

    def _exchange(self) -> bool:
        """Do one exchange; return whether shares move for somebody who waits."""
        self._take_up_pools()
        row = self._row()
        statements = self._statements(row)
        dead, self._dead = self._dead, {}
        answer = self._ledger.exchange(encode(row), statements, dead)
        # no switch until the shares are published
        before = {name: share.in_force for name, share in self._shares.items()}
        for name in statements:
            self._shares[name].accept(answer.held.get(name, 0))
        self._publish_shares()
        self._ok.inc()
        self._note_back()
        has_grown = any(self._shares[name].in_force > old for name, old in before.items())
        self._take_up_others(answer, dead)
        fewer_waiters = self._publish_others()
        self._note_turns(row)
        if has_grown or fewer_waiters:
            self._on_change()
        self._find_dead()
        return any(
            statement.want > answer.held.get(name, 0) or statement.floor > self._shares[name].in_force
            for name, statement in statements.items()
        ) and self._somebody_lacks(row)

    def _row(self) -> Row:
        """Read from the segment what this instance runs and who waits."""
        cells = self._bands
        inflight, lanes, leases = {}, {}, {}
        for record in self._publisher.records:
            if count := self._inflight.of(record.slot):
                inflight[record.id] = count
            lanes[record.pool, record.model] = record.lane
        for pool, slot in self._pool_slots().items():
            if count := cells.leases(slot):
                leases[pool] = count
        rows = []
        for (pool, model), lane in lanes.items():
            waiters = self._own_waiters(lane)
            turns = self._turns.get((pool, model))
            grants = turns.grants if turns else 0
            if any(waiters) or grants:
                demand = self._demand(lane) if any(waiters) else LaneDemand()
                if not demand.could_run:
                    waiters = ()
                rows.append(LaneRow(pool, model, waiters, demand.tenants, grants, demand.is_full))
        return Row(self._address, inflight, leases, tuple(rows))

    def _own_waiters(self, lane: int) -> tuple[int, ...]:
        own = self._bands.local_waiters(lane)
        while own and not own[-1]:
            own.pop()
        return tuple(own)

    def _statements(self, row: Row) -> dict[str, Statement]:
        """Plan the shares, lower ours at once, and say what is used and wanted."""
        # Before the others are known there is nothing to plan by.
        for name, share in self._shares.items() if self.is_up else ():
            needs = {self._instance: _need(row, name, max(self._held.get(name, 0), share.in_force))}
            for peer_name, peer in self._peers.items():
                if peer_name in self._dead:
                    continue
                held = peer.shares.get(name, 0)
                # Of a silent one nothing is known but that it may use all it holds.
                is_silent = peer_name in self._silent
                need = Need(held=held, leases=held) if is_silent else _need(peer.row, name, held)
                needs[peer_name] = need
            target = plan_shares(share.cap, needs)[self._instance]
            # Nobody could have what we give up before shares are granted again.
            share.aim(target if self._is_settled else max(target, share.in_force))
        self._publish_shares()
        barrier()
        slots = self._pool_slots()
        return {name: share.state(self._bands.leases(slots[name])) for name, share in self._shares.items()}

    def _take_up_others(self, answer: Answer, dead: Mapping[str, int]) -> None:
        for name in dead.keys() - answer.peers.keys():
            self._removed.inc()
            LOG.warning("peer_removed", extra={"peer": name})
        self._held, self._peers, self._is_settled = answer.held, answer.peers, answer.is_settled
        numbers = {name: peer.number for name, peer in answer.peers.items()}
        silent = self._watch.look(numbers, self._clock())
        for name in silent - self._silent:
            LOG.warning("peer_silent", extra={"peer": name})
        self._silent = silent
        self._heard_at = self._clock()
        self._peers_gauge.set(len(numbers.keys() - silent))

    def _publish_others(self) -> bool:
        """Write the sums over the other instances; return whether there are fewer waiters anywhere."""
        living = [peer.row for name, peer in self._peers.items() if name not in self._silent]
        inflight: dict[str, int] = {}
        leases: dict[str, int] = {}
        waiters: dict[tuple[str, str], list[int]] = {}
        for row in living:
            _add(inflight, row.inflight)
            _add(leases, row.leases)
            for lane in row.lanes:
                sums = waiters.setdefault((lane.pool, lane.model), [0] * BANDS)
                for band, count in enumerate(lane.waiters[:BANDS]):
                    sums[band] += count
        for record in self._publisher.records:
            self._publisher.set_remote_inflight(record.slot, inflight.get(record.id, 0))
        for pool, slot in self._pool_slots().items():
            self._bands.set_remote_leases(slot, leases.get(pool, 0))
        has_fewer = False
        for number, key in {r.lane: (r.pool, r.model) for r in self._publisher.records}.items():
            sums = waiters.get(key, [0] * BANDS)
            old = self._remote_waiters.get(number, [0] * BANDS)
            has_fewer = has_fewer or any(new < was for new, was in zip(sums, old, strict=True))
            if sums != old:
                self._remote_waiters[number] = sums
                self._bands.set_remote_waiters(number, sums)
        return has_fewer

    def _forget_others(self) -> None:
        for record in self._publisher.records:
            self._publisher.set_remote_inflight(record.slot, 0)
            self._bands.set_remote_leases(record.pool_slot, 0)
            self._bands.set_remote_waiters(record.lane, ())
        self._remote_waiters.clear()
        self._turns.clear()
        self._peers_gauge.set(0)

    def _note_turns(self, row: Row) -> None:
        """Compare grants in the lanes in which waiters of the same band wait here and elsewhere."""
        for lane in row.lanes:
            key = (lane.pool, lane.model)
            band = next((band for band, count in enumerate(lane.waiters) if count), None)
            others = {}
            for name, peer in self._peers.items():
                theirs = None if name in self._silent else _lane(peer.row, key)
                if band is not None and theirs and _at(theirs.waiters, band):
                    others[name] = Turns(max(_at(theirs.tenants, band), 1), theirs.grants)
            if others or key in self._turns:
                tenants = _at(lane.tenants, band) if band is not None else 0
                self._turns.setdefault(key, LaneTurns()).note_exchange(tenants, others)

    def _find_dead(self) -> None:
        """Look at the addresses of silent instances that still hold something; may take `PROBE_S`."""
        for name in self._silent:
            peer = self._peers[name]
            if name in replaced(self._silent, self._peers, self._address) or not _accepts(peer.row.address):
                self._dead[name] = peer.number

    def _somebody_lacks(self, row: Row) -> bool:
        rows = [row, *(peer.row for name, peer in self._peers.items() if name not in self._silent)]
        return any(lane.is_full and any(lane.waiters) for each in rows for lane in each.lanes)

    def _pool_slots(self) -> dict[str, int]:
        return {record.pool: record.pool_slot for record in self._publisher.records}

    def _take_up_pools(self) -> None:
        """Have a `PoolShare` for every capped pool of the table, and no cap on the others."""
        slots = self._pool_slots()
        for name, slot in slots.items():
            cap = self._caps.get(name)
            share = self._shares.get(name)
            if cap is None:
                if share is not None:
                    del self._shares[name]
                if self._bands.cap(slot) != NO_CAP:
                    self._bands.set_cap(slot, NO_CAP)
            elif share is None:
                # What the cell says is what the workers use: a predecessor left it.
                self._shares[name] = PoolShare(cap, max(self._bands.cap(slot), 0))
            elif share.cap != cap:
                share.cap = cap
                share.aim(min(share.in_force, cap))
        for name in self._shares.keys() - slots.keys():
            del self._shares[name]
        self._publish_shares()

    def _publish_shares(self) -> None:
        slots = self._pool_slots()
        for name, share in self._shares.items():
            if name in slots and self._bands.cap(slots[name]) != share.in_force:
                self._bands.set_cap(slots[name], share.in_force)
            if name not in self._share_gauges:
                self._share_gauges[name] = self._metrics.gauge(POOL_SHARE, (name,))
        for name, gauge in self._share_gauges.items():
            gauge.set(self._shares[name].in_force if name in self._shares else 0)

    def _note_away(self, exc: LedgerAway) -> None:
        self._failed.inc()
        if self.is_up or not self._is_known_away:
            LOG.warning("redis_away", extra={"reason": str(exc)})
        self.is_up, self._is_known_away = False, True
        self._up.set(0)
        self._dead.clear()
        self._held = {}
        if self._peers and self._clock() - self._heard_at >= SILENT_S:
            self._peers, self._silent = {}, frozenset()
            self._forget_others()
            self._on_change()

    def _note_back(self) -> None:
        if not self.is_up:
            LOG.info("redis_connected", extra={"was_away": self._is_known_away})
        self.is_up, self._is_known_away = True, False
        self._up.set(1)


def _need(row: Row, pool: str, held: int) -> Need:
    """Sum the lanes of a pool in which the share alone holds waiters back."""
    waiters, tenants = [0] * BANDS, [0] * BANDS
    for lane in row.lanes:
        if lane.pool == pool and lane.is_full:
            for band in range(min(BANDS, len(lane.waiters))):
                waiters[band] += lane.waiters[band]
                tenants[band] += _at(lane.tenants, band)
    return Need(held, row.leases.get(pool, 0), tuple(waiters), tuple(tenants))


def _lane(row: Row, key: tuple[str, str]) -> LaneRow | None:
    return next((lane for lane in row.lanes if (lane.pool, lane.model) == key), None)


def _at(figures: tuple[int, ...], band: int) -> int:
    return figures[band] if band < len(figures) else 0


def _add(sums: dict[str, int], figures: Mapping[str, int]) -> None:
    for name, figure in figures.items():
        sums[name] = sums.get(name, 0) + figure


def _reachable(listen: str, own_host: str) -> str:
    """Return where other hosts reach a listener: a wildcard is the host's address towards Redis."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port or port == "0":
        return ""
    if host in ("", "::", "0.0.0.0"):
        host = own_host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _accepts(address: str) -> bool:
    """Whether anybody accepts connections at an address."""
    host, _, port = address.rpartition(":")
    if not host:
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except OSError:
        return False
    return True
