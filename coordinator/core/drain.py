"""How fast a queue empties, for "come back in so many seconds".

Only time in which somebody waits counts: a queue that was empty for an hour has not become slow. Grants are
weighed by how long ago they were (e-folding 30 s of such time). While there was no grant yet, or so few that
the wait would be absurd, the answer is 0: not expected to clear.
"""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 30.0
# A shorter history than this says nothing: the first grant often comes at once.
_SHORTEST_HISTORY_S: Final = 1.0
_LONGEST_WAIT_S: Final = 600.0


class DrainRate:
    """Grants per second while somebody waits."""

    __slots__ = ("_busy_s", "_updated_at", "_weight")

    def __init__(self) -> None:
        self._weight = 0.0  # grants, each faded by its age
        self._busy_s = 0.0  # time in which somebody waited, up to `_updated_at`
        self._updated_at: float | None = None  # None while nobody waits

    def begin(self, now: float) -> None:
        """Somebody waits again; monotonic seconds."""
        self._updated_at = now

    def end(self, now: float) -> None:
        """Nobody waits any more."""
        self._advance(now)
        self._updated_at = None

    def count_grant(self, now: float) -> None:
        """Count a grant to somebody who waited."""
        self._advance(now)
        self._weight += 1.0

    def per_s(self, now: float) -> float:
        """Return the grants per second; 0 while there was none."""
        self._advance(now)
        history_s = max(self._busy_s, _SHORTEST_HISTORY_S)
        return self._weight / (_MEMORY_S * -math.expm1(-history_s / _MEMORY_S))

    def wait_s(self, place: int, now: float) -> float:
        """Estimate when the waiter at a place (1: the next) is granted; 0: not expected to clear."""
        rate = self.per_s(now)
        if place > rate * _LONGEST_WAIT_S:
            return 0.0
        return place / rate

    def _advance(self, now: float) -> None:
        if self._updated_at is None:
            return
        passed = now - self._updated_at
        self._updated_at = now
        self._busy_s += passed
        self._weight *= math.exp(-passed / _MEMORY_S)
