"""Leaves out endpoints where this request has been tried."""

from __future__ import annotations

from gateway.core.schedule.pipeline import Fleet, Request


class Excluded:
    """Keeps what this request has not tried."""

    name = "excluded"
    needs: frozenset[str] = frozenset()

    def keep(self, request: Request, fleet: Fleet, candidates: list[int]) -> list[int]:
        """Keep the untried ones."""
        excluded = request.excluded
        if not excluded:
            return candidates
        slots = fleet.slots
        # A request has been to a few endpoints at most: searching those costs less than looking at each.
        tried = {slots.index(slot) for slot in excluded if slot in slots}
        return [i for i in candidates if i not in tried] if tried else candidates
