"""Splits the turns of a lane between instances that have waiters of the same band.

Every instance deals its own tenants their turns; of two instances with waiters in a lane, the quicker one
would still take every place that comes free. So they compare grants at each exchange: a *round* is one
grant for each distinct tenant that waits, and nobody gets far ahead of the others in rounds.

Until the next exchange an instance may make twice as many rounds as the slowest of the others made since the
last one, and one more. Who has waiters and makes no round at three exchanges in a row is not waited for: it
cannot use the places that are free (or it would have).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

# Exchanges without a grant after which an instance is not waited for.
PATIENCE = 3


class Turns(NamedTuple):
    """An instance in a lane: distinct tenants that wait in the band, and its grants so far."""

    tenants: int
    grants: int


class LaneTurns:
    """The turns of one lane.

    Attributes:
        grants: made here so far; told to the others.
    """

    __slots__ = ("_idle", "_known", "_left", "grants")

    def __init__(self) -> None:
        self.grants = 0
        self._left = math.inf
        self._known: dict[str, int] = {}
        self._idle: dict[str, int] = {}

    def note_exchange(self, own_tenants: int, others: Mapping[str, Turns]) -> None:
        """Take note of what the others did since the last exchange.

        Args:
            own_tenants: distinct tenants that wait here, in the highest band that has waiters here.
            others: instances with waiters in the same band; no others.
        """
        known, idle = self._known, self._idle
        rounds = []
        for name, turns in others.items():
            made = turns.grants - known[name] if name in known else 0
            idle[name] = idle.get(name, 0) + 1 if made <= 0 else 0
            if idle[name] < PATIENCE:
                rounds.append(max(made, 0) / max(turns.tenants, 1))
        self._known = {name: turns.grants for name, turns in others.items()}
        self._idle = {name: idle[name] for name in others}
        self._left = math.ceil(max(own_tenants, 1) * (2 * min(rounds) + 1)) if rounds else math.inf

    def may_grant(self) -> bool:
        """Whether it is this instance's turn; if not, ask again after the next exchange."""
        return self._left > 0

    def note_grant(self) -> None:
        """Count a grant to a waiter."""
        self.grants += 1
        self._left -= 1
