"""When an endpoint counts as stuck, and when no more."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from coordinator.core.watchdog import TRANSITIONS, Change, Finding, Flag, Progress, Watchdog

LIMIT_S = 60.0
START = 1000.0


def seen(
    silent_since: float | None, moved_at: float = 0.0, limit_s: float = LIMIT_S, *, renewed: bool = False
) -> Progress:
    return Progress(silent_since, moved_at, limit_s, renewed)


def flags(looks: Iterable[tuple[float, Progress]]) -> list[bool]:
    """Return whether the endpoint was stuck after each look at a time after `START`."""
    watchdog, found = Watchdog(), []
    for at, progress in looks:
        watchdog.look({3: progress}, START + at)
        found.append(3 in watchdog.stuck)
    return found


def test_the_table_has_an_answer_for_every_finding() -> None:
    assert set(TRANSITIONS) == set(Flag)
    assert all(set(row) == set(Finding) for row in TRANSITIONS.values())


SILENT = seen(START)
AFTER_FLAG = START + 70
# Each row: looks as (time, what is seen), and whether the endpoint is stuck after each.
SEQUENCES: dict[str, tuple[list[tuple[float, Progress]], list[bool]]] = {
    "flagged past the limit and not at it": (
        [(59, SILENT), (60, SILENT), (60.1, SILENT), (500, SILENT)],
        [False, False, True, True],
    ),
    "progress puts it off": (
        [(59, SILENT), (80, seen(START + 58)), (119, seen(START + 58))],
        [False, False, True],
    ),
    "one silent request is enough whatever the others do": (
        [(61, seen(START, START + 61)), (90, seen(START, START + 90))],
        [True, True],
    ),
    "over when the request moves again": (
        [(61, SILENT), (75, seen(AFTER_FLAG, AFTER_FLAG))],
        [True, False],
    ),
    "over when it ends with an answer": ([(61, SILENT), (75, seen(None, AFTER_FLAG))], [True, False]),
    "not over because others moved before": (
        [(61, seen(START, START + 50)), (65, seen(START + 50, START + 50))],
        [True, True],
    ),
    "not over because the one that was silent gave up": (
        [(61, SILENT), (65, seen(START + 40)), (75, seen(None))],
        [True, True, True],
    ),
    "over when nothing was under way for as long": (
        [(61, SILENT), (65, SILENT), (70, seen(None)), (124, seen(None)), (125, seen(None))],
        [True, True, True, True, False],
    ),
    "the rest begins anew with every request": (
        [(61, SILENT), (70, seen(None)), (120, seen(START + 119)), (125, seen(None)), (181, seen(None))],
        [True, True, True, True, False],
    ),
    "flagged again when the probe is silent too": (
        [(61, SILENT), (122, seen(None)), (123, seen(START + 122)), (183, seen(START + 122))],
        [True, False, False, True],
    ),
    "over when the engine was restarted": (
        [(61, SILENT), (62, seen(START, renewed=True)), (63, seen(None))],
        [True, False, False],
    ),
    "over when it is switched off": ([(61, SILENT), (62, seen(START, limit_s=0.0))], [True, False]),
    "off means off": ([(10_000, seen(START, limit_s=0.0))], [False]),
    "an idle endpoint is never stuck": ([(0, seen(None)), (10_000, seen(None))], [False, False]),
    "a longer limit clears nothing by itself": (
        [(61, SILENT), (62, seen(START, limit_s=600.0)), (63, seen(START + 62, START + 62, 600.0))],
        [True, True, False],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEQUENCES)
def test_an_endpoint_is_stuck_while_nothing_shows_the_contrary(case: str) -> None:
    looks, expected = SEQUENCES[case]
    assert flags(looks) == expected


def test_each_change_is_told_once_with_its_reason() -> None:
    watchdog = Watchdog()
    told = [
        watchdog.look({3: seen(START)}, START + 61),
        watchdog.look({3: seen(START)}, START + 62),
        watchdog.look({3: seen(START + 63, START + 63)}, START + 64),
        watchdog.look({3: seen(START + 63, START + 63)}, START + 65),
    ]
    assert told == [
        [Change(3, Flag.STUCK, Finding.OVERDUE, 61.0)],
        [],
        [Change(3, Flag.CLEAR, Finding.MOVING, 1.0)],
        [],
    ]


def test_endpoints_are_judged_apart_each_by_its_own_limit() -> None:
    watchdog = Watchdog()
    watchdog.look({1: seen(START), 2: seen(START, limit_s=600.0), 3: seen(START + 50)}, START + 61)
    assert watchdog.stuck == {1: START + 61}


def test_an_endpoint_that_is_gone_is_forgotten_and_its_slot_starts_clear() -> None:
    watchdog = Watchdog()
    watchdog.look({1: seen(START)}, START + 61)
    assert watchdog.look({}, START + 62) == []
    assert watchdog.stuck == {}
    assert watchdog.look({1: seen(START + 61)}, START + 63) == []
