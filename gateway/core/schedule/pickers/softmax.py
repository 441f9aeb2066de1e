"""Takes one at random, better ones more often."""

from __future__ import annotations

import math
import random

from gateway.core.schedule.pipeline import Fleet


class Softmax:
    """Probability proportional to exp(total / temperature).

    A small temperature comes close to `max-score`, yet breaks the lockstep of workers that decide on equal
    figures (plan §7.4; Dynamo's router_temperature).
    """

    name = "softmax"
    uses_scores = True

    def __init__(self, temperature: float) -> None:
        """Set the temperature, more than 0."""
        self._temperature = temperature

    def pick(self, fleet: Fleet, candidates: list[int], totals: list[float], rng: random.Random) -> int:
        """Sample."""
        best, temperature, exp = max(totals), self._temperature, math.exp
        shares = [exp((total - best) / temperature) for total in totals]
        point = rng.random() * sum(shares)
        for candidate, share in zip(candidates, shares, strict=True):
            point -= share
            if point < 0.0:
                return candidate
        return candidates[-1]  # rounding
