"""Prefers endpoints to which this host has few requests under way."""

from __future__ import annotations

from operator import truediv

from gateway.core.schedule.pipeline import Fleet, Request

FULL_SCALE = 16.0
"""Load that scores 0 while no endpoint has more: one request more or less between idle endpoints is to count
little beside a cached prefix."""


class Inflight:
    """1 - load / highest load, where load is requests in flight per unit of weight.

    The only figure that is never late; scrapes are seconds old (plan §7.4, §7.6).
    """

    name = "inflight"
    needs = frozenset(("inflight", "weight"))

    def score(self, request: Request, candidates: Fleet) -> list[float]:
        """Score by own load."""
        loads = list(map(truediv, candidates.inflight, candidates.weight))
        highest = max(FULL_SCALE, max(loads))
        return [1.0 - load / highest for load in loads]
