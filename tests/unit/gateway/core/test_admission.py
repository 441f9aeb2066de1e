"""When a request may run: saturation, ceilings, the hard cap, and who waits in front."""

from __future__ import annotations

import math

import msgspec
import pytest

from conf.schema import Admission, Band, Config, Pool, Router
from gateway.core.admission import (
    NO_CAP,
    LaneSettings,
    LaneView,
    Outcome,
    Replicas,
    Verdict,
    is_open,
    lane_settings,
    may_grant,
    may_start,
    saturation,
)
from gateway.core.schedule.pipeline import DOWN, DRAINING, READY, STALE, UNKNOWN

NOW = 1000.0
CEILINGS = (1.0, 0.85, 0.6, 0.3)
SETTINGS = LaneSettings(ceilings=CEILINGS)
PLATINUM, GOLD, SILVER, BRONZE = range(4)


def lane(
    *inflight: int,
    state: float = READY,
    cooldown_until: float = 0.0,
    age_s: float = 1.0,
    waiting: float = 0.0,
    kv: float = math.nan,
    capacity: float = 4.0,
) -> Replicas:
    """Return replicas that differ in what is under way only."""
    count = len(inflight)
    return Replicas(
        state=[state] * count,
        cooldown_until=[cooldown_until] * count,
        scraped_at=[NOW - age_s] * count,
        waiting=[waiting] * count,
        kv=[kv] * count,
        capacity=[capacity] * count,
        inflight=inflight,
    )


def joined(*lanes: Replicas) -> Replicas:
    """Put the replicas of several lanes into one."""
    return Replicas(
        *([cell for column in columns for cell in column] for columns in zip(*lanes, strict=True))
    )


def view(
    replicas: Replicas,
    *,
    waiters: tuple[int, ...] = (0, 0, 0, 0),
    pending: int = 0,
    leases: int = 0,
    cap: int = NO_CAP,
) -> LaneView:
    return LaneView(replicas, waiters, pending, leases, cap)


def level(replicas: Replicas, pending: int = 0, **changes: object) -> float:
    return saturation(replicas, pending, msgspec.structs.replace(SETTINGS, **changes), NOW)


# Saturation of one replica: four at a time, four waiting are the limit.
ONE_REPLICA = {
    "idle": (lane(0), 0, 0.0),
    "its-batch-is-not-a-queue": (lane(4), 0, 0.0),
    "what-is-beyond-the-batch-is": (lane(6), 0, 0.5),
    "more-than-the-limit": (lane(20), 0, 4.0),
    "the-queue-it-reports": (lane(4, waiting=3.0), 0, 0.75),
    "the-longer-of-both-queues": (lane(8, waiting=3.0), 0, 1.0),
    "kv-at-half-its-ceiling": (lane(1, kv=0.45), 0, 0.5),
    "the-worse-of-queue-and-kv": (lane(5, kv=0.45), 0, 0.5),
    "kv-not-reported": (lane(5), 0, 0.25),
    "waiting-not-reported": (lane(5, waiting=math.nan), 0, 0.25),
    "pending-fills-the-batch-first": (lane(1), 3, 0.0),
    "pending-counts-beyond-the-batch": (lane(3), 3, 0.5),
    "pending-joins-a-reported-queue": (lane(2, waiting=1.0), 2, 0.75),
    "capacity-not-known": (lane(10, capacity=0.0), 0, 0.5),
    "capacity-never-read": (lane(10, capacity=math.nan), 0, 0.5),
    "stale-queue": (lane(4, waiting=100.0, age_s=6.1), 0, 0.0),
    "stale-kv": (lane(4, kv=1.0, age_s=6.1), 0, 0.0),
    "as-old-as-may-be": (lane(4, waiting=4.0, age_s=6.0), 0, 1.0),
    "metrics-unreadable": (lane(6, waiting=100.0, kv=1.0, state=STALE), 0, 0.5),
    "never-scraped": (lane(6, waiting=100.0, kv=1.0, state=UNKNOWN), 0, 0.5),
    "in-flight-counts-when-stale": (lane(8, age_s=600.0), 0, 1.0),
    "down": (lane(0, state=DOWN), 0, math.inf),
    "draining": (lane(0, state=DRAINING), 0, math.inf),
    "cooling-down": (lane(0, cooldown_until=NOW + 0.1), 0, math.inf),
    "cooled-down": (lane(0, cooldown_until=NOW), 0, 0.0),
    "no-endpoint": (lane(), 0, math.inf),
}


@pytest.mark.parametrize("case", ONE_REPLICA)
@pytest.mark.parametrize("aggregate", ["p90", "mean"])
def test_saturation_of_a_replica_is_the_worse_of_queue_and_kv(case: str, aggregate: str) -> None:
    replicas, pending, expected = ONE_REPLICA[case]
    assert level(replicas, pending, aggregate=aggregate) == pytest.approx(expected)


def test_pending_requests_are_shared_among_the_replicas_that_can_run_them() -> None:
    replicas = joined(lane(4, 4), lane(0, state=DOWN))
    assert level(replicas, 4) == 0.5


def test_requests_of_other_instances_count_as_under_way() -> None:
    assert level(lane(2, 2)._replace(remote_inflight=[4, 0]), aggregate="mean") == 0.25


def test_requests_of_other_instances_stay_with_their_endpoint() -> None:
    replicas = joined(lane(0, state=DOWN), lane(2))._replace(remote_inflight=[100, 4])
    assert level(replicas) == 0.5


def test_p90_of_fewer_than_ten_replicas_is_the_worst() -> None:
    assert level(lane(*[0] * 8, 8)) == 1.0


@pytest.mark.parametrize(("count", "spared"), [(10, 1), (16, 1), (19, 1), (20, 2), (100, 10)])
def test_p90_spares_one_replica_in_ten(count: int, spared: int) -> None:
    assert level(lane(*[8] * spared, *[6] * (count - spared))) == 0.5
    assert level(lane(*[8] * (spared + 1), *[6] * (count - spared - 1))) == 1.0


def test_mean_is_over_the_replicas_that_can_run_something() -> None:
    replicas = joined(lane(8, 4), lane(100, state=DOWN), lane(100, cooldown_until=NOW + 1))
    assert level(replicas, aggregate="mean") == 0.5


def test_one_replica_with_stale_metrics_does_not_blind_the_others() -> None:
    replicas = joined(lane(4, waiting=4.0), lane(4, waiting=100.0, age_s=60.0))
    assert level(replicas) == 1.0


def test_columns_are_left_as_they_were() -> None:
    replicas = joined(lane(4, waiting=4.0, kv=0.5), lane(5, age_s=60.0), lane(1, state=DOWN))
    before = [list(column) for column in replicas]
    level(replicas, 3)
    assert [list(column) for column in replicas] == before


# Whether a request may start.


@pytest.mark.parametrize(("band", "most"), [(PLATINUM, 8), (GOLD, 8), (SILVER, 7), (BRONZE, 6)])
@pytest.mark.parametrize("reaches_engine", [True, False])
def test_a_burst_stops_at_the_ceiling_of_its_band(band: int, most: int, *, reaches_engine: bool) -> None:
    # Whether the requests are counted at the engine or still on their way makes no difference.
    started = 0
    while started < 100:
        lane_now = view(lane(started)) if reaches_engine else view(lane(0), pending=started)
        if not may_start(lane_now, band, SETTINGS, NOW).starts:
            break
        started += 1
    assert started == most


# Waiters by band, the band that asks, and who holds it back.
WAITERS = [
    ((1, 0, 0, 0), PLATINUM, PLATINUM),
    ((0, 1, 0, 0), PLATINUM, None),
    ((0, 9, 9, 9), PLATINUM, None),
    ((1, 0, 0, 0), BRONZE, PLATINUM),
    ((0, 2, 1, 0), BRONZE, GOLD),
    ((0, 0, 0, 1), BRONZE, BRONZE),
    ((0, 0, 0, 1), SILVER, None),
]


@pytest.mark.parametrize(("waiters", "band", "blocker"), WAITERS)
def test_a_waiter_of_the_same_or_a_higher_band_goes_first(
    waiters: tuple[int, ...], band: int, blocker: int | None
) -> None:
    verdict = may_start(view(lane(0), waiters=waiters), band, SETTINGS, NOW)
    assert verdict.starts == (blocker is None)
    if blocker is not None:
        assert verdict[:2] == (Outcome.BEHIND, blocker)


@pytest.mark.parametrize(("leases", "starts"), [(0, True), (15, True), (16, False), (17, False)])
def test_a_full_pool_starts_nothing_however_idle_its_engines(leases: int, *, starts: bool) -> None:
    settings = LaneSettings(ceilings=(1000.0,))
    lane_now = view(lane(0), leases=leases, cap=16)
    assert may_start(lane_now, 0, settings, NOW).starts == starts
    assert may_grant(lane_now, 0, 0.0, settings).outcome is (Outcome.START if starts else Outcome.FULL)


def test_a_pool_with_a_share_of_nothing_starts_nothing() -> None:
    assert may_start(view(lane(0), cap=0), PLATINUM, SETTINGS, NOW).outcome is Outcome.FULL


def test_a_verdict_says_how_full_the_lane_is() -> None:
    assert may_start(view(lane(6)), SILVER, SETTINGS, NOW) == Verdict(Outcome.START, SILVER, 0.5)
    assert may_start(view(lane(6)), BRONZE, SETTINGS, NOW) == Verdict(Outcome.SATURATED, BRONZE, 0.5)


def test_a_band_starts_below_its_ceiling_and_not_at_it() -> None:
    assert not may_start(view(lane(8)), PLATINUM, SETTINGS, NOW).starts
    assert may_start(view(lane(8)), PLATINUM, LaneSettings(ceilings=(1.01,)), NOW).starts


def test_a_band_with_a_ceiling_far_above_one_never_waits_for_saturation() -> None:
    probe = LaneSettings(ceilings=(1000.0, 1.0))
    flooded = view(lane(900, waiting=900.0, kv=1.0))
    assert may_start(flooded, 0, probe, NOW).starts
    assert not may_start(flooded, 1, probe, NOW).starts


def test_nothing_starts_where_nothing_can_run() -> None:
    verdict = may_start(view(lane(0, state=DOWN)), 0, LaneSettings(ceilings=(1000.0,)), NOW)
    assert verdict == Verdict(Outcome.NO_REPLICA, 0, math.inf)


def test_a_grant_waits_for_higher_bands_of_other_instances_and_not_for_its_own() -> None:
    waiters = (0, 1, 1, 1)
    assert may_grant(view(lane(0), waiters=waiters), GOLD, 0.0, SETTINGS).starts
    assert may_grant(view(lane(0), waiters=waiters), SILVER, 0.0, SETTINGS)[:2] == (Outcome.BEHIND, GOLD)


def test_a_grant_looks_at_the_ceiling_of_its_band() -> None:
    assert may_grant(view(lane(0)), SILVER, 0.59, SETTINGS).outcome is Outcome.START
    assert may_grant(view(lane(0)), SILVER, 0.6, SETTINGS).outcome is Outcome.SATURATED
    assert may_grant(view(lane(0)), SILVER, math.inf, SETTINGS).outcome is Outcome.NO_REPLICA


# Soft ceilings

SOFT = msgspec.structs.replace(SETTINGS, is_soft=True)


def opened(band: int, at: float, ticks: int = 64) -> int:
    return sum(is_open(band, at, SOFT, tick=tick) for tick in range(ticks))


@pytest.mark.parametrize(
    ("at", "expected"), [(0.29, 64), (0.31, 32), (0.65, 32), (0.7, 16), (0.9, 8), (1.0, 0)]
)
def test_a_soft_ceiling_lets_fewer_and_fewer_through(at: float, expected: int) -> None:
    assert opened(BRONZE, at) == expected


def test_the_highest_band_has_nothing_to_close_softly() -> None:
    assert opened(PLATINUM, 0.999) == 64
    assert opened(PLATINUM, 1.0) == 0
    assert opened(PLATINUM, math.inf) == 0


@pytest.mark.parametrize("at", [0.1, 0.3, 0.45, 0.6, 0.77, 0.85, 0.93, 0.999, 1.0, 2.0])
def test_whenever_a_band_opens_softly_every_higher_one_does(at: float) -> None:
    for tick in range(256):
        bands = [is_open(band, at, SOFT, tick=tick) for band in range(4)]
        assert bands == sorted(bands, reverse=True), tick


def test_a_hard_ceiling_does_not_look_at_the_tick() -> None:
    assert not any(is_open(BRONZE, 0.31, SETTINGS, tick=tick) for tick in range(64))


# Settings


def test_a_pool_has_its_own_thresholds_where_it_names_them() -> None:
    bands = (
        Band(name="low", priority=1, saturation_ceiling=0.5),
        Band(name="high", priority=2, saturation_ceiling=1.5),
    )
    admission = Admission(bands=bands, default_band="low", aggregate="mean", assumed_batch_capacity=3)
    config = Config(
        router=Router(admission=admission, scrape_interval=5.0),
        pools={"own": Pool(target_waiting_per_replica=9.0, kv_ceiling=0.5)},
    )
    common = lane_settings(config, "other")
    assert common == LaneSettings(
        ceilings=(1.5, 0.5),
        target_waiting=4.0,
        kv_ceiling=0.9,
        assumed_capacity=3.0,
        stale_after_s=15.0,
        aggregate="mean",
    )
    assert lane_settings(config, "own") == msgspec.structs.replace(common, target_waiting=9.0, kv_ceiling=0.5)


def test_the_settings_of_an_empty_configuration_are_the_defaults_of_the_core() -> None:
    assert lane_settings(Config(), "default") == SETTINGS
