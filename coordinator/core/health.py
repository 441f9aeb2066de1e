"""The health of an endpoint: a table of transitions, and the count that bounds silence.

Rules:
    - What an engine says about itself is believed at once: a refused connection, a bad `/health`, a model
      that is not served take the endpoint out with one look. Only silence has to be repeated.
    - Metrics that cannot be read never take an endpoint out. It is stale: usable, judged by in-flight counts.
    - An endpoint comes back when it is healthy *and* serves its model; an open port is not enough.
    - An endpoint nobody has looked at yet is usable, so that a gateway serves from its first second.

Source: plan §7.6 (scrape rules).
"""

from __future__ import annotations

from enum import Enum

# Looks in a row without an answer after which an endpoint is taken out.
SILENT_LOOKS = 3


class Health(Enum):
    """State of an endpoint."""

    UNKNOWN = "unknown"  # no look has told anything yet; usable
    READY = "ready"
    STALE = "stale"  # serves, but its metrics are not to be had; usable
    DOWN = "down"  # refuses, is unhealthy, does not serve the model, or is silent; not usable


class Sign(Enum):
    """What one look says, all in all."""

    GOOD = "healthy, serves the model, metrics read"
    BLIND = "healthy, serves the model, metrics not to be had"
    SILENT = "no answer that tells anything"
    GONE = "nobody listens"
    UNFIT = "answers that it cannot serve"


TRANSITIONS: dict[Health, dict[Sign, Health]] = {
    Health.UNKNOWN: {
        Sign.GOOD: Health.READY,
        Sign.BLIND: Health.STALE,
        Sign.SILENT: Health.UNKNOWN,
        Sign.GONE: Health.DOWN,
        Sign.UNFIT: Health.DOWN,
    },
    Health.READY: {
        Sign.GOOD: Health.READY,
        Sign.BLIND: Health.STALE,
        Sign.SILENT: Health.STALE,
        Sign.GONE: Health.DOWN,
        Sign.UNFIT: Health.DOWN,
    },
    Health.STALE: {
        Sign.GOOD: Health.READY,
        Sign.BLIND: Health.STALE,
        Sign.SILENT: Health.STALE,
        Sign.GONE: Health.DOWN,
        Sign.UNFIT: Health.DOWN,
    },
    Health.DOWN: {
        Sign.GOOD: Health.READY,
        Sign.BLIND: Health.STALE,
        Sign.SILENT: Health.DOWN,
        Sign.GONE: Health.DOWN,
        Sign.UNFIT: Health.DOWN,
    },
}


class HealthTracker:
    """The state of one endpoint.

    Attributes:
        state: the present one.
        since: monotonic seconds at which it began.
        silent_looks: looks in a row that told nothing.
    """

    __slots__ = ("silent_looks", "since", "state")

    def __init__(self, now: float, state: Health = Health.UNKNOWN) -> None:
        """Begin in `state`: what an earlier coordinator knew, else UNKNOWN."""
        self.state = state
        self.since = now
        self.silent_looks = 0

    def __repr__(self) -> str:
        return f"HealthTracker({self.state.value}, since={self.since:.3f}, silent_looks={self.silent_looks})"

    def take(self, sign: Sign, now: float) -> Health:
        """Follow one look; return the state before it.

        Args:
            now: monotonic seconds.
        """
        before = self.state
        self.silent_looks = self.silent_looks + 1 if sign is Sign.SILENT else 0
        after = Health.DOWN if self.silent_looks >= SILENT_LOOKS else TRANSITIONS[before][sign]
        if after is not before:
            self.state = after
            self.since = now
        return before
