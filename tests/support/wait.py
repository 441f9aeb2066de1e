"""Wait for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    timeout: float = 10.0,
    message: str | Callable[[], str] = "the condition",
    *,
    interval: float = 0.01,
) -> T:
    """Call `condition` until it returns something true, and return that.

    Args:
        condition: cheap and free of effects; an exception of its own ends the wait.
        timeout: seconds; generous, since it is only spent by a failing test.
        message: what was waited for, or a function that tells what was seen last.
        interval: seconds between two calls.

    Raises:
        AssertionError: the time was over.
    """
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            text = message() if callable(message) else message
            raise AssertionError(f"waited {timeout:g} s for: {text}; last seen: {result!r}")
        time.sleep(interval)
