"""Whose turn it is among the tenants of a band."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from coordinator.core.turns import HALF_LIFE_S, LeastService, RoundRobin

Maker: TypeAlias = Callable[[], RoundRobin | LeastService]
MAKERS: dict[str, Maker] = {"request": RoundRobin, "service": lambda: LeastService(0.0)}
of_either_kind = pytest.mark.parametrize("make_turns", MAKERS.values(), ids=MAKERS)


def turns_of(turns: RoundRobin | LeastService, count: int, cost: float = 0.0, now: float = 0.0) -> str:
    granted = []
    for _ in range(count):
        tenant = turns.first()
        turns.served(tenant, cost, now)
        granted.append(tenant)
    return "".join(granted)


@pytest.mark.parametrize("cost", [0.0, 10.0])
@of_either_kind
def test_equals_are_served_in_turn(make_turns: Maker, cost: float) -> None:
    turns = make_turns()
    for tenant in "abc":
        turns.join(tenant, 0.0)
    assert turns.order() == ("a", "b", "c")
    assert turns_of(turns, 7, cost) == "abcabca"


@of_either_kind
def test_whoever_leaves_has_no_turn(make_turns: Maker) -> None:
    turns = make_turns()
    for tenant in "abc":
        turns.join(tenant, 0.0)
    turns.leave("b")
    assert turns_of(turns, 4, 1.0) == "acac"


def test_service_halves_in_its_half_life() -> None:
    turns = LeastService(100.0)
    turns.charge("a", 1000.0, 100.0)
    assert turns.attained("a", 100.0 + HALF_LIFE_S) == pytest.approx(500.0)
    turns.charge("a", 100.0, 100.0 + HALF_LIFE_S)
    assert turns.attained("a", 100.0 + 2 * HALF_LIFE_S) == pytest.approx(300.0)


def test_service_stays_with_a_tenant_that_leaves_and_comes_back() -> None:
    turns = LeastService(0.0)
    turns.join("a", 0.0)
    turns.served("a", 100.0, 0.0)
    turns.leave("a")
    turns.join("b", 1.0)
    turns.join("a", 1.0)
    assert turns.first() == "b"


def test_service_given_back_never_becomes_a_credit() -> None:
    turns = LeastService(0.0)
    turns.charge("a", 10.0, 0.0)
    turns.charge("a", -1000.0, 0.0)
    assert turns.attained("a", 0.0) == 0.0


def test_service_that_has_faded_is_forgotten() -> None:
    turns = LeastService(0.0)
    turns.charge("small", 10.0, 0.0)
    turns.charge("large", 1e6, 0.0)
    turns.forget(5 * HALF_LIFE_S)
    assert turns.attained("small", 5 * HALF_LIFE_S) == 0.0
    assert turns.attained("large", 5 * HALF_LIFE_S) == pytest.approx(1e6 / 32)


def test_forgetting_leaves_the_turns_as_they_are() -> None:
    turns = LeastService(0.0)
    for tenant, cost in [("a", 50.0), ("b", 0.0), ("c", 9.0), ("d", 0.0)]:
        turns.join(tenant, 0.0)
        turns.charge(tenant, cost, 0.0)
    turns.forget(30.0)
    assert turns_of(turns, 4, 100.0, 30.0) == "bdca"


def test_service_survives_days_without_a_sweep() -> None:
    turns = LeastService(0.0)
    turns.join("a", 0.0)
    turns.join("b", 0.0)
    for day in range(1, 4):
        now = day * 86400.0
        turns.served(turns.first(), 10.0, now)
        assert sum(turns.attained(tenant, now) for tenant in "ab") == pytest.approx(10.0)


def test_outdated_turns_do_not_pile_up() -> None:
    turns = LeastService(0.0)
    for tenant in "abc":
        turns.join(tenant, 0.0)
    for _ in range(10_000):
        turns.charge("c", 1.0, 0.0)  # never first, so that nothing is popped
    assert len(turns._heap) < 100
