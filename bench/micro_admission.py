"""What decisions of admission cost: saturation, the fast path's verdict, a grant from short and long queues.

    python -m bench.micro_admission

Prints figure and budget, and fails above it. A grant from a queue of 10,000 must cost what one from a queue
of ten does, within 50 %; by service the tenants lie in a heap, so that more of them may cost more. CPU time
counts, and the best of several rounds: others on the machine can only add.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from bench.calls import Call, report
from coordinator.core.queue import BandQueue, QueueSettings, Waiter
from gateway.core.admission import NO_CAP, LaneSettings, LaneView, Replicas, may_start, saturation

ROUNDS = 7
NOW = 1000.0
SETTINGS = LaneSettings(ceilings=(1.0, 0.85, 0.6, 0.3))
FEW, MANY = 10, 10_000
ALLOWED_RATIO = 1.5
ALLOWED_RATIO_OF_HEAP = 2.5
# A round grants everybody of a long queue twice, so that the tidying up of a queue is in the figure.
GRANTS_PER_ROUND = 2 * MANY
# Granted at a time before as many come in their place.
BLOCK = 5


def main() -> int:
    """Measure everything; return 1 if something is over its budget."""
    within = [report(_calls())]
    for fairness in ("request", "service"):
        within.append(_report_grants(fairness))
    return 0 if all(within) else 1


def _calls() -> list[Call]:
    lanes = {count: _lane(count) for count in (1, 16, 100)}
    stale = _lane(16).replicas._replace(scraped_at=[NOW - 60.0] * 16)
    waited_for = _lane(16)._replace(waiters=[0, 1, 0, 0])
    budgets_us = {1: 8.0, 16: 15.0, 100: 100.0}
    return [
        *(
            Call(f"saturation(), {count} replicas", _saturation_of(lane.replicas), budgets_us[count])
            for count, lane in lanes.items()
        ),
        Call("  16 replicas with stale metrics", _saturation_of(stale), 25.0),
        *(
            Call(f"may_start(), {count} replicas", _verdict_on(lane), budgets_us[count] + 3.0)
            for count, lane in lanes.items()
        ),
        Call("  behind a waiter", _verdict_on(waited_for), 4.0),
    ]


def _lane(count: int) -> LaneView:
    replicas = Replicas(
        state=[1.0] * count,
        cooldown_until=[0.0] * count,
        scraped_at=[NOW - 1.0] * count,
        waiting=[1.0] * count,
        kv=[0.4] * count,
        capacity=[32.0] * count,
        inflight=[20] * count,
    )
    return LaneView(replicas, [0, 0, 0, 0], pending=2, leases=40, cap=NO_CAP)


def _saturation_of(replicas: Replicas) -> Callable[[], object]:
    return lambda: saturation(replicas, 2, SETTINGS, NOW)


def _verdict_on(lane: LaneView) -> Callable[[], object]:
    return lambda: may_start(lane, 1, SETTINGS, NOW)


class _Grants:
    """A queue that is kept at its length."""

    def __init__(self, fairness: str, waiters: int, tenants: int) -> None:
        settings = QueueSettings(
            bands=4,
            capacity_per_band=2 * MANY,
            capacity=2 * MANY,
            fairness="service" if fairness == "service" else "request",
        )
        self._queue = BandQueue(settings, 0.0)
        self._tenants = tenants
        self._count = 0
        self.best_us = math.inf
        self._fill(waiters)

    def measure(self) -> None:
        """Grant and fill up for one round."""
        granted_s = 0.0
        for _ in range(GRANTS_PER_ROUND // BLOCK):
            now = self._count / 1000.0
            began = time.thread_time()
            for _ in range(BLOCK):
                self._queue.grant_next(_always, now)
            granted_s += time.thread_time() - began
            self._fill(BLOCK)
        self.best_us = min(self.best_us, granted_s / GRANTS_PER_ROUND * 1e6)

    def _fill(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            now = self._count / 1000.0
            tenant = f"tenant-{self._count % self._tenants}"
            self._queue.enqueue(Waiter(self._count, 1, tenant, now, now + 1e6, 100.0), now)


def _always(band: int) -> bool:
    return True


def _report_grants(fairness: str) -> bool:
    few = _Grants(fairness, FEW, FEW)
    many = {tenants: _Grants(fairness, MANY, tenants) for tenants in (FEW, 1_000, MANY)}
    for _ in range(ROUNDS):  # in turn, so that a busy moment of the machine meets all
        for grants in (few, *many.values()):
            grants.measure()
    print(f"{f'  grant by {fairness}, {FEW} waiters':<58} {few.best_us:9.3f} us")
    is_within = True
    for tenants, grants in many.items():
        allowed = ALLOWED_RATIO_OF_HEAP if fairness == "service" and tenants > FEW else ALLOWED_RATIO
        ratio = grants.best_us / few.best_us
        verdict = "" if ratio <= allowed else "  OVER BUDGET"
        is_within &= not verdict
        name = f"    {MANY} waiters of {tenants} tenants"
        print(f"{name:<58} {grants.best_us:9.3f} us   {ratio:.2f} x, budget {allowed} x{verdict}")
    return is_within


if __name__ == "__main__":
    sys.exit(main())
