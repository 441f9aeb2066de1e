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
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Final, Literal, TypeAlias

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

    __slots__ = (
        "_bands",
        "_by_ttl",
        "_forgotten_at",
        "_live",
        "_next_number",
        "_numbers",
        "_settings",
        "drain",
    )

    def __init__(self, settings: QueueSettings, now: float) -> None:
        self._settings = settings
        # Every stay in the queue has a number of its own: a request may leave and come back.
        self._live: dict[int, Waiter] = {}
        self._numbers: dict[int, int] = {}  # id of a waiter -> number of its stay
        self._next_number = 0
        self._bands = [_Band(_turns(settings, now)) for _ in range(settings.bands)]
        self._by_ttl = _Line()
        self._forgotten_at = now
        self.drain = DrainRate()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, waiter_id: int) -> bool:
        return waiter_id in self._numbers

    def __iter__(self) -> Iterator[Waiter]:
        """Return all waiters, in no order that means anything."""
        return iter(tuple(self._live.values()))

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
        if waiter.id in self._numbers:
            return None
        band = self._bands[waiter.band]
        if band.depth >= self._settings.capacity_per_band:
            raise BandFull(f"band {waiter.band} holds {band.depth} waiters")
        displaced = None
        if len(self._live) >= self._settings.capacity:
            displaced = self._newest_below(waiter.band)
            if displaced is None:
                raise BandFull(f"the lane holds {len(self._live)} waiters, none of a lower band")
            self._remove(displaced, now)
        if not self._live:
            self.drain.begin(now)
        number = self._next_number
        self._next_number += 1
        self._numbers[waiter.id] = number
        self._live[number] = waiter
        self._by_ttl.add((waiter.ttl_until, number, waiter))
        band.add((waiter.enqueued_at, number, waiter), now)
        return displaced

    def cancel(self, waiter_id: int, now: float) -> Waiter | None:
        """Take out a request that nobody waits for any more; None if it does not wait here."""
        number = self._numbers.get(waiter_id)
        if number is None:
            return None
        waiter = self._live[number]
        self._remove(waiter, now)
        return waiter

    def expire(self, now: float) -> list[Waiter]:
        """Take out whoever has waited too long."""
        expired = []
        while (first := self._by_ttl.first(self._live)) is not None and first.ttl_until <= now:
            self._remove(first, now)
            expired.append(first)
        if now - self._forgotten_at >= HALF_LIFE_S:
            self._forgotten_at = now
            for band in self._bands:
                band.turns.forget(now)
        return expired

    def next_expiry(self) -> float | None:
        """Return the monotonic second at which `expire` has something to do; None while nobody waits."""
        first = self._by_ttl.first(self._live)
        return None if first is None else first.ttl_until

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
        waiter = band.lines[tenant].first(self._live)
        assert waiter is not None  # a tenant without waiters has no turn
        if waiter.ttl_until <= now:
            return None
        self.drain.count_grant(now)
        self._remove(waiter, now)
        band.turns.served(tenant, waiter.cost, now)
        return waiter

    def charge(self, band: int, tenant: str, cost: float, now: float) -> None:
        """Correct what a tenant's request cost beside its estimate, in tokens; may be less than 0."""
        self._bands[band].turns.charge(tenant, cost, now)

    def place(self, waiter_id: int) -> int | None:
        """Return the place of a waiter if nobody comes or leaves, 1 for the next; None if it does not wait.

        Exact for fairness by request, an estimate for fairness by service. O(its tenant's waiters + tenants).
        """
        number = self._numbers.get(waiter_id)
        if number is None:
            return None
        waiter = self._live[number]
        band = self._bands[waiter.band]
        turn = next(
            i for i, each in enumerate(band.lines[waiter.tenant].waiters(self._live)) if each is waiter
        )
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
        assert sum(band.depth for band in self._bands) == len(self._live)
        assert {waiter.id: number for number, waiter in self._live.items()} == self._numbers
        assert sorted(map(id, self._by_ttl.waiters(self._live))) == sorted(map(id, self._live.values()))
        for rank, band in enumerate(self._bands):
            mine = [waiter for waiter in self._live.values() if waiter.band == rank]
            assert band.depth == len(mine)
            assert set(band.turns.order()) == set(band.lines) == {waiter.tenant for waiter in mine}
            assert len(band.turns.order()) == len(band.lines)
            assert sorted(map(id, band.arrivals.waiters(self._live))) == sorted(map(id, mine))
            for tenant, line in band.lines.items():
                waiters = list(line.waiters(self._live))
                assert len(waiters) == line.count > 0
                assert all(waiter.tenant == tenant for waiter in waiters)

    def _newest_below(self, rank: int) -> Waiter | None:
        for band in reversed(self._bands[rank + 1 :]):
            if band.depth:
                return band.arrivals.last(self._live)
        return None

    def _remove(self, waiter: Waiter, now: float) -> None:
        del self._live[self._numbers.pop(waiter.id)]
        self._bands[waiter.band].drop(waiter, self._live)
        self._by_ttl.drop(self._live)
        if not self._live:
            self.drain.end(now)


def _turns(settings: QueueSettings, now: float) -> Turns:
    return LeastService(now) if settings.fairness == "service" else RoundRobin()


# What a waiter is ordered by, the number of its stay, the waiter. Numbers differ: waiters are never compared.
_Entry: TypeAlias = tuple[float, int, Waiter]


class _Line:
    """Waiters in order, the least key first. Those that left stay as dead entries until they are met or many.

    A list with a moving start: nearly everyone is added at the end and taken from the start.

    Attributes:
        count: waiters that have not left.
    """

    __slots__ = ("_entries", "_start", "count")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._start = 0
        self.count = 0

    def add(self, entry: _Entry) -> None:
        entries = self._entries
        if entries and entry < entries[-1]:
            insort(entries, entry, lo=self._start)
        else:
            entries.append(entry)
        self.count += 1

    def drop(self, live: Container[int]) -> None:
        """Note that one waiter has left."""
        self.count -= 1
        if len(self._entries) > 2 * self.count + _SLACK:
            self._tidy(live)

    def first(self, live: Container[int]) -> Waiter | None:
        entries = self._entries
        for index in range(self._start, len(entries)):
            if entries[index][1] in live:
                self._start = index
                return entries[index][2]
        self._start = len(entries)
        return None

    def last(self, live: Container[int]) -> Waiter | None:
        entries = self._entries
        while len(entries) > self._start:
            if entries[-1][1] in live:
                return entries[-1][2]
            entries.pop()
        return None

    def _tidy(self, live: Container[int]) -> None:
        self.first(live)  # nearly all dead entries are in front of it
        del self._entries[: self._start]
        self._start = 0
        if len(self._entries) > 2 * self.count + _SLACK // 2:
            self._entries = [entry for entry in self._entries if entry[1] in live]

    def waiters(self, live: Container[int]) -> Iterator[Waiter]:
        return (waiter for _, number, waiter in self._entries[self._start :] if number in live)


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
        self.arrivals = _Line()
        self.depth = 0

    def add(self, entry: _Entry, now: float) -> None:
        tenant = entry[2].tenant
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = _Line()
            self.turns.join(tenant, now)
        line.add(entry)
        self.arrivals.add(entry)
        self.depth += 1

    def drop(self, waiter: Waiter, live: Container[int]) -> None:
        line = self.lines[waiter.tenant]
        line.drop(live)
        if not line.count:
            del self.lines[waiter.tenant]
            self.turns.leave(waiter.tenant)
        self.arrivals.drop(live)
        self.depth -= 1
