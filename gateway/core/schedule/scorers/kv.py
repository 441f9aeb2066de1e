"""Prefers endpoints whose KV cache has room."""

from __future__ import annotations

from gateway.core.schedule.pipeline import READY, Fleet, Request
from gateway.core.schedule.scorers.freshness import NEUTRAL_SCORE, score_unscraped

CEILING = 0.90
"""Occupancy from which an engine is about to preempt requests. Source: plan §9.1, `kv_ceiling`."""


class Kv:
    """1 - occupancy, and 0 above the ceiling, of endpoints whose scrape is fresh (plan §7.4)."""

    name = "kv"
    needs = frozenset(("state", "kv"))

    def score(self, request: Request, candidates: Fleet) -> list[float]:
        """Score by KV occupancy."""
        state = candidates.state
        if state.count(READY) == len(state):
            return [1.0 - kv if kv < CEILING else _not_below_ceiling(kv) for kv in candidates.kv]
        return [
            (1.0 - kv if kv < CEILING else _not_below_ceiling(kv)) if each == READY else score_unscraped(each)
            for each, kv in zip(state, candidates.kv, strict=True)
        ]


def _not_below_ceiling(kv: float) -> float:
    return 0.0 if kv >= CEILING else NEUTRAL_SCORE  # NaN: engines that publish none (llama.cpp)
