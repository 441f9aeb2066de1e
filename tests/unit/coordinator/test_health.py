"""States of an endpoint: the table, and how much silence it takes."""

from __future__ import annotations

import itertools

import pytest

from coordinator.core.health import SILENT_LOOKS, TRANSITIONS, Health, HealthTracker, Sign
from tests.support.clock import FakeClock


def test_table_has_an_answer_for_every_sign_in_every_state() -> None:
    assert set(TRANSITIONS) == set(Health)
    assert all(set(row) == set(Sign) for row in TRANSITIONS.values())


@pytest.mark.parametrize("state", Health)
@pytest.mark.parametrize("sign", [Sign.GONE, Sign.UNFIT])
def test_refusal_and_unfitness_take_an_endpoint_out_with_one_look(state: Health, sign: Sign) -> None:
    tracker = HealthTracker(0.0, state)
    tracker.take(sign, 1.0)
    assert tracker.state is Health.DOWN


@pytest.mark.parametrize("state", Health)
def test_unreadable_metrics_never_take_an_endpoint_out(state: Health) -> None:
    tracker = HealthTracker(0.0, state)
    for look in range(10 * SILENT_LOOKS):
        tracker.take(Sign.BLIND, float(look))
    assert tracker.state is Health.STALE


@pytest.mark.parametrize("state", [Health.UNKNOWN, Health.READY, Health.STALE])
def test_silence_takes_an_endpoint_out_at_the_third_look(state: Health) -> None:
    tracker = HealthTracker(0.0, state)
    states = []
    for look in range(SILENT_LOOKS):
        tracker.take(Sign.SILENT, float(look))
        states.append(tracker.state)
    assert Health.DOWN not in states[:-1]
    assert states[-1] is Health.DOWN


def test_any_answer_between_starts_the_count_of_silence_afresh() -> None:
    tracker = HealthTracker(0.0, Health.READY)
    for sign in [Sign.SILENT, Sign.SILENT, Sign.BLIND, Sign.SILENT, Sign.SILENT]:
        tracker.take(sign, 1.0)
    assert tracker.state is Health.STALE


def test_silence_brings_no_endpoint_back() -> None:
    tracker = HealthTracker(0.0, Health.DOWN)
    tracker.take(Sign.SILENT, 1.0)
    assert tracker.state is Health.DOWN


def test_ready_needs_a_good_look_whatever_came_before() -> None:
    for signs in itertools.product(Sign, repeat=3):
        tracker = HealthTracker(0.0)
        for sign in signs:
            tracker.take(sign, 1.0)
        assert (tracker.state is Health.READY) == (signs[-1] is Sign.GOOD), signs


def test_since_is_the_time_of_the_last_change(clock: FakeClock) -> None:
    tracker = HealthTracker(clock.now)
    for sign in [Sign.GOOD, Sign.GOOD, Sign.GONE, Sign.GONE]:
        clock.advance(1.0)
        tracker.take(sign, clock.now)
        if tracker.state is Health.DOWN:
            break
    changed_at = clock.now
    clock.advance(1.0)
    tracker.take(Sign.UNFIT, clock.now)
    assert tracker.since == changed_at
