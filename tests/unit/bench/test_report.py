"""Tables and verdicts of `make bench`."""

from __future__ import annotations

from typing import Any

import pytest

from bench.measure import Latency, Row
from bench.report import complaints, tables, verdicts


def row(target: str, scenario: str = "S2", **fields: Any) -> Row:
    """Return a row with nothing remarkable but `fields`."""
    values: dict[str, Any] = {
        "round": 1,
        "ok": 10,
        "errors": {},
        "requests_per_s": 100.0,
        "events_per_s": 0.0,
        "seconds": 1.0,
        "total_ms": Latency(1.0, 2.0, 3.0),
        "ttft_ms": Latency(1.0, 2.0, 3.0),
        "cpu_s": 0.1,
        "cpu_us_per_request": 100.0,
        "cpu_us_per_event": 10.0,
        "peak_bytes": 0,
        "pss_bytes": 0,
        "aborted": 0,
        "reached": 10,
        "cancelled_1s": None,
        "left_4s": None,
        "others_cpu_s": 0.0,
        "wall_s": 2.0,
        **fields,
    }
    return Row(target=target, scenario=scenario, **values)


def test_added_latency_is_what_exceeds_the_bare_engines() -> None:
    text = tables([row("direct"), row("llmgw-1w", total_ms=Latency(1.5, 2.5, 7.0))])
    assert "| llmgw-1w | 100 | 100 | 0.50 | 4 |" in text
    assert "| direct | 100 | 100 | (1) | (3) |" in text


def test_only_quiet_rounds_count_where_there_are_any() -> None:
    text = tables([row("a", cpu_us_per_request=50.0), row("a", cpu_us_per_request=900.0, others_cpu_s=99.0)])
    assert "| a | 50 |" in text
    assert "| 1/2 |" in text


def test_noisy_rounds_count_where_there_are_no_others() -> None:
    noisy = [row("a", cpu_us_per_request=value, others_cpu_s=99.0) for value in (10.0, 20.0, 60.0)]
    assert "| a | 20 [10..60] |" in tables(noisy)


@pytest.mark.parametrize(("cost", "holds"), [(150.0, True), (150.1, False)])
def test_a_budget_holds_up_to_its_limit(cost: float, holds: bool) -> None:
    ((held, _),) = verdicts([row("llmgw-1w", "S2k", cpu_us_per_request=cost)], "llmgw")
    assert held is holds


def test_others_have_no_budget() -> None:
    assert verdicts([row("litellm", "S2k", cpu_us_per_request=9999.0)], "llmgw") == []


def test_errors_of_ours_are_named() -> None:
    rows = [row("llmgw-1w", errors={"http 500": 3}), row("nginx", errors={"http 502": 1}), row("llmgw-2w")]
    assert complaints(rows, "llmgw") == ["llmgw-1w, S2, round 1: {'http 500': 3}"]
