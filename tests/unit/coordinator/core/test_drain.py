"""How fast a queue empties."""

from __future__ import annotations

import pytest

from coordinator.core.drain import DrainRate


def drained(gaps_s: list[float], start: float = 0.0) -> tuple[DrainRate, float]:
    """Return a queue that was never empty and was granted after each of `gaps_s`, and the time."""
    rate, now = DrainRate(), start
    rate.begin(now)
    for gap_s in gaps_s:
        now += gap_s
        rate.count_grant(now)
    return rate, now


@pytest.mark.parametrize("gap_s", [0.01, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("count", [3, 10, 1000])
def test_a_steady_queue_has_the_rate_of_its_grants(gap_s: float, count: int) -> None:
    rate, now = drained([gap_s] * count)
    # Short histories are only told in the order of magnitude.
    assert rate.per_s(now) == pytest.approx(1 / gap_s, rel=0.2 if gap_s * count > 1 else 1.0)


def test_the_rate_follows_a_queue_that_gets_slower() -> None:
    rate, now = drained([0.1] * 600 + [2.0] * 45)
    assert rate.per_s(now) == pytest.approx(0.5, rel=1.0)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    rate, now = drained([1.0] * 60)
    rate.end(now)
    before = rate.per_s(now)
    assert rate.per_s(now + 3600) == before
    rate.begin(now + 3600)
    assert rate.per_s(now + 3600) == pytest.approx(before)


def test_a_queue_that_stands_still_forgets_how_fast_it_was() -> None:
    rate, now = drained([1.0] * 60)
    assert rate.per_s(now + 150) < 0.01


def test_the_wait_is_the_place_divided_by_the_rate() -> None:
    rate, now = drained([0.5] * 200)
    assert rate.wait_s(1, now) == pytest.approx(0.5, rel=0.05)
    assert rate.wait_s(40, now) == pytest.approx(20.0, rel=0.05)


def test_one_server_of_two_seconds_is_told_within_a_factor_of_two() -> None:
    # Case B71: five requests behind one slot; the estimate after the first grant.
    rate, now = drained([2.0])
    assert 4.0 <= rate.wait_s(4, now) <= 16.0


def test_a_first_grant_that_comes_at_once_promises_no_miracles() -> None:
    rate, now = drained([0.001])
    assert rate.per_s(now) <= 1.1


def test_a_queue_that_is_not_expected_to_clear_says_zero() -> None:
    rate, now = drained([])
    assert rate.wait_s(1, now + 5) == 0.0
    rate, now = drained([1.0] * 60)
    assert rate.wait_s(10_000, now) == 0.0
