"""Tables from measured rows: medians over the rounds, beside the bare engines.

Where a target has quiet rounds (other programs left the machine alone), only those count, else all do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.measure import Row
from bench.scenarios import SCENARIOS

DIRECT = "direct"
Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        value: of a row.
        is_added: show what is more than the bare engines' median, which are shown as they are.
    """

    title: str
    value: Value
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """What our gateway may cost: a limit on one column's median."""

    scenario: str
    text: str
    limit: float
    value: Value


BUDGETS = (
    Budget("S2k", "CPU per request with a 2 KB body, µs", 150.0, lambda row: row.cpu_us_per_request),
    Budget("S4", "CPU per event at 1000 streams, µs", 30.0, lambda row: row.cpu_us_per_event),
)
_CPU_PER_REQUEST = Column("CPU µs/request", lambda row: row.cpu_us_per_request)
_CPU_PER_EVENT = Column("CPU µs/event", lambda row: row.cpu_us_per_event)
_REQUESTS = Column("requests/s", lambda row: row.requests_per_s)
_ERRORS = Column("errors", lambda row: sum(row.errors.values()))
_MEMORY = Column("peak RSS, MB", lambda row: row.peak_bytes / 1e6)
_SINGLE = (
    _CPU_PER_REQUEST,
    _REQUESTS,
    Column("added p50 ms", lambda row: row.total_ms.p50, is_added=True),
    Column("added p99 ms", lambda row: row.total_ms.p99, is_added=True),
    _ERRORS,
)
_STREAMS = (
    _CPU_PER_EVENT,
    Column("done, %", lambda row: 100 * row.ok / SCENARIOS["S4"].load["requests"]),
    Column("seconds", lambda row: row.seconds),
    Column("added TTFT p50 ms", lambda row: row.ttft_ms.p50, is_added=True),
    Column("added TTFT p99 ms", lambda row: row.ttft_ms.p99, is_added=True),
    Column("added total p50 ms", lambda row: row.total_ms.p50, is_added=True),
    _MEMORY,
    _ERRORS,
)
_LIGHT = (
    Column("added TTFT p50 ms", lambda row: row.ttft_ms.p50, is_added=True),
    Column("added TTFT p90 ms", lambda row: row.ttft_ms.p90, is_added=True),
    Column("added TTFT p99 ms", lambda row: row.ttft_ms.p99, is_added=True),
    Column("CPU µs/stream", lambda row: row.cpu_us_per_request),
    _CPU_PER_EVENT,
    _ERRORS,
)
_ABORTS = (
    Column("clients that went", lambda row: row.aborted),
    Column("reached an engine", lambda row: row.reached),
    Column("cancelled within 1 s", lambda row: row.cancelled_1s),
    Column("still there after 4 s", lambda row: row.left_4s),
)
COLUMNS = {
    "S1": _SINGLE,
    "S2": (*_SINGLE, _MEMORY),
    "S2k": (*_SINGLE, _MEMORY),
    "S3": (_CPU_PER_EVENT, Column("events/s", lambda row: row.events_per_s), _REQUESTS, _ERRORS),
    "S4": _STREAMS,
    "S5": _ABORTS,
    "S5n": _ABORTS,
    "S6": _LIGHT,
}


def tables(rows: Sequence[Row]) -> str:
    """Return a markdown table per scenario."""
    parts = []
    targets = list(dict.fromkeys(row.target for row in rows))
    for name in (name for name in COLUMNS if any(row.scenario == name for row in rows)):
        columns = COLUMNS[name]
        lines = [f"#### {name}: {SCENARIOS[name].text}", ""]
        lines.append("| | " + " | ".join(column.title for column in columns) + " | quiet rounds |")
        lines.append("|---" * (len(columns) + 2) + "|")
        base = _chosen(rows, name, DIRECT)
        for target in targets:
            of_target = [row for row in rows if (row.scenario, row.target) == (name, target)]
            if not of_target:
                continue
            cells = [_cell(_chosen(rows, name, target), base, column, target) for column in columns]
            quiet = f"{sum(row.is_quiet for row in of_target)}/{len(of_target)}"
            lines.append(f"| {target} | " + " | ".join([*cells, quiet]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def verdicts(rows: Sequence[Row], prefix: str) -> list[tuple[bool, str]]:
    """Return for each budget and each target named `prefix`... whether it holds, and a line that says so."""
    found = []
    for budget in BUDGETS:
        for target in dict.fromkeys(row.target for row in rows if row.target.startswith(prefix)):
            value = _median(_chosen(rows, budget.scenario, target), budget.value)
            if value is not None:
                holds = value <= budget.limit
                word = "within" if holds else "ABOVE"
                found.append(
                    (holds, f"{target}: {budget.text}: {value:.1f}, {word} the budget of {budget.limit:g}")
                )
    return found


def complaints(rows: Sequence[Row], prefix: str) -> list[str]:
    """Return a line for each run in which a request of a target named `prefix`... went wrong."""
    return [
        f"{row.target}, {row.scenario}, round {row.round}: {dict(row.errors)}"
        for row in rows
        if row.target.startswith(prefix) and row.errors
    ]


def _chosen(rows: Sequence[Row], scenario: str, target: str) -> list[Row]:
    found = [row for row in rows if (row.scenario, row.target) == (scenario, target)]
    return [row for row in found if row.is_quiet] or found


def _median(rows: Sequence[Row], value: Value) -> float | None:
    values = [number for row in rows if (number := value(row)) is not None]
    return statistics.median(values) if values else None


def _cell(rows: Sequence[Row], base: Sequence[Row], column: Column, target: str) -> str:
    values = [number for row in rows if (number := column.value(row)) is not None]
    if not values:
        return "-"
    if column.is_added:
        if target == DIRECT:
            return f"({_number(statistics.median(values))})"
        zero = _median(base, column.value)
        if zero is None:
            return "-"
        values = [value - zero for value in values]
    text = _number(statistics.median(values))
    return f"{text} [{_number(min(values))}..{_number(max(values))}]" if len(values) > 1 else text


def _number(value: float) -> str:
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
