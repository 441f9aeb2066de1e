"""Measures whether interactive requests notice a flood of batch requests, by their time to first token.

One engine that runs so many sequences at a time and whose KV cache they fill: both signals of saturation mean
something. Batch clients ask without a pause, and there are several times as many as the engine has room for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.flood import Flood, Load, body
from tests.support.gateway import Gateway, config_for, endpoint
from tests.support.processes import Programs
from tests.support.sim import SimEngine

MODEL = "sim-model"
TTFT_MS = 200.0
ITL_MS = 20.0
SEQUENCES = 32
BLOCKS_PER_BATCH_REQUEST = 10
BATCH_TOKENS = 60
INTERACTIVE_TOKENS = 3
INTERACTIVE_CLIENTS = 8
# The flood begins all at once; what is measured is how it goes on.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Isolation:
    """Seconds to the first token of interactive requests.

    Attributes:
        idle: while nobody else asks.
        flooded: under the flood.
        batch_per_s: batch requests that were answered meanwhile.
    """

    idle: tuple[float, ...]
    flooded: tuple[float, ...]
    batch_per_s: float

    def ratio(self, share: float = 0.99) -> float:
        """Return a percentile under the flood over the same one of idle."""
        return percentile(self.flooded, share) / percentile(self.idle, share)


def percentile(values: tuple[float, ...], share: float) -> float:
    """Return the value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def engine(programs: Programs, sequences: int = SEQUENCES) -> SimEngine:
    """Start the engine."""
    return SimEngine(
        programs,
        *("--max-num-seqs", str(sequences)),
        *("--kv-blocks", str(sequences * BLOCKS_PER_BATCH_REQUEST)),
        *("--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)),
    )


def config(sim: SimEngine, *, enabled: bool, **admission: Any) -> dict[str, Any]:
    """Return a configuration; the bands are the default ones."""
    return config_for(
        [endpoint("e0", sim.url, model=MODEL)],
        workers=2,
        log={"level": "warning"},
        router={
            "scrape_interval": "250ms",
            "admission": {"enabled": enabled, "queue_ttl": "120s", **admission},
        },
    )


def batch_load() -> Load:
    """Return requests of ten KV blocks that share none of them."""
    filler = "x" * (4 * (BLOCKS_PER_BATCH_REQUEST * 16 - BATCH_TOKENS - 30))
    return Load(
        lambda n: body(f"{n:08} {filler}", model=MODEL, max_tokens=BATCH_TOKENS),
        band="bronze",
        tenant="batch",
    )


def interactive_load() -> Load:
    """Return short questions."""
    return Load(
        lambda n: body(f"{n:08} hello", model=MODEL, max_tokens=INTERACTIVE_TOKENS),
        band="platinum",
        tenant="person",
    )


def measure(
    gateway: Gateway,
    *,
    batch_clients: int,
    samples: int,
    flooded_samples: int | None = None,
    flood_through: Gateway | None = None,
    height: Callable[[], int],
) -> Isolation:
    """Measure idle, then flooded.

    Args:
        samples: interactive requests in each phase, `flooded_samples` in the second one if given.
        flood_through: another instance that the batch requests go through.
        height: batch requests that wait, wherever; phase two begins when most do.
    """
    flood = Flood(gateway.url)
    try:
        warm = interactive_load()
        flood.add(warm, INTERACTIVE_CLIENTS)
        flood.run(lambda: len(warm.ttfts) >= 3 * INTERACTIVE_CLIENTS, 30, "warm connections")
        flood.remove(warm)
        idle = interactive_load()
        flood.add(idle, INTERACTIVE_CLIENTS)
        flood.run(lambda: len(idle.ttfts) >= samples, 120, "idle answers")
        flood.remove(idle)
        batch = batch_load()
        flood.add(batch, batch_clients, flood_through.url if flood_through else None)
        enough = (batch_clients - SEQUENCES) * 3 // 4
        flood.run(lambda: height() >= enough, 60, "the flood at its height")
        flood.run_for(SETTLE_S)
        busy = interactive_load()
        flood.add(busy, INTERACTIVE_CLIENTS)
        began, before = time.monotonic(), batch.ended
        flood.run(lambda: len(busy.ttfts) >= (flooded_samples or samples), 240, "answers under the flood")
        per_s = (batch.ended - before) / (time.monotonic() - began)
        assert not batch.refused, batch.refused
        assert not busy.refused, busy.refused
        return Isolation(tuple(idle.ttfts), tuple(busy.ttfts), per_s)
    finally:
        flood.close()
