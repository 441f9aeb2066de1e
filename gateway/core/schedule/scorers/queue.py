"""Prefers endpoints whose engine has few requests waiting."""

from __future__ import annotations

from gateway.core.schedule.pipeline import READY, Fleet, Request
from gateway.core.schedule.scorers.freshness import score_unscraped

TARGET_WAITING = 4.0
"""Queue length that scores 0. Source: plan §9.1, `target_waiting_per_replica`."""


class Queue:
    """1 - min(1, waiting / target), of endpoints whose scrape is fresh (plan §7.4)."""

    name = "queue"
    needs = frozenset(("state", "waiting"))

    def score(self, request: Request, candidates: Fleet) -> list[float]:
        """Score by queue length."""
        state, waiting = candidates.state, candidates.waiting
        if state.count(READY) == len(state):
            return [1.0 - length / TARGET_WAITING if length < TARGET_WAITING else 0.0 for length in waiting]
        return [
            max(0.0, 1.0 - length / TARGET_WAITING) if each == READY else score_unscraped(each)
            for each, length in zip(state, waiting, strict=True)
        ]
