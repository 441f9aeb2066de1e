"""The hand-over of a grant: the table, and that everything ends once."""

from __future__ import annotations

import itertools

import pytest

from coordinator.core.leases import TRANSITIONS, Ended, Grant, GrantLedger, LeaseEvent, LeaseState

FIRST = Grant(id=7, worker=1, lane=3, pool=0)


@pytest.fixture
def ledger() -> GrantLedger:
    ledger = GrantLedger()
    ledger.give(FIRST)
    return ledger


def counts(ledger: GrantLedger) -> tuple[int, int, int]:
    ledger.check()
    return len(ledger), ledger.pending(FIRST.lane), ledger.leases(FIRST.pool)


def test_a_grant_counts_from_the_moment_it_is_given(ledger: GrantLedger) -> None:
    assert counts(ledger) == (1, 1, 1)
    assert 7 in ledger


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (LeaseEvent.ACK, LeaseState.HELD),
        (LeaseEvent.CANCEL, LeaseState.RETURNED),
        (LeaseEvent.GONE, LeaseState.RETURNED),
    ],
)
def test_an_event_ends_a_grant(ledger: GrantLedger, event: LeaseEvent, state: LeaseState) -> None:
    assert ledger.take(7, event) == Ended(FIRST, state)
    assert counts(ledger) == (0, 0, 0)
    assert 7 not in ledger


def test_the_table_has_an_answer_for_every_event_while_a_grant_is_under_way() -> None:
    assert set(TRANSITIONS) == set(LeaseState)
    assert set(TRANSITIONS[LeaseState.GRANTED]) == set(LeaseEvent)
    assert not TRANSITIONS[LeaseState.HELD]
    assert not TRANSITIONS[LeaseState.RETURNED]


@pytest.mark.parametrize("events", list(itertools.product(LeaseEvent, repeat=3)))
def test_whatever_comes_after_the_end_changes_nothing(
    ledger: GrantLedger, events: tuple[LeaseEvent, ...]
) -> None:
    first, *later = [ledger.take(7, event) for event in events]
    assert first is not None
    assert later == [None, None]
    assert counts(ledger) == (0, 0, 0)


def test_an_event_for_what_was_never_granted_changes_nothing(ledger: GrantLedger) -> None:
    assert [ledger.take(99, event) for event in LeaseEvent] == [None] * 3
    assert counts(ledger) == (1, 1, 1)


def test_a_grant_under_way_is_not_given_a_second_time(ledger: GrantLedger) -> None:
    with pytest.raises(ValueError, match="grant 7 is under way"):
        ledger.give(Grant(id=7, worker=2, lane=3, pool=0))
    assert counts(ledger) == (1, 1, 1)


def test_an_id_that_came_back_may_be_granted_again(ledger: GrantLedger) -> None:
    ledger.take(7, LeaseEvent.GONE)
    ledger.give(Grant(id=7, worker=2, lane=3, pool=0))
    assert counts(ledger) == (1, 1, 1)
    assert ledger.lose_worker(1) == []


def test_a_worker_that_is_gone_takes_its_own_grants_with_it_and_no_others(ledger: GrantLedger) -> None:
    second, other = Grant(id=8, worker=1, lane=4, pool=0), Grant(id=9, worker=2, lane=3, pool=0)
    ledger.give(second)
    ledger.give(other)
    returned = [Ended(FIRST, LeaseState.RETURNED), Ended(second, LeaseState.RETURNED)]
    assert ledger.lose_worker(1) == returned
    assert ledger.lose_worker(1) == []
    assert counts(ledger) == (1, 1, 1)
    assert ledger.pending(4) == 0


def test_lanes_of_a_pool_are_counted_apart_and_their_pool_as_one(ledger: GrantLedger) -> None:
    ledger.give(Grant(id=8, worker=1, lane=4, pool=0))
    ledger.give(Grant(id=9, worker=1, lane=5, pool=6))
    assert [ledger.pending(lane) for lane in (3, 4, 5)] == [1, 1, 1]
    assert [ledger.leases(pool) for pool in (0, 6)] == [2, 1]
