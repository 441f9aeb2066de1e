"""Decides when a request may run: saturation of a lane, ceilings of bands, the hard cap of a pool.

A lane is a model in a pool; its requests wait together. Bands are known by their rank, 0 is the highest.

Rules:
    - Saturation is live: requests under way beyond what an engine runs at a time are queued there, whatever
      its metrics said seconds ago. Requests that may run but have not reached an engine count as under way,
      else a burst passes the check as one.
    - An engine's own figures (queue, KV cache) only add to that, and only while they are fresh. Metrics that
      are stale or missing never count as saturated: then requests under way judge alone, so that a broken
      scrape neither stops traffic nor lets everything through.
    - Values above 1 are legal: by how much the lane is over its healthy limit. With no replica that could run
      anything saturation is infinite, and no ceiling is above it.
    - A waiter of the same or a higher band goes first; nobody overtakes it by arriving in a quiet moment.
    - A band opens only if every higher one does: ceilings fall with the rank, and soft closing keeps that.

Worker (fast path) and coordinator (grants) call the same functions on the same cells.

Sources: plan §7.2; llm-d's utilisation detector and its soft ceilings; case B67.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from itertools import compress
from operator import add
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from conf.schema import Config, Pool
from gateway.core.schedule.pipeline import DOWN, READY

NO_CAP: Final = -1
"""Value of `LaneView.cap` for a pool without a hard cap."""

# Metrics this many scrapes old, and at least this many seconds, are stale.
_STALE_SCRAPES: Final = 3.0
_STALE_AT_LEAST_S: Final = 1.0

N = TypeVar("N", int, float)


class LaneSettings(msgspec.Struct, frozen=True):
    """What the operator says about a lane.

    Attributes:
        ceilings: saturation up to which each band may start, by rank; never rising.
        target_waiting: requests in an engine's queue that are a saturation of 1.
        kv_ceiling: ratio of KV blocks in use that is a saturation of 1.
        assumed_capacity: requests an engine is taken to run at a time while nothing is known.
        stale_after_s: age from which metrics are stale.
        aggregate: how the replicas' saturations become one.
        is_soft: past its ceiling a band closes by and by, up to a saturation of 1.
        charges_service: what each request used is told to the coordinator: fairness goes by it.
    """

    ceilings: tuple[float, ...]
    target_waiting: float = 4.0
    kv_ceiling: float = 0.9
    assumed_capacity: float = 8.0
    stale_after_s: float = 6.0
    aggregate: Literal["p90", "mean"] = "p90"
    is_soft: bool = False
    charges_service: bool = False


class Replicas(NamedTuple):
    """The endpoints of a lane at one moment, as parallel columns, as they lie in the shared segment.

    Whoever makes it owns the columns; nobody writes to them.

    Attributes:
        state: as in `Fleet`.
        cooldown_until: monotonic seconds; 0 for none. Empty: none is cooling down.
        scraped_at: monotonic seconds of the figures in `waiting` and `kv`.
        waiting: requests queued in the engine.
        kv: ratio of KV blocks in use; NaN where the engine does not say.
        capacity: requests the engine runs at a time, learned or configured; 0 or NaN: not known.
        inflight: requests under way from all workers of this host.
        remote_inflight: the same from other instances. Empty: there are none.
        running: requests that the engine ran when `kv` was read.
        kv_per_request: what one of them uses at most of `kv`; 0: not known. Empty: of none is it known.
    """

    state: Sequence[float]
    cooldown_until: Sequence[float]
    scraped_at: Sequence[float]
    waiting: Sequence[float]
    kv: Sequence[float]
    capacity: Sequence[float]
    inflight: Sequence[int]
    remote_inflight: Sequence[int] = ()
    running: Sequence[float] = ()
    kv_per_request: Sequence[float] = ()


class LaneView(NamedTuple):
    """A lane at one moment, without the request that is asked about.

    Attributes:
        replicas: its endpoints.
        waiters: requests that wait, by rank of their band; all workers and instances.
        pending: requests that may run and are not yet under way at an endpoint; all workers and the
            coordinator's own grants.
        leases: requests that hold a lease in the pool, whatever their model.
        cap: most leases the pool may have; `NO_CAP` for any number.
    """

    replicas: Replicas
    waiters: Sequence[int]
    pending: int
    leases: int
    cap: int


class Outcome(Enum):
    """Why a request may start or has to wait."""

    START = "start"
    BEHIND = "behind"
    """Waiters of the same or a higher band go first."""
    SATURATED = "saturated"
    """The lane is at the band's ceiling."""
    FULL = "full"
    """The pool is at its hard cap."""
    NO_REPLICA = "no_replica"
    """No endpoint could run anything now."""


class Verdict(NamedTuple):
    """The answer for one request.

    Attributes:
        outcome: whether it starts, else what holds it.
        band: the highest band that waits in front of it where the outcome is `BEHIND`, else its own.
        saturation: of the lane; NaN where it did not matter.
    """

    outcome: Outcome
    band: int
    saturation: float

    @property
    def starts(self) -> bool:
        """Whether the request may run now."""
        return self.outcome is Outcome.START


def lane_settings(config: Config, pool: str) -> LaneSettings:
    """Put together what the configuration says about the lanes of a pool."""
    admission = config.router.admission
    own = config.pools.get(pool, Pool())
    target, kv_ceiling = own.target_waiting_per_replica, own.kv_ceiling
    return LaneSettings(
        ceilings=tuple(band.saturation_ceiling for band in admission.bands_by_rank),
        target_waiting=admission.target_waiting_per_replica if target is None else target,
        kv_ceiling=admission.kv_ceiling if kv_ceiling is None else kv_ceiling,
        assumed_capacity=float(admission.assumed_batch_capacity),
        stale_after_s=max(_STALE_SCRAPES * config.router.scrape_interval, _STALE_AT_LEAST_S),
        aggregate=admission.aggregate,
        is_soft=admission.soft_ceilings,
        charges_service=admission.fairness == "service",
    )


def may_start(lane: LaneView, band: int, settings: LaneSettings, now: float, *, tick: int = 0) -> Verdict:
    """Decide whether a request of `band` that just came in may run at once.

    Pure; never blocks. The caller has put its own lease and pending request into the cells before it reads
    the others', and takes them off again in `lane`: so two callers may both step back, but never both pass.

    Args:
        lane: as it is without this request.
        band: rank of the request's band.
        settings: the lane's.
        now: monotonic seconds.
        tick: number of this try in the lane; only soft ceilings look at it.

    Source: plan §7.2.2.
    """
    if any(lane.waiters[: band + 1]):
        first = next(rank for rank, count in enumerate(lane.waiters) if count)
        return Verdict(Outcome.BEHIND, first, math.nan)
    if lane.cap != NO_CAP and lane.leases >= lane.cap:
        return Verdict(Outcome.FULL, band, math.nan)
    level = saturation(lane.replicas, lane.pending, settings, now)
    return Verdict(_gate(band, level, settings, tick), band, level)


def may_grant(lane: LaneView, band: int, level: float, settings: LaneSettings, *, tick: int = 0) -> Verdict:
    """Decide whether the first waiter of `band` may run, where the caller's own queue holds no higher band.

    Pure; never blocks.

    Args:
        lane: as it is now, every grant so far counted; `waiters` are those of other instances.
        band: rank of the waiter's band.
        level: saturation of the lane, every grant so far counted.
        settings: the lane's.
        tick: number of this try in the lane; only soft ceilings look at it.
    """
    if any(lane.waiters[:band]):
        first = next(rank for rank, count in enumerate(lane.waiters) if count)
        return Verdict(Outcome.BEHIND, first, level)
    if lane.cap != NO_CAP and lane.leases >= lane.cap:
        return Verdict(Outcome.FULL, band, level)
    return Verdict(_gate(band, level, settings, tick), band, level)


def saturation(replicas: Replicas, pending: int, settings: LaneSettings, now: float) -> float:
    """Return how full a lane is: 1 is the healthy limit, more is legal, infinite if nothing could run.

    A replica's is the worse of two ratios: its queue (requests under way beyond its batch, its share of the
    pending ones included, or the queue it reports) to the target, and its KV use to the ceiling. KV use is as
    old as the last scrape: each request that came since is taken to use as much as any did of late, or a
    flood would fill the cache between two scrapes.

    Source: plan §7.2.1.
    """
    state, cooldown, scraped_at, waiting, kv, capacity, inflight, remote, running, kv_each = replicas
    if remote:
        inflight = list(map(add, inflight, remote))
    count = len(state)
    if not kv_each:
        running = kv_each = (0.0,) * count
    # The columns of a healthy lane are taken as they are; only min and max look at each cell.
    if not count or max(state) >= DOWN or (cooldown and max(cooldown) > now):
        usable = [each < DOWN for each in state]
        if cooldown:
            usable = [ok and until <= now for ok, until in zip(usable, cooldown, strict=True)]
        count = sum(usable)
        if not count:
            return math.inf
        state, scraped_at = _only(state, usable), _only(scraped_at, usable)
        waiting, kv = _only(waiting, usable), _only(kv, usable)
        capacity, inflight = _only(capacity, usable), _only(inflight, usable)
        running, kv_each = _only(running, usable), _only(kv_each, usable)
    fresh_from = now - settings.stale_after_s
    if min(scraped_at) < fresh_from or max(state) != READY or min(state) != READY:
        # An empty queue and an unknown KV use are what adds nothing.
        fresh = [at >= fresh_from and each == READY for at, each in zip(scraped_at, state, strict=True)]
        waiting = [each if ok else 0.0 for each, ok in zip(waiting, fresh, strict=True)]
        kv = [each if ok else math.nan for each, ok in zip(kv, fresh, strict=True)]
    share = pending / count
    target, kv_ceiling, assumed = settings.target_waiting, settings.kv_ceiling, settings.assumed_capacity
    levels = []
    for under_way, batch, queue, use, ran, each in zip(
        inflight, capacity, waiting, kv, running, kv_each, strict=True
    ):
        under_way += share
        queued = under_way - (batch if batch > 0.0 else assumed)
        if each > 0.0 and under_way > ran + queue:
            use += (under_way - ran - queue) * each
        if queue > 0.0 and queue + share > queued:
            queued = queue + share  # it has a queue already, so what is pending will join it
        level = queued / target if queued > 0.0 else 0.0
        if use / kv_ceiling > level:  # never with NaN
            level = use / kv_ceiling
        levels.append(level)
    if settings.aggregate == "mean":
        return math.fsum(levels) / count
    if count < 10:
        return max(levels)
    levels.sort()
    return levels[-(count // 10) - 1]


def is_open(band: int, level: float, settings: LaneSettings, *, tick: int = 0) -> bool:
    """Whether a band may start requests at a saturation of `level`.

    With soft ceilings, a band past its ceiling c opens on one of so many tries as (1 - c) is of (1 - level),
    rounded up to a power of two: where a band opens, every higher one then does at the same tick.
    """
    ceiling = settings.ceilings[band]
    if level < ceiling:
        return True
    if not settings.is_soft or level >= 1.0:
        return False
    period = 1 << math.ceil(math.log2((1.0 - ceiling) / (1.0 - level)))
    return tick % period == 0


def _gate(band: int, level: float, settings: LaneSettings, tick: int) -> Outcome:
    if is_open(band, level, settings, tick=tick):
        return Outcome.START
    return Outcome.NO_REPLICA if level == math.inf else Outcome.SATURATED


def _only(column: Sequence[N], usable: list[bool]) -> list[N]:
    return list(compress(column, usable))
