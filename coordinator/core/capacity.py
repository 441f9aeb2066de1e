"""Learns how many requests an engine runs at a time; what is under way beyond that is queued in it.

No engine says it in its metrics. Rules:
    - It is at least what was seen running: the high-water mark.
    - Until the engine has queued anything the mark only says how little there was to do, so that it counts
      for no less than what the operator assumes.
    - An engine that queues in two looks in a row is full: now the mark counts, also below the assumption. In
      one look alone a request may just have arrived.
    - A full engine that runs less than the mark (long contexts fill its cache) pulls the mark down, with a
      half-life of 60 s. Nothing else does: an idle night teaches nothing.
    - What the operator says of the endpoint is never undercut.

Sources: plan §7.2.1; reference notes on admission (capacity as the high-water mark of observed running).
"""

from __future__ import annotations

from typing import Final

_HALF_LIFE_S: Final = 60.0


class BatchCapacity:
    """What is known of one endpoint.

    Attributes:
        mark: requests seen running at a time; 0: none yet.
        is_proven: the engine has been seen full.
    """

    __slots__ = ("_assumed", "_configured", "_full_before", "_looked_at", "is_proven", "mark")

    def __init__(self, *, configured: int | None, assumed: int) -> None:
        """Begin knowing nothing.

        Args:
            configured: `endpoints[].batch_capacity`.
            assumed: `router.admission.assumed_batch_capacity`.
        """
        self._configured = configured
        self._assumed = assumed
        self.mark = 0.0
        self.is_proven = False
        self._full_before = 0.0  # what ran at the last look if the engine was full, else 0
        self._looked_at = 0.0

    def __repr__(self) -> str:
        return f"BatchCapacity(mark={self.mark:g}, is_proven={self.is_proven})"

    @property
    def value(self) -> float:
        """The requests to reckon with; more than 0."""
        if self._configured is not None:
            return max(self.mark, float(self._configured))
        return self.mark if self.is_proven else max(self.mark, float(self._assumed))

    def observe(self, *, running: float, waiting: float, now: float) -> float:
        """Take one look at the engine's own figures, and return `value`.

        Args:
            running: requests in its batch.
            waiting: requests in its queue.
            now: monotonic seconds.
        """
        if running > self.mark:
            self.mark = running
        # Nothing running and some waiting: it is loading or stuck, and says nothing about its batch.
        full_at = running if waiting > 0 else 0.0
        if full_at and self._full_before:
            self.is_proven = True
            most = max(full_at, self._full_before)
            if most < self.mark:
                kept = 0.5 ** ((now - self._looked_at) / _HALF_LIFE_S)
                self.mark = most + (self.mark - most) * kept
        self._full_before = full_at
        self._looked_at = now
        return self.value

    def forget(self) -> None:
        """Begin anew: another process answers at the endpoint."""
        self.mark = 0.0
        self.is_proven = False
        self._full_before = 0.0
