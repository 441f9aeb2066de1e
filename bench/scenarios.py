"""What is measured: how the fake engines behave, and what load they get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

Settings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One measurement.

    Attributes:
        text: for the table's heading.
        engine: settings of the fake engines (`peerbench engine`).
        load: settings of the load generator (`peerbench load`).
        is_abort: clients go away; what counts is what the engines still do afterwards.
    """

    text: str
    engine: Settings
    load: Settings
    is_abort: bool = False


SCENARIOS = {
    "S1": Scenario(
        "answers of 32 tokens, engine delay 0, one request at a time",
        {},
        {"conc": 1, "secs": 2, "tokens": 32},
    ),
    "S2": Scenario(
        "answers of 32 tokens, engine delay 0, 64 requests at a time",
        {},
        {"conc": 64, "secs": 3, "tokens": 32, "max_secs": 20},
    ),
    "S2k": Scenario(
        "as S2 with a body of 2 KB",
        {},
        {"conc": 64, "secs": 3, "tokens": 32, "prompt_bytes": 1920, "max_secs": 20},
    ),
    "S3": Scenario(
        "streams of 128 tokens without a pause between tokens, 64 at a time",
        {},
        {"conc": 64, "secs": 3, "tokens": 128, "stream": 1, "max_secs": 20},
    ),
    "S6": Scenario(
        "light load: 10 new streams a second for 6 s, 32 tokens, first after 50 ms, then one in 10 ms",
        {"ttft_ms": 50, "itl_ms": 10},
        {"rate": 10, "secs": 6, "tokens": 32, "stream": 1, "max_secs": 20},
    ),
    "S4": Scenario(
        "1000 streams at a time (2000 in all), 64 tokens, first after 50 ms, then one in 20 ms",
        {"ttft_ms": 50, "itl_ms": 20},
        {"conc": 1000, "requests": 2000, "tokens": 64, "stream": 1, "ramp_ms": 1000, "max_secs": 25},
    ),
    "S5": Scenario(
        "100 streams whose clients go away after 5 events",
        {"ttft_ms": 50, "itl_ms": 20},
        {"conc": 100, "requests": 100, "tokens": 500, "stream": 1, "abort_events": 5, "max_secs": 15},
        is_abort=True,
    ),
    "S5n": Scenario(
        "100 requests that would take 8 s, whose clients go away after 500 ms",
        {"ttft_ms": 8000},
        {"conc": 100, "requests": 100, "tokens": 8, "abort_ms": 500, "max_secs": 15},
        is_abort=True,
    ),
}
# Every setting that a scenario may have changed, as the next one expects it.
ENGINE_DEFAULTS: Settings = {"ttft_ms": 0, "itl_ms": 0, "cache_blocks": 0, "prefill_us": 0, "max_running": 0}


def shortened(scenario: Scenario) -> Scenario:
    """Return a scenario of the same kind that takes less time, for a first look."""
    load = dict(scenario.load)
    if "secs" in load:
        load["secs"] = min(load["secs"], 2)
    return replace(scenario, load=load)
