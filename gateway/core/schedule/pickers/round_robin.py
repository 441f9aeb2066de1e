"""Takes one after the other."""

from __future__ import annotations

import random

from gateway.core.schedule.pipeline import Fleet


class RoundRobin:
    """In turn, whatever the scores; for troubleshooting.

    The turn is one worker's, and is counted per model: with one count for all of them, two models asked in
    alternation would each get every second endpoint only.
    """

    name = "round-robin"
    uses_scores = False

    def __init__(self) -> None:
        # Keyed by the first slot of the fleet, since a slot belongs to one model.
        self._turns: dict[int, int] = {}

    def pick(self, fleet: Fleet, candidates: list[int], totals: list[float], rng: random.Random) -> int:
        """Take the next."""
        key = fleet.slots[0]
        turn = self._turns.get(key)
        if turn is None:
            # Workers must not all begin with the same endpoint.
            turn = int(rng.random() * len(candidates))
        self._turns[key] = turn + 1
        return candidates[turn % len(candidates)]
