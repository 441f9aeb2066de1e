"""The queue of a lane: who is granted, who is refused, who is pushed out."""

from __future__ import annotations

import msgspec
import pytest

from conf.schema import Admission, Band, Config, Router
from coordinator.core.queue import BandFull, BandQueue, QueueSettings, Waiter, queue_settings
from tests.support.clock import FakeClock

PLATINUM, GOLD, SILVER, BRONZE = range(4)
TTL_S = 30.0


class Lane:
    """A queue whose waiters are known by their names."""

    def __init__(self, clock: FakeClock, **limits: object) -> None:
        self.clock = clock
        self.queue = BandQueue(msgspec.convert({"bands": 4, **limits}, QueueSettings), clock.now)
        self.names: list[str] = []

    def come(self, name: str, band: int = GOLD, tenant: str | None = None, **changes: float) -> str | None:
        """Let `name` wait, by default as a tenant of its own; return who was displaced."""
        now = self.clock.now
        self.names.append(name)
        times = {"enqueued_at": now, "ttl_until": now + TTL_S, "cost": 0.0, **changes}
        waiter = Waiter(len(self.names) - 1, band, name if tenant is None else tenant, **times)
        return self.name_of(self.queue.enqueue(waiter, now))

    def grant(self, open_bands: int = 4) -> str | None:
        return self.name_of(self.queue.grant_next(lambda band: band < open_bands, self.clock.now))

    def grant_all(self) -> list[str | None]:
        return [self.grant() for _ in range(len(self.queue))]

    def cancel(self, name: str) -> str | None:
        return self.name_of(self.queue.cancel(self.names.index(name), self.clock.now))

    def expire(self) -> list[str | None]:
        return [self.name_of(waiter) for waiter in self.queue.expire(self.clock.now)]

    def name_of(self, waiter: Waiter | None) -> str | None:
        return None if waiter is None else self.names[waiter.id]


@pytest.fixture
def lane(clock: FakeClock) -> Lane:
    return Lane(clock)


def test_background_waiter_never_passes_interactive_waiter(lane: Lane) -> None:
    lane.come("background", BRONZE)
    lane.clock.advance(5)
    lane.come("interactive", GOLD)
    assert lane.grant_all() == ["interactive", "background"]


def test_the_scan_stops_at_the_first_band_that_may_not_start(lane: Lane) -> None:
    asked = []
    lane.come("silver", SILVER)
    lane.come("bronze", BRONZE)
    assert lane.queue.grant_next(asked.append, lane.clock.now) is None  # type: ignore[func-returns-value]
    assert asked == [SILVER]
    assert lane.queue.depths() == (0, 0, 1, 1)


def test_nobody_is_asked_about_an_empty_queue(lane: Lane) -> None:
    assert lane.queue.grant_next(lambda band: pytest.fail(f"asked about {band}"), 0.0) is None
    assert lane.queue.top() is None


def test_a_tenant_is_served_first_come_first_served(lane: Lane) -> None:
    for name in "abc":
        lane.come(name, tenant="one")
        lane.clock.advance(1)
    assert lane.grant_all() == ["a", "b", "c"]


def test_a_tenant_with_a_thousand_waiters_holds_up_nine_others_for_eighteen_grants(lane: Lane) -> None:
    for number in range(1000):
        lane.come(f"flood-{number}", tenant="flood")
    few = [f"few-{number}" for number in range(9)]
    for name in few:
        lane.come(name)
    granted = [lane.grant() for _ in range(18)]
    assert set(few) <= set(granted)
    assert granted.index(few[-1]) < 10  # even in the first round


def test_a_tenant_that_leaves_and_comes_back_goes_to_the_end_of_the_turns(lane: Lane) -> None:
    lane.come("a1", tenant="a")
    lane.come("b1", tenant="b")
    lane.come("b2", tenant="b")
    assert lane.grant() == "a1"
    lane.come("a2", tenant="a")
    assert lane.grant_all() == ["b1", "a2", "b2"]


def test_a_message_that_comes_late_loses_no_place(lane: Lane) -> None:
    lane.come("new", tenant="one")
    lane.come("old", tenant="one", enqueued_at=lane.clock.now - 5)
    lane.come("oldest", tenant="one", enqueued_at=lane.clock.now - 9)
    assert lane.grant_all() == ["oldest", "old", "new"]


def test_a_request_told_twice_waits_once(lane: Lane) -> None:
    lane.come("a")
    waiter = next(iter(lane.queue))
    assert lane.queue.enqueue(waiter, lane.clock.now) is None
    assert lane.queue.depths() == (0, 1, 0, 0)
    assert lane.grant_all() == ["a"]
    assert len(lane.queue) == 0


def test_a_request_that_left_may_come_back(lane: Lane) -> None:
    lane.come("a", tenant="one")
    lane.come("b", tenant="one")
    waiter = lane.queue.cancel(0, lane.clock.now)
    assert waiter is not None
    lane.queue.enqueue(waiter, lane.clock.now)
    lane.queue.check()
    assert lane.queue.depths() == (0, 2, 0, 0)
    assert sorted(map(str, lane.grant_all())) == ["a", "b"]


# Leaving


def test_a_cancelled_request_leaves_at_once(lane: Lane) -> None:
    lane.come("a", tenant="one")
    lane.come("b", tenant="one")
    assert lane.cancel("a") == "a"
    assert lane.queue.depths() == (0, 1, 0, 0)
    assert lane.grant_all() == ["b"]


def test_cancelling_what_does_not_wait_changes_nothing(lane: Lane) -> None:
    lane.come("a")
    lane.grant()
    assert lane.cancel("a") is None


def test_a_cancelled_request_gives_its_room_back(clock: FakeClock) -> None:
    lane = Lane(clock, capacity_per_band=1)
    lane.come("a")
    lane.cancel("a")
    lane.come("b")
    assert lane.grant_all() == ["b"]


def test_a_request_leaves_when_its_ttl_is_over(lane: Lane) -> None:
    lane.come("a")
    lane.clock.advance(10)
    lane.come("b")
    assert lane.queue.next_expiry() == lane.clock.now + 20
    lane.clock.advance(19.9)
    assert lane.expire() == []
    lane.clock.advance(0.1)
    assert lane.expire() == ["a"]
    assert lane.expire() == []
    assert lane.queue.depths() == (0, 1, 0, 0)


def test_nothing_expires_in_an_empty_queue(lane: Lane) -> None:
    lane.come("a")
    lane.grant()
    assert lane.queue.next_expiry() is None
    lane.clock.advance(1000)
    assert lane.expire() == []


def test_the_shortest_ttl_goes_first_whoever_came_first(lane: Lane) -> None:
    lane.come("long")
    lane.come("short", ttl_until=lane.clock.now + 1)
    lane.clock.advance(100)
    assert lane.expire() == ["short", "long"]


def test_a_request_past_its_ttl_is_never_granted(lane: Lane) -> None:
    lane.come("a")
    lane.clock.advance(TTL_S)
    assert lane.grant() is None
    assert lane.expire() == ["a"]


@pytest.mark.parametrize("leave", ["granted", "cancelled"])
def test_what_is_kept_of_those_that_left_does_not_pile_up(lane: Lane, leave: str) -> None:
    # The one that stays is the first in line when the others are cancelled, the last when they are granted.
    lane.come("stays", BRONZE, "one")
    for number in range(2000):
        lane.come(f"goes-{number}", GOLD if leave == "granted" else BRONZE, "one")
        assert (lane.grant() if leave == "granted" else lane.cancel(f"goes-{number}")) == f"goes-{number}"
    lines = [lane.queue._by_ttl]
    for band in lane.queue._bands:
        lines += [band.arrivals, *band.lines.values()]
    assert max(len(line._entries) for line in lines) < 100
    assert lane.grant_all() == ["stays"]


# Room


def test_a_full_band_refuses_and_its_waiters_stay(clock: FakeClock) -> None:
    lane = Lane(clock, capacity_per_band=2)
    lane.come("a")
    lane.come("b")
    with pytest.raises(BandFull):
        lane.come("c")
    lane.come("other", SILVER)
    assert lane.grant_all() == ["a", "b", "other"]


def test_the_newest_of_the_lowest_band_gives_way_to_a_higher_one(clock: FakeClock) -> None:
    lane = Lane(clock, capacity=4)
    for name, band in [("silver", SILVER), ("old", BRONZE), ("older", BRONZE), ("new", BRONZE)]:
        lane.come(name, band, enqueued_at=clock.now - {"older": 9.0, "old": 5.0}.get(name, 0.0))
    assert lane.come("gold-1") == "new"
    assert lane.come("gold-2") == "old"
    assert lane.come("gold-3") == "older"
    assert lane.come("gold-4") == "silver"
    with pytest.raises(BandFull):
        lane.come("gold-5")
    assert lane.grant_all() == ["gold-1", "gold-2", "gold-3", "gold-4"]


def test_a_band_never_displaces_its_equals_or_betters(clock: FakeClock) -> None:
    lane = Lane(clock, capacity=2)
    lane.come("gold", GOLD)
    lane.come("silver", SILVER)
    with pytest.raises(BandFull):
        lane.come("late", SILVER)
    assert lane.grant_all() == ["gold", "silver"]


def test_a_full_band_displaces_nobody(clock: FakeClock) -> None:
    lane = Lane(clock, capacity_per_band=1, capacity=2)
    lane.come("bronze", BRONZE)
    lane.come("gold")
    with pytest.raises(BandFull):
        lane.come("late")
    assert len(lane.queue) == 2


# Figures


def test_depths_and_tenants_count_who_waits(lane: Lane) -> None:
    for name, tenant in [("a", "one"), ("b", "one"), ("c", "two")]:
        lane.come(name, SILVER, tenant)
    lane.come("d", PLATINUM)
    lane.cancel("a")
    assert lane.queue.depths() == (1, 0, 2, 0)
    assert lane.queue.tenants(SILVER) == {"one": 1, "two": 1}
    assert lane.queue.tenants(BRONZE) == {}
    assert lane.queue.top() == PLATINUM


def test_a_place_counts_higher_bands_and_other_tenants_turns(lane: Lane) -> None:
    for name, tenant in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")]:
        lane.come(name, SILVER, tenant)
    lane.come("gold")
    places = {name: lane.queue.place(index) for index, name in enumerate(lane.names)}
    assert places == {"gold": 1, "a1": 2, "b1": 3, "a2": 4, "b2": 5, "a3": 6}
    assert lane.queue.place(99) is None


def test_retry_after_is_the_time_in_which_those_in_front_are_granted(lane: Lane) -> None:
    for number in range(40):
        lane.come(f"gold-{number}")
        lane.come(f"bronze-{number}", BRONZE)
    for _ in range(20):
        lane.clock.advance(0.5)
        lane.grant()
    # Two a second; 20 of gold and 40 of bronze are left.
    assert lane.queue.retry_after_s(PLATINUM, lane.clock.now) == pytest.approx(0.5, rel=0.05)
    assert lane.queue.retry_after_s(GOLD, lane.clock.now) == pytest.approx(10.5, rel=0.05)
    assert lane.queue.retry_after_s(BRONZE, lane.clock.now) == pytest.approx(30.5, rel=0.05)


def test_retry_after_is_zero_where_nothing_is_granted(lane: Lane) -> None:
    lane.come("a")
    lane.clock.advance(10)
    assert lane.queue.retry_after_s(GOLD, lane.clock.now) == 0.0


# By service


def test_by_service_small_requests_are_not_held_up_by_large_ones(clock: FakeClock) -> None:
    # Case B69: 300 requests of 2,000 tokens, later ten of 50.
    lane = Lane(clock, fairness="service")
    for number in range(300):
        lane.come(f"large-{number}", tenant="large", cost=2000.0)
    assert lane.grant() == "large-0"
    small = [f"small-{number}" for number in range(10)]
    for name in small:
        lane.come(name, tenant="small", cost=50.0)
    assert [lane.grant() for _ in range(10)] == small
    assert lane.grant() == "large-1"


def test_by_service_tenants_share_tokens_and_not_requests(clock: FakeClock) -> None:
    lane = Lane(clock, fairness="service")
    for number in range(200):
        lane.come(f"large-{number}", tenant="large", cost=300.0)
        lane.come(f"small-{number}", tenant="small", cost=100.0)
    granted = [str(lane.grant()).split("-")[0] for _ in range(200)]
    assert granted.count("small") == 150
    assert granted.count("large") == 50


def test_by_service_what_a_request_really_took_counts(clock: FakeClock) -> None:
    lane = Lane(clock, fairness="service")
    for number in range(3):
        lane.come(f"a-{number}", tenant="a", cost=10.0)
        lane.come(f"b-{number}", tenant="b", cost=10.0)
    assert [lane.grant(), lane.grant()] == ["a-0", "b-0"]
    lane.queue.charge(GOLD, "a", 1000.0, clock.now)
    assert [lane.grant(), lane.grant(), lane.grant()] == ["b-1", "b-2", "a-1"]


# Reload


@pytest.mark.parametrize("fairness", ["request", "service"])
def test_a_change_of_fairness_keeps_everyone_waiting(clock: FakeClock, fairness: str) -> None:
    lane = Lane(clock)
    for number in range(6):
        lane.come(f"{number}", tenant="ab"[number % 2])
    settings = msgspec.convert({"bands": 4, "fairness": fairness}, QueueSettings)
    lane.queue.apply_settings(settings, clock.now)
    lane.queue.check()
    assert lane.grant_all() == list("012345")


def test_a_smaller_capacity_pushes_nobody_out(lane: Lane) -> None:
    for name in "abc":
        lane.come(name)
    lane.queue.apply_settings(QueueSettings(bands=4, capacity_per_band=1, capacity=1), lane.clock.now)
    with pytest.raises(BandFull):
        lane.come("d")
    assert lane.grant_all() == ["a", "b", "c"]


def test_the_number_of_bands_of_a_queue_is_fixed(lane: Lane) -> None:
    with pytest.raises(ValueError, match="4 bands"):
        lane.queue.apply_settings(QueueSettings(bands=3), lane.clock.now)


def test_the_settings_are_those_of_the_configuration() -> None:
    admission = Admission(
        bands=(Band(name="one", priority=1, saturation_ceiling=1.0),),
        queue_capacity_per_band=7,
        queue_capacity=9,
        fairness="service",
    )
    config = Config(router=Router(admission=admission))
    assert queue_settings(config) == QueueSettings(
        bands=1, capacity_per_band=7, capacity=9, fairness="service"
    )
    assert queue_settings(Config()) == QueueSettings(bands=4)
