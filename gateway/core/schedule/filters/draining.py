"""Leaves out endpoints that finish what they have and take nothing new."""

from __future__ import annotations

from gateway.core.schedule.pipeline import DRAINING, Fleet, Request


class Draining:
    """Keeps what is not draining."""

    name = "draining"
    needs = frozenset(("state",))

    def keep(self, request: Request, fleet: Fleet, candidates: list[int]) -> list[int]:
        """Keep those that take new requests."""
        state = fleet.state
        if DRAINING not in state:
            return candidates
        return [i for i in candidates if state[i] != DRAINING]
