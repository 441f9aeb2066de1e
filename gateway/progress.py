"""Which requests of this worker are under way, and how long each has been silent; for the watchdog.

A request is entered when it is dispatched. Nothing happens at a byte: the relay knows when its last one came,
and the worker's sweep asks it a few times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.relay import Relay
from shm.progress import ProgressRow

TURN_S = 0.25


class Watched:
    """One request at one endpoint.

    Attributes:
        sent_at: monotonic seconds of its dispatch.
        relay: what carries its answer, once there is one.
    """

    __slots__ = ("endpoint_slot", "relay", "sent_at")

    def __init__(self, endpoint_slot: int, sent_at: float) -> None:
        self.endpoint_slot = endpoint_slot
        self.sent_at = sent_at
        self.relay: Relay | None = None


class ProgressTracker:
    """The requests under way of one worker."""

    def __init__(self, row: ProgressRow, is_wanted: Callable[[], bool]) -> None:
        """Track for a watchdog.

        Args:
            is_wanted: whether there is one at all; asked at each sweep.
        """
        self._row = row
        self._is_wanted = is_wanted
        self._under_way: set[Watched] = set()
        self._moved: dict[int, float] = {}
        self._silent: dict[int, float] = {}  # as it stands in the cells
        self._due_at = 0.0

    def begin(self, endpoint_slot: int) -> Watched:
        """A request is on its way to an endpoint."""
        watched = Watched(endpoint_slot, time.monotonic())
        self._under_way.add(watched)
        return watched

    def end(self, watched: Watched, *, has_answer: bool) -> None:
        """It is over.

        Args:
            has_answer: the endpoint has said something.
        """
        self._under_way.discard(watched)
        if watched.relay is not None:
            self._note_move(watched.endpoint_slot, watched.relay.last_at)
        elif has_answer:
            self._note_move(watched.endpoint_slot, time.monotonic())

    def sweep(self, now: float) -> None:
        """Write down how things are; a hook of the worker's sweep."""
        if now < self._due_at:
            return
        self._due_at = now + TURN_S
        silent: dict[int, float] = {}
        if self._is_wanted():
            for watched in self._under_way:
                slot, relay = watched.endpoint_slot, watched.relay
                if relay is None:
                    since = watched.sent_at
                else:
                    since = relay.silent_since(now)
                    self._note_move(slot, relay.last_at)
                silent[slot] = min(since, silent.get(slot, since))
        for slot in self._silent.keys() - silent.keys():
            self._row.set_silent(slot, 0.0)
        for slot, since in silent.items():
            self._row.set_silent(slot, since)
        for slot, at in self._moved.items():
            self._row.set_moved(slot, at)
        self._moved.clear()
        self._silent = silent

    def _note_move(self, slot: int, at: float) -> None:
        if at > self._moved.get(slot, 0.0):
            self._moved[slot] = at
