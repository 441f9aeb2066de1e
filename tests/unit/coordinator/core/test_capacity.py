"""How many requests an engine runs at a time, learned from looks every two seconds."""

from __future__ import annotations

import pytest

from coordinator.core.capacity import BatchCapacity

FULL_64 = [(64, 1), (64, 5)]
# Each row: configured, looks as (running, waiting), and what to reckon with after the last; 8 are assumed.
LOOKS: dict[str, tuple[int | None, list[tuple[float, float]], float]] = {
    "nothing known": (None, [], 8),
    "little to do says little": (None, [(1, 0), (3, 0), (0, 0)], 8),
    "what was seen running is possible": (None, [(20, 0), (12, 0)], 20),
    "a full engine shows its batch": (None, FULL_64, 64),
    "also below the assumption": (None, [(4, 3), (4, 9)], 4),
    "one look may meet an arrival": (None, [(2, 1), (3, 0), (1, 1)], 8),
    "the larger of both looks counts": (None, [(4, 1), (3, 1)], 4),
    "it may grow": (None, [(4, 3), (4, 3), (6, 0)], 6),
    "an idle engine keeps its mark": (None, [*FULL_64, *[(0, 0)] * 1000], 64),
    "nothing running says nothing": (None, [(0, 9), (0, 9)], 8),
    "the operator knows better": (32, [(4, 9), (4, 9)], 32),
    "but not against what is seen": (32, [(40, 0)], 40),
}


@pytest.mark.parametrize("case", LOOKS)
def test_capacity_is_what_the_looks_prove(case: str) -> None:
    configured, looks, expected = LOOKS[case]
    capacity = BatchCapacity(configured=configured, assumed=8)
    for number, (running, waiting) in enumerate(looks):
        capacity.observe(running=running, waiting=waiting, now=1000.0 + 2 * number)
    assert capacity.value == expected


def test_a_full_engine_that_runs_less_pulls_the_mark_down_in_its_half_life() -> None:
    capacity = BatchCapacity(configured=None, assumed=8)
    for now in (0.0, 2.0):
        capacity.observe(running=64, waiting=1, now=now)
    for look in range(32):
        capacity.observe(running=24, waiting=9, now=4.0 + 2 * look)
    # The first look after the change still stands beside a full one; 31 more make 62 s.
    assert 43 < capacity.value < 45
    for look in range(32, 1000):
        capacity.observe(running=24, waiting=9, now=4.0 + 2 * look)
    assert capacity.value == pytest.approx(24)


def test_another_process_is_another_engine() -> None:
    capacity = BatchCapacity(configured=None, assumed=8)
    capacity.observe(running=64, waiting=1, now=0.0)
    capacity.forget()
    assert capacity.observe(running=2, waiting=1, now=2.0) == 8
    assert not capacity.is_proven
