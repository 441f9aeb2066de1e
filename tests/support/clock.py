"""A clock that moves only when a test says so."""

from __future__ import annotations


class FakeClock:
    """Stand in for `time.monotonic`: call it for the time, `advance` it by hand.

    Args:
        start: monotonic seconds; not 0 by default, so that code which takes 0 for "never" shows itself.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move the clock on by `seconds` (never back) and return the new time."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back (by {seconds} s)")
        self.now += seconds
        return self.now
