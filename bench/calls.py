"""Single calls, measured by themselves: figure and budget side by side.

CPU time of the best of several rounds: others on the machine can only add.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ROUNDS = 9
ROUND_S = 0.02


@dataclass(frozen=True, slots=True)
class Call:
    """A measured call.

    Attributes:
        name: for the table.
        function: what is called.
        budget_us: microseconds of CPU it may take.
    """

    name: str
    function: Callable[[], object]
    budget_us: float


def report(calls: Iterable[Call]) -> bool:
    """Measure and print each of `calls`; tell whether all are within their budgets."""
    is_within = True
    for call in calls:
        cost_us = measure_us(call.function)
        verdict = "" if cost_us <= call.budget_us else "  OVER BUDGET"
        is_within &= not verdict
        print(f"  {call.name:<56} {cost_us:9.3f} us   budget {call.budget_us:8.1f} us{verdict}")
    return is_within


def measure_us(function: Callable[[], object]) -> float:
    """Return microseconds of CPU per call."""
    started = time.process_time()
    function()
    once_s = max(time.process_time() - started, 1e-7)
    times = max(3, min(20_000, int(ROUND_S / once_s)))
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(times):
            function()
        best_s = min(best_s, (time.process_time() - started) / times)
    return best_s * 1e6
