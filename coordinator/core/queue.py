"""The queue of a lane: bands in strict order, tenants in turn, each tenant's requests as they came.

Rules:
    - The highest band with waiters is granted, or nobody: where that band may not start, no lower one slips
      past. What "may start" means is not decided here.
    - Within a band tenants take turns (`coordinator.core.turns`); within a tenant whoever came first goes
      first, by `enqueued_at` and not by when the message arrived. So a queue that workers rebuild after a
      restart of the coordinator is in its old order, whoever reconnects first.
    - A waiter past its TTL is never granted. Past means `now >= ttl_until`.
    - A band holds so many, and all together so many. Where the lane is full, a newcomer takes the place of
      the newest waiter of the lowest band below its own: the oldest have invested most, with least time left.
    - Whoever leaves, by grant, cancellation, expiry or displacement, leaves once and at once.

A grant costs the same whatever number of waiters and tenants there is (O(1) by request, O(log tenants) by
service), amortised; so do all others but `place`.

Sources: plan §7.2.3; llm-d's flow control (bands, stop at the first gated band).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Final, Literal

import msgspec

from conf.errors import LlmgwError
from conf.schema import Config
from coordinator.core.drain import DrainRate
from coordinator.core.turns import HALF_LIFE_S, LeastService, RoundRobin, Turns

# Entries of waiters that left, in a list, that are always allowed.
_SLACK: Final = 32


class Waiter(msgspec.Struct, frozen=True, gc=False):
    """A request that waits.

    Attributes:
        id: unique among all waiters of the instance.
        band: rank, 0 is the highest.
        tenant: on whom fairness runs.
        enqueued_at: monotonic seconds of this host at which it began to wait.
        ttl_until: monotonic seconds at which it has waited too long.
        cost: tokens it will probably take (input and twice the output); only for fairness by service.
    """

    id: int
    band: int
    tenant: str
    enqueued_at: float
    ttl_until: float
    cost: float = 0.0


class QueueSettings(msgspec.Struct, frozen=True):
    """What the operator says about a queue.

    Attributes:
        bands: how many there are.
        capacity_per_band: waiters of one band.
        capacity: waiters of all bands.
        fairness: what a tenant's turn is.
    """

    bands: int
    capacity_per_band: int = 2000
    capacity: int = 5000
    fairness: Literal["request", "service"] = "request"


class BandFull(LlmgwError):
    """There is no room for a newcomer of its band."""


def queue_settings(config: Config) -> QueueSettings:
    """Take what the configuration says about queues."""
    admission = config.router.admission
    return QueueSettings(
        bands=len(admission.bands),
        capacity_per_band=admission.queue_capacity_per_band,
        capacity=admission.queue_capacity,
        fairness=admission.fairness,
    )


class BandQueue:
    """The waiters of a lane.

    Attributes:
        drain: how fast it empties.
    """

    __slots__ = ("_bands", "_by_ttl", "_forgotten_at", "_settings", "_stays", "drain")

    def __init__(self, settings: QueueSettings, now: float) -> None:
        self._settings = settings
        self._stays: dict[int, _Stay] = {}  # by the id of the waiter
        self._bands = [_Band(_turns(settings, now)) for _ in range(settings.bands)]
        self._by_ttl = _Line(_TTL_UNTIL)
        self._forgotten_at = now
        self.drain = DrainRate()

    def __len__(self) -> int:
        return len(self._stays)

    def __contains__(self, waiter_id: int) -> bool:
        return waiter_id in self._stays

    def __iter__(self) -> Iterator[Waiter]:
        """Return all waiters, in no order that means anything."""
        return iter([stay.waiter for stay in self._stays.values()])

    def __repr__(self) -> str:
        return f"BandQueue(depths={self.depths()}, fairness={self._settings.fairness!r})"

    def depths(self) -> tuple[int, ...]:
        """Return the number of waiters of each band, by rank."""
        return tuple(band.depth for band in self._bands)

    def top(self) -> int | None:
        """Return the highest band that has waiters."""
        for rank, band in enumerate(self._bands):
            if band.depth:
                return rank
        return None

    def tenants(self, band: int) -> Mapping[str, int]:
        """Return the number of waiters of each tenant of a band. O(tenants)."""
        return {tenant: line.count for tenant, line in self._bands[band].lines.items()}

    def enqueue(self, waiter: Waiter, now: float) -> Waiter | None:
        """Let a request wait. One that waits already, by its id, is left where it is.

        Returns:
            Whoever was displaced to make room.

        Raises:
            BandFull: there is no room; nothing has changed.
        """
        if waiter.id in self._stays:
            return None
        band = self._bands[waiter.band]
        if band.depth >= self._settings.capacity_per_band:
            raise BandFull(f"band {waiter.band} holds {band.depth} waiters")
        displaced = None
        if len(self._stays) >= self._settings.capacity:
            displaced = self._newest_below(waiter.band)
            if displaced is None:
                raise BandFull(f"the lane holds {len(self._stays)} waiters, none of a lower band")
            self._remove(displaced, now)
        if not self._stays:
            self.drain.begin(now)
        stay = self._stays[waiter.id] = _Stay(waiter)
        self._by_ttl.add(stay)
        band.add(stay, now)
        return None if displaced is None else displaced.waiter

    def cancel(self, waiter_id: int, now: float) -> Waiter | None:
        """Take out a request that nobody waits for any more; None if it does not wait here."""
        stay = self._stays.get(waiter_id)
        if stay is None:
            return None
        self._remove(stay, now)
        return stay.waiter

    def expire(self, now: float) -> list[Waiter]:
        """Take out whoever has waited too long."""
        expired = []
        while (first := self._by_ttl.first()) is not None and first.waiter.ttl_until <= now:
            self._remove(first, now)
            expired.append(first.waiter)
        if now - self._forgotten_at >= HALF_LIFE_S:
            self._forgotten_at = now
            for band in self._bands:
                band.turns.forget(now)
        return expired

    def next_expiry(self) -> float | None:
        """Return the monotonic second at which `expire` has something to do; None while nobody waits."""
        first = self._by_ttl.first()
        return None if first is None else first.waiter.ttl_until

    def grant_next(self, may_start: Callable[[int], bool], now: float) -> Waiter | None:
        """Take out whose turn it is, if its band may start.

        Args:
            may_start: says whether the first waiter of a band may run now. Asked at most once, and only about
                the highest band that has waiters.
            now: monotonic seconds, for which `expire` was called before.

        Returns:
            The waiter to tell; None if nobody waits, if the highest band with waiters may not start, or if
            whose turn it is has waited too long.
        """
        rank = self.top()
        if rank is None or not may_start(rank):
            return None
        band = self._bands[rank]
        tenant = band.turns.first()
        stay = band.lines[tenant].first()
        assert stay is not None  # a tenant without waiters has no turn
        waiter = stay.waiter
        if waiter.ttl_until <= now:
            return None
        self.drain.count_grant(now)
        self._remove(stay, now)
        band.turns.served(tenant, waiter.cost, now)
        return waiter

    def charge(self, band: int, tenant: str, cost: float, now: float) -> None:
        """Correct what a tenant's request cost beside its estimate, in tokens; may be less than 0."""
        self._bands[band].turns.charge(tenant, cost, now)

    def place(self, waiter_id: int) -> int | None:
        """Return the place of a waiter if nobody comes or leaves, 1 for the next; None if it does not wait.

        Exact for fairness by request, an estimate for fairness by service. O(its tenant's waiters + tenants).
        """
        stay = self._stays.get(waiter_id)
        if stay is None:
            return None
        waiter = stay.waiter
        band = self._bands[waiter.band]
        turn = band.lines[waiter.tenant].stays().index(stay)
        before = sum(each.depth for each in self._bands[: waiter.band])
        is_ahead = True
        for tenant in band.turns.order():
            if tenant == waiter.tenant:
                before += turn
                is_ahead = False
            else:
                before += min(band.lines[tenant].count, turn + is_ahead)
        return before + 1

    def retry_after_s(self, band: int, now: float) -> float:
        """Estimate when a newcomer of a band would run; 0: not expected to clear."""
        return self.drain.wait_s(sum(self.depths()[: band + 1]) + 1, now)

    def apply_settings(self, settings: QueueSettings, now: float) -> None:
        """Take over a reloaded configuration. Nobody who waits loses the place in its band.

        Raises:
            ValueError: the number of bands differs.
        """
        if settings.bands != self._settings.bands:
            raise ValueError(f"a queue of {self._settings.bands} bands cannot get {settings.bands}")
        if settings.fairness != self._settings.fairness:
            for band in self._bands:
                order = band.turns.order()
                band.turns = _turns(settings, now)
                for tenant in order:
                    band.turns.join(tenant, now)
        self._settings = settings

    def check(self) -> None:
        """Assert that all parts tell the same; for tests. O(waiters)."""
        assert sum(band.depth for band in self._bands) == len(self._stays)
        assert all(stay.is_live for stay in self._stays.values())
        assert sorted(map(id, self._by_ttl.stays())) == sorted(map(id, self._stays.values()))
        for rank, band in enumerate(self._bands):
            mine = [stay for stay in self._stays.values() if stay.waiter.band == rank]
            assert band.depth == len(mine)
            assert set(band.turns.order()) == set(band.lines) == {stay.waiter.tenant for stay in mine}
            assert len(band.turns.order()) == len(band.lines)
            assert sorted(map(id, band.arrivals.stays())) == sorted(map(id, mine))
            for tenant, line in band.lines.items():
                stays = line.stays()
                assert len(stays) == line.count > 0
                assert all(stay.waiter.tenant == tenant for stay in stays)

    def _newest_below(self, rank: int) -> _Stay | None:
        for band in reversed(self._bands[rank + 1 :]):
            if band.depth:
                return band.arrivals.last()
        return None

    def _remove(self, stay: _Stay, now: float) -> None:
        waiter = stay.waiter
        del self._stays[waiter.id]
        stay.is_live = False
        self._bands[waiter.band].drop(waiter.tenant)
        self._by_ttl.drop()
        if not self._stays:
            self.drain.end(now)


def _turns(settings: QueueSettings, now: float) -> Turns:
    return LeastService(now) if settings.fairness == "service" else RoundRobin()


class _Stay(msgspec.Struct, gc=False):
    """One stay of a waiter in the queue; a request may leave and come back.

    Attributes:
        is_live: it has not left.
    """

    waiter: Waiter
    is_live: bool = True


_CAME_AT: Final[Callable[[_Stay], float]] = attrgetter("waiter.enqueued_at")
_TTL_UNTIL: Final[Callable[[_Stay], float]] = attrgetter("waiter.ttl_until")


class _Line:
    """Stays by a time, the earliest first; of equal times whoever came first.

    Nearly everyone is added at the end and leaves from the start. Those that leave from the middle stay as
    dead entries until they come to the start or are many.

    Attributes:
        count: stays that are live.
    """

    __slots__ = ("_entries", "_time", "count")

    def __init__(self, time: Callable[[_Stay], float]) -> None:
        self._entries: deque[_Stay] = deque()  # the first is live
        self._time = time
        self.count = 0

    def add(self, stay: _Stay) -> None:
        entries, time = self._entries, self._time
        if entries and time(stay) < time(entries[-1]):
            insort(entries, stay, key=time)
        else:
            entries.append(stay)
        self.count += 1

    def drop(self) -> None:
        """Take in that one stay is live no more."""
        self.count -= 1
        entries = self._entries
        while entries and not entries[0].is_live:
            entries.popleft()
        if len(entries) > 2 * self.count + _SLACK:
            self._entries = deque(self.stays())

    def first(self) -> _Stay | None:
        return self._entries[0] if self._entries else None

    def last(self) -> _Stay | None:
        entries = self._entries
        while entries and not entries[-1].is_live:
            entries.pop()
        return entries[-1] if entries else None

    def stays(self) -> list[_Stay]:
        return [stay for stay in self._entries if stay.is_live]


class _Band:
    """The waiters of a band.

    Attributes:
        depth: its waiters.
        turns: the order of its tenants.
        lines: tenant -> its waiters; only tenants that have some.
        arrivals: all of them.
    """

    __slots__ = ("arrivals", "depth", "lines", "turns")

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.lines: dict[str, _Line] = {}
        self.arrivals = _Line(_CAME_AT)
        self.depth = 0

    def add(self, stay: _Stay, now: float) -> None:
        tenant = stay.waiter.tenant
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = _Line(_CAME_AT)
            self.turns.join(tenant, now)
        line.add(stay)
        self.arrivals.add(stay)
        self.depth += 1

    def drop(self, tenant: str) -> None:
        """Take in that one stay of a tenant is live no more."""
        line = self.lines[tenant]
        line.drop()
        if not line.count:
            del self.lines[tenant]
            self.turns.leave(tenant)
        self.arrivals.drop()
        self.depth -= 1
