"""What is learned of an engine: how many requests it runs at a time, and what one costs in KV cache."""

import pytest

from coordinator.core.capacity import LearnedCapacity


def see(
    learned: LearnedCapacity, running: float, waiting: float = 0.0, kv: float | None = None, now: float = 1.0
):
    learned.see(running=running, waiting=waiting, kv=kv, now=now)


def test_nothing_is_known_of_an_engine_that_has_run_nothing():
    learned = LearnedCapacity()
    see(learned, running=0)
    assert learned.batch == 0


def test_an_engine_that_never_queued_is_taken_to_run_more_than_was_seen():
    learned = LearnedCapacity()
    see(learned, running=4)
    assert learned.batch == 12
    see(learned, running=100)
    assert learned.batch == 150


def test_an_engine_that_has_queued_is_taken_at_its_high_water_mark():
    learned = LearnedCapacity()
    see(learned, running=32, waiting=3)
    assert learned.batch == 32
    see(learned, running=5)
    assert learned.batch == 32


def test_what_an_earlier_coordinator_learned_is_not_stretched_again():
    learned = LearnedCapacity(batch=24)
    see(learned, running=10)
    assert learned.batch == 24


def test_an_engine_started_anew_is_another_one():
    learned = LearnedCapacity()
    see(learned, running=32, waiting=3, kv=0.5)
    learned.forget()
    see(learned, running=2)
    assert (learned.batch, learned.kv_per_request) == (10, 0.0)


def test_a_request_costs_what_the_dearest_look_of_late_showed():
    learned = LearnedCapacity()
    see(learned, running=10, kv=0.5)
    assert learned.kv_per_request == pytest.approx(0.05)
    see(learned, running=10, kv=0.1)
    assert learned.kv_per_request == pytest.approx(0.05)


def test_a_dear_look_is_half_forgotten_after_ten_minutes():
    learned = LearnedCapacity()
    see(learned, running=10, kv=0.5, now=1.0)
    see(learned, running=10, kv=0.1, now=601.0)
    assert learned.kv_per_request == pytest.approx(0.025)


@pytest.mark.parametrize(("running", "kv"), [(0, 0.5), (3, None)])
def test_a_look_without_requests_or_kv_teaches_nothing_of_their_cost(running: float, kv: float | None):
    learned = LearnedCapacity()
    see(learned, running=running, kv=kv)
    assert learned.kv_per_request == 0.0
