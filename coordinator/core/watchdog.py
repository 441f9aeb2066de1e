"""Finds engines that are stuck: an endpoint with a request that has made no progress for too long.

Progress of a request is a byte of its response; until the first one its time runs from when it was sent. An
endpoint that is stuck leaves the candidates, and nothing new can show that it works again. So:

Rules:
    - One request that is silent for more than `stuck_after_s` is enough, whatever the others do: a wedged
      engine often finishes what it had.
    - It is over when no request is silent for that long and one has made progress since the flag was set.
    - It is also over when nothing has been under way for `stuck_after_s`: the next request is the probe. That
      those who were stuck have given up proves nothing by itself.
    - It is over at once when the engine was restarted, or when the operator switches the watchdog off.

Source: SPEC section 2 (watchdog); the admission controller chapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec


class Finding(Enum):
    """What a look at an endpoint shows."""

    OVERDUE = "overdue"
    """A request is silent for too long."""
    MOVING = "moving"
    """None is, and one has made progress since the flag was set."""
    QUIET = "quiet"
    """None is, but none has made progress since."""
    REST = "rest"
    """Nothing has been under way for long."""
    RENEWED = "renewed"
    """The engine was restarted, or nobody watches it."""


class Flag(Enum):
    """Whether an endpoint counts as stuck."""

    CLEAR = "clear"
    STUCK = "stuck"


TRANSITIONS: Final[Mapping[Flag, Mapping[Finding, Flag]]] = {
    Flag.CLEAR: {
        Finding.OVERDUE: Flag.STUCK,
        Finding.MOVING: Flag.CLEAR,
        Finding.QUIET: Flag.CLEAR,
        Finding.REST: Flag.CLEAR,
        Finding.RENEWED: Flag.CLEAR,
    },
    Flag.STUCK: {
        Finding.OVERDUE: Flag.STUCK,
        Finding.MOVING: Flag.CLEAR,
        Finding.QUIET: Flag.STUCK,
        Finding.REST: Flag.CLEAR,
        Finding.RENEWED: Flag.CLEAR,
    },
}


class Progress(msgspec.Struct, frozen=True):
    """What is under way at an endpoint, all workers together; monotonic seconds.

    Attributes:
        silent_since: last progress of the request that has been silent longest; None: nothing is under way.
        moved_at: last progress of any request, one that has ended included; 0: none yet.
        stuck_after_s: how long a request may be silent; 0: for ever.
        is_renewed: the engine was restarted since the last look.
    """

    silent_since: float | None
    moved_at: float
    stuck_after_s: float
    is_renewed: bool = False


class Change(msgspec.Struct, frozen=True):
    """A flag that was set or taken back; worth a log line, once.

    Attributes:
        endpoint: which, by its slot.
        flag: what it is now.
        finding: why.
        silent_s: how long the request that decided had been silent; 0 where none had.
    """

    endpoint: int
    flag: Flag
    finding: Finding
    silent_s: float


class Watchdog:
    """Watches all endpoints of a host.

    Attributes:
        stuck: slot of each endpoint that is stuck -> since when, in monotonic seconds.
    """

    __slots__ = ("_busy_at", "stuck")

    def __init__(self) -> None:
        self.stuck: dict[int, float] = {}
        # Slot of a stuck endpoint -> when something was last seen under way.
        self._busy_at: dict[int, float] = {}

    def look(self, endpoints: Mapping[int, Progress], now: float) -> list[Change]:
        """Judge every endpoint; what is not named any more is forgotten.

        Args:
            endpoints: slot -> what is under way.
            now: monotonic seconds.
        """
        for gone in self.stuck.keys() - endpoints.keys():
            self._clear(gone)
        changes = []
        for endpoint, progress in endpoints.items():
            before = Flag.STUCK if endpoint in self.stuck else Flag.CLEAR
            finding = self._find(endpoint, progress, now)
            after = TRANSITIONS[before][finding]
            if after is before:
                continue
            if after is Flag.STUCK:
                self.stuck[endpoint] = self._busy_at[endpoint] = now
            else:
                self._clear(endpoint)
            silent_s = 0.0 if progress.silent_since is None else max(now - progress.silent_since, 0.0)
            changes.append(Change(endpoint, after, finding, silent_s))
        return changes

    def _find(self, endpoint: int, progress: Progress, now: float) -> Finding:
        limit_s, since = progress.stuck_after_s, progress.silent_since
        if progress.is_renewed or limit_s <= 0:
            return Finding.RENEWED
        if since is not None and endpoint in self._busy_at:
            self._busy_at[endpoint] = now
        if since is not None and now - since > limit_s:
            return Finding.OVERDUE
        if progress.moved_at > self.stuck.get(endpoint, math.inf):
            return Finding.MOVING
        if now - self._busy_at.get(endpoint, now) >= limit_s:
            return Finding.REST
        return Finding.QUIET

    def _clear(self, endpoint: int) -> None:
        del self.stuck[endpoint], self._busy_at[endpoint]
