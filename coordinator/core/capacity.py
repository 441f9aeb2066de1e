"""How many requests an engine runs at a time, and how much of its KV cache one uses; no metric says it.

Rules:
    - It is the most that the engine has been seen to run.
    - While the engine has never had a queue it can run more, nobody knows how much: half as many again, at
      least eight. So an engine of 256 is known after ten looks instead of hundreds, and one that is smaller
      than it was thought has a few requests too many once, until the next look.
    - A request uses as much KV cache as the mean one of the most expensive look of late: half of it after ten
      minutes without such. Too much costs a band a moment, too little fills the engine.
    - An engine that has been started anew is another one.

Source: plan §7.2.1 (the high-water mark).
"""

from __future__ import annotations

from typing import Final

_UNSEEN_SHARE: Final = 0.5
_UNSEEN_AT_LEAST: Final = 8
_KV_HALF_LIFE_S: Final = 600.0


class LearnedCapacity:
    """What is known of one engine.

    Attributes:
        batch: requests that it is taken to run at a time; 0: not known.
        kv_per_request: ratio of its KV cache; 0: not known.
    """

    __slots__ = ("_has_queued", "_most", "_seen_at", "batch", "kv_per_request")

    def __init__(self, batch: int = 0, kv_per_request: float = 0.0) -> None:
        """Begin with what an earlier coordinator published."""
        self.batch = self._most = batch
        # It may have been more than what was seen: it is not stretched a second time.
        self._has_queued = batch > 0
        self.kv_per_request = kv_per_request
        self._seen_at = 0.0

    def forget(self) -> None:
        """Begin anew, with a new engine."""
        self.batch = self._most = 0
        self._has_queued = False
        self.kv_per_request = 0.0

    def see(self, *, running: float, waiting: float, kv: float | None, now: float) -> None:
        """Take one look, at monotonic second `now`; `kv` is a ratio, None where the engine does not say."""
        self._most = max(self._most, int(running))
        if waiting > 0:
            self._has_queued = True
        self.batch = self._most
        if self._most and not self._has_queued:
            self.batch += max(_UNSEEN_AT_LEAST, int(self._most * _UNSEEN_SHARE))
        fade = 0.5 ** (max(now - self._seen_at, 0.0) / _KV_HALF_LIFE_S)
        self._seen_at = now
        each = kv / running if kv is not None and running > 0 else 0.0
        self.kv_per_request = max(self.kv_per_request * fade, each)
