"""Turns of a lane, split between instances."""

from __future__ import annotations

from coordinator.core.lane_turns import PATIENCE, LaneTurns, Turns


def grants_until_stopped(turns: LaneTurns, most: int = 1000) -> int:
    made = 0
    while made < most and turns.may_grant():
        turns.note_grant()
        made += 1
    return made


def test_alone_it_is_always_our_turn() -> None:
    turns = LaneTurns()
    turns.note_exchange(3, {})
    assert grants_until_stopped(turns) == 1000


def test_a_round_is_one_grant_for_each_tenant() -> None:
    turns = LaneTurns()
    turns.note_exchange(9, {"other": Turns(1, 50)})
    assert grants_until_stopped(turns) == 9


def test_one_tenant_with_many_requests_does_not_outrun_nine_elsewhere() -> None:
    turns = LaneTurns()
    turns.note_exchange(1, {"other": Turns(9, 0)})
    assert grants_until_stopped(turns) == 1
    turns.note_exchange(1, {"other": Turns(9, 9)})
    assert grants_until_stopped(turns) == 3


def test_who_makes_no_use_of_its_turns_is_not_waited_for() -> None:
    turns = LaneTurns()
    for _ in range(PATIENCE):
        turns.note_exchange(1, {"other": Turns(1, 7)})
    assert grants_until_stopped(turns) == 1000
