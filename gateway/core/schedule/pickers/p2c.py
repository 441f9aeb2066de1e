"""Takes the better of two drawn at random."""

from __future__ import annotations

import random

from gateway.core.schedule.pipeline import Fleet


class PowerOfTwoChoices:
    """Two different candidates at random, the better one of them; equal ones at random.

    Spreads decisions that many workers make on the same figures (plan §7.4).
    """

    name = "p2c"
    uses_scores = True

    def pick(self, fleet: Fleet, candidates: list[int], totals: list[float], rng: random.Random) -> int:
        """Draw two, take the better."""
        count = len(candidates)
        first = int(rng.random() * count)
        second = int(rng.random() * (count - 1))
        if second >= first:
            second += 1
        # Which of the two is drawn first is random already, so this settles a tie at random.
        return candidates[first if totals[first] >= totals[second] else second]
