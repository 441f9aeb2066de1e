"""Leaves out endpoints that are down, stuck or resting after an error."""

from __future__ import annotations

from gateway.core.schedule.pipeline import DOWN, STUCK, Fleet, Request


class Health:
    """Keeps what is not known to be down or stuck, and whose cooldown is over.

    An endpoint that was never scraped, or whose scrapes fail, stays: the coordinator may be away, and a try
    tells more. Marks end by time, so nothing has to clear them.
    """

    name = "health"
    needs = frozenset(("state", "cooldown_until"))

    def keep(self, request: Request, fleet: Fleet, candidates: list[int]) -> list[int]:
        """Keep the healthy ones."""
        state, until, now = fleet.state, fleet.cooldown_until, fleet.now
        if max(state, default=0.0) < DOWN and max(until, default=0.0) <= now:
            return candidates
        return [i for i in candidates if state[i] not in (DOWN, STUCK) and until[i] <= now]
