"""Takes the best."""

from __future__ import annotations

import random

from gateway.core.schedule.pipeline import Fleet


class MaxScore:
    """The highest total; equal ones at random."""

    name = "max-score"
    uses_scores = True

    def pick(self, fleet: Fleet, candidates: list[int], totals: list[float], rng: random.Random) -> int:
        """Take the best."""
        best = max(totals)
        if totals.count(best) == 1:
            return candidates[totals.index(best)]
        ties = [i for i, total in zip(candidates, totals, strict=True) if total == best]
        return ties[int(rng.random() * len(ties))]
