"""Shares of a hard cap: who should have what, and in which order it changes hands."""

from __future__ import annotations

from coordinator.core.shares import Need, PoolShare, Statement, plan_shares
from coordinator.ledger import SETTLE_MS
from tests.support.share_ledger import ModelLedger


def test_idle_instances_share_evenly() -> None:
    assert plan_shares(16, {"a": Need(), "b": Need()}) == {"a": 8, "b": 8}
    assert plan_shares(5, {"a": Need(), "b": Need()}) == {"a": 3, "b": 2}


def test_nobody_gives_while_nobody_lacks() -> None:
    assert plan_shares(16, {"a": Need(held=10, leases=3), "b": Need(held=6, leases=1)}) == {"a": 10, "b": 6}


def test_an_instance_with_waiters_gets_what_the_other_does_not_need() -> None:
    needs = {"a": Need(held=8, leases=8, waiters=(0, 100), tenants=(0, 1)), "b": Need(held=8)}
    assert plan_shares(16, needs) == {"a": 16, "b": 0}


def test_a_higher_band_goes_first_whatever_runs_elsewhere() -> None:
    needs = {
        "a": Need(held=16, leases=16, waiters=(0, 500), tenants=(0, 1)),
        "b": Need(waiters=(3,), tenants=(1,)),
    }
    assert plan_shares(16, needs) == {"a": 13, "b": 3}


def test_within_a_band_the_turns_are_those_of_tenants() -> None:
    needs = {
        "a": Need(held=8, leases=8, waiters=(1000,), tenants=(1,)),
        "b": Need(held=8, leases=8, waiters=(900,), tenants=(3,)),
    }
    assert plan_shares(16, needs) == {"a": 4, "b": 12}


def test_what_runs_is_stated_until_it_has_ended() -> None:
    share = PoolShare(16, 16)
    share.aim(4)
    assert share.in_force == 4
    assert share.state(leases=9) == Statement(floor=9, want=9, cap=16)
    assert share.state(leases=4) == Statement(floor=4, want=4, cap=16)


def test_a_share_grows_with_the_answer_and_not_before() -> None:
    share = PoolShare(16)
    share.aim(10)
    assert share.state(leases=0) == Statement(floor=0, want=10, cap=16)
    assert share.in_force == 0
    share.accept(6)
    assert share.in_force == 6


def test_without_an_answer_the_share_stays() -> None:
    share = PoolShare(16, 8)
    share.aim(12)
    for _ in range(3):
        assert share.state(leases=8).floor == 8
    assert share.in_force == 8


def test_a_share_changes_hands_only_after_the_requests_have_ended() -> None:
    ledger = ModelLedger()
    ledger.now_ms = SETTLE_MS
    ledger.exchange("a", 1, {"pool": Statement(4, 4, 4)}, {})
    giver, taker = PoolShare(4, 4), PoolShare(4)
    giver.aim(0)
    taker.aim(4)
    for number, running in enumerate((4, 3, 1, 0), start=2):
        ledger.exchange("a", number, {"pool": giver.state(running)}, {})
        taker.accept(ledger.exchange("b", number, {"pool": taker.state(taker.in_force)}, {})["pool"])
        assert taker.in_force == 4 - running


def test_a_statement_that_comes_late_takes_nothing_away() -> None:
    ledger = ModelLedger()
    ledger.now_ms = SETTLE_MS
    ledger.exchange("a", 2, {"pool": Statement(0, 16, 16)}, {})
    assert ledger.exchange("a", 1, {"pool": Statement(0, 0, 16)}, {}) == {"pool": 16}
    assert ledger.exchange("b", 3, {"pool": Statement(0, 16, 16)}, {}) == {"pool": 0}
