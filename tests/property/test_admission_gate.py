"""Whatever the figures: saturation is what its definition says, bands keep their order, caps hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import LaneSettings, LaneView, Replicas, may_start, saturation

NOW = 1000.0


@dataclass(frozen=True)
class Figures:
    """One replica."""

    state: float
    cooldown_until: float
    scraped_at: float
    waiting: float
    kv: float
    capacity: float
    inflight: int
    remote: int


figures = st.builds(
    Figures,
    state=st.sampled_from([0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]),
    cooldown_until=st.sampled_from([0.0, 0.0, 990.0, 1000.0, 1010.0]),
    scraped_at=st.sampled_from([0.0, 990.0, 994.0, 999.0, 999.0]),
    waiting=st.sampled_from([0.0, 0.0, 1.0, 3.0, 500.0, math.nan]),
    kv=st.sampled_from([math.nan, 0.0, 0.3, 0.9, 1.0]),
    capacity=st.sampled_from([0.0, 1.0, 8.0, 64.0, math.nan]),
    inflight=st.integers(0, 80),
    remote=st.integers(0, 20),
)
fleets = st.lists(figures, max_size=25)
ceilings = st.lists(st.floats(0.01, 2.0), min_size=1, max_size=5).map(
    lambda c: tuple(sorted(c, reverse=True))
)
lane_settings = st.builds(
    LaneSettings,
    ceilings=ceilings,
    target_waiting=st.sampled_from([1.0, 4.0, 7.5]),
    aggregate=st.sampled_from(["p90", "mean"]),
    is_soft=st.booleans(),
)
pendings = st.integers(0, 50)


def columns(fleet: Sequence[Figures]) -> Replicas:
    rows = [tuple(getattr(each, name) for name in Figures.__dataclass_fields__) for each in fleet]
    return Replicas(*zip(*rows, strict=True)) if rows else Replicas((), (), (), (), (), (), ())


def by_definition(fleet: Sequence[Figures], pending: int, settings: LaneSettings) -> float:
    """Say what saturation is, replica by replica."""
    usable = [each for each in fleet if each.state in (0.0, 1.0, 2.0) and each.cooldown_until <= NOW]
    if not usable:
        return math.inf
    levels = []
    for each in usable:
        is_fresh = each.state == 1.0 and NOW - each.scraped_at <= settings.stale_after_s
        capacity = each.capacity if each.capacity > 0 else settings.assumed_capacity
        share = pending / len(usable)
        queue = max(each.inflight + each.remote + share - capacity, 0.0)
        if is_fresh and each.waiting > 0:
            queue = max(queue, each.waiting + share)
        terms = [queue / settings.target_waiting]
        if is_fresh and not math.isnan(each.kv):
            terms.append(each.kv / settings.kv_ceiling)
        levels.append(max(terms))
    if settings.aggregate == "mean":
        return sum(levels) / len(levels)
    return sorted(levels)[math.ceil(0.9 * len(levels)) - 1]


@given(fleets, pendings, lane_settings)
def test_saturation_is_what_its_definition_says(
    fleet: list[Figures], pending: int, settings: LaneSettings
) -> None:
    found = saturation(columns(fleet), pending, settings, NOW)
    assert math.isclose(found, by_definition(fleet, pending, settings), abs_tol=1e-9)


@given(fleets, pendings, lane_settings, st.data())
def test_one_request_more_never_makes_a_lane_emptier(
    fleet: list[Figures], pending: int, settings: LaneSettings, data: st.DataObject
) -> None:
    replicas = columns(fleet)
    before = saturation(replicas, pending, settings, NOW)
    assert saturation(replicas, pending + 1, settings, NOW) >= before
    if fleet:
        more = list(replicas.inflight)
        more[data.draw(st.integers(0, len(more) - 1))] += 1
        assert saturation(replicas._replace(inflight=more), pending, settings, NOW) >= before


@given(fleets, pendings, lane_settings)
def test_metrics_that_are_stale_change_nothing(
    fleet: list[Figures], pending: int, settings: LaneSettings
) -> None:
    replicas = columns(fleet)._replace(scraped_at=[NOW - settings.stale_after_s - 0.1] * len(fleet))
    nothing = replicas._replace(waiting=[0.0] * len(fleet), kv=[math.nan] * len(fleet))
    assert saturation(replicas, pending, settings, NOW) == saturation(nothing, pending, settings, NOW)


@given(fleets, pendings, lane_settings, st.integers(0, 200), st.integers(-1, 5), st.data())
def test_whenever_a_band_may_start_every_higher_one_may(
    fleet: list[Figures], pending: int, settings: LaneSettings, tick: int, cap: int, data: st.DataObject
) -> None:
    bands = len(settings.ceilings)
    waiters = data.draw(st.lists(st.sampled_from([0, 0, 0, 2]), min_size=bands, max_size=bands))
    lane = LaneView(columns(fleet), waiters, pending, data.draw(st.integers(0, 6)), cap)
    starts = [may_start(lane, band, settings, NOW, tick=tick).starts for band in range(bands)]
    assert starts == sorted(starts, reverse=True)


@given(
    st.lists(st.integers(0, 5), max_size=120),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_workers_that_count_themselves_before_they_look_never_exceed_a_cap(
    schedule: list[int], cap: int, workers: int
) -> None:
    """Interleave workers step by step: count oneself, read the others one by one, decide, give back."""
    cells = [0] * workers
    holds = [0] * workers
    settings = LaneSettings(ceilings=(1000.0,))
    replicas = Replicas([1.0], [0.0], [NOW], [0.0], [math.nan], [100.0], [0])

    def worker(me: int) -> Iterator[None]:
        while True:
            cells[me] += 1
            yield
            leases = 0
            for other in range(workers):
                leases += cells[other]
                yield
            lane = LaneView(replicas, (0,), 0, leases - 1, cap)
            if may_start(lane, 0, settings, NOW).starts:
                holds[me] += 1
                yield
                holds[me] -= 1
            cells[me] -= 1
            yield

    steps = [worker(me) for me in range(workers)]
    for me in schedule:
        next(steps[me % workers])
        assert sum(holds) <= cap
