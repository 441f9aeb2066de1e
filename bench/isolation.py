"""Whether platinum requests notice 500 bronze ones that never stop, by time to first token; with budgets.

    python -m bench.isolation [--rounds 5] [--clients 500] [--samples 400]

Each round is a fresh gateway and a fresh engine: p99 under the flood over p99 of idle, both of this round.
Budgets: the median of the rounds, every round, and the other way round a round without admission, in which
the flood has to be felt. Exit code 1 above a budget. The engine and the load: tests/support/isolation.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import isolation
from tests.support.cells import cells_of
from tests.support.gateway import Gateways
from tests.support.isolation import Isolation, percentile
from tests.support.processes import Programs

MEDIAN_BUDGET = 1.10
WORST_BUDGET = 1.5
LOAD_AT_LEAST = 10.0


def main(argv: Sequence[str]) -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.isolation", description="Priority isolation under a flood.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clients", type=int, default=500, help="bronze requests that run or wait at any time"
    )
    parser.add_argument("--samples", type=int, default=400, help="platinum requests of each phase")
    options = parser.parse_args(argv)

    print(f"{'round':<16}{'idle p50':>10}{'p99':>8}{'flood p50':>12}{'p99':>8}{'ratio':>8}{'bronze/s':>10}")
    ratios = []
    for number in range(1, options.rounds + 1):
        result = _round(options.clients, options.samples, is_on=True)
        ratios.append(result.ratio())
        _show(str(number), result)
    without = _round(options.clients, options.samples // 4, is_on=False)
    _show("admission off", without)

    median, worst = statistics.median(ratios), max(ratios)
    verdicts = (
        (median <= MEDIAN_BUDGET, f"median of {len(ratios)} rounds {median:.2f}, budget {MEDIAN_BUDGET}"),
        (worst <= WORST_BUDGET, f"worst round {worst:.2f}, budget {WORST_BUDGET}"),
        (
            without.ratio() >= LOAD_AT_LEAST,
            f"without admission {without.ratio():.0f}, at least {LOAD_AT_LEAST}",
        ),
    )
    for holds, line in verdicts:
        print(f"{'ok  ' if holds else 'OVER'}  {line}")
    return 0 if all(holds for holds, _ in verdicts) else 1


def _round(clients: int, samples: int, *, is_on: bool) -> Isolation:
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(Path(folder))
        gateways = Gateways(programs, Path(folder))
        try:
            engine = isolation.engine(programs)
            gateway = gateways(isolation.config(engine, enabled=is_on))
            with cells_of(gateway) as cells:
                return isolation.measure(
                    gateway,
                    batch_clients=clients,
                    samples=samples,
                    flooded_samples=None if is_on else 2 * isolation.INTERACTIVE_CLIENTS,
                    height=lambda: sum(cells.waiters) if is_on else engine.stats()["waiting"],
                )
        finally:
            gateways.close()
            programs.close()


def _show(name: str, result: Isolation) -> None:
    idle, flooded = result.idle, result.flooded
    figures = [percentile(each, share) * 1000 for each in (idle, flooded) for share in (0.5, 0.99)]
    print(
        f"{name:<16}{figures[0]:>10.0f}{figures[1]:>8.0f}{figures[2]:>12.0f}{figures[3]:>8.0f}"
        f"{result.ratio():>8.2f}{result.batch_per_s:>10.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
