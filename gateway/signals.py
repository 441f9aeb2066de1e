"""Signals as a queue: handlers do nothing but queue a number, the main loop does the work.

The interpreter's wake-up descriptor writes each signal's number into a pipe; reading the pipe is the queue.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable


class SignalQueue:
    """Signals this process got, in order. One per process, made and used in the main thread."""

    __slots__ = ("_old_fd", "_old_handlers", "_read_fd", "_write_fd")

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        """Queue these signals from now on, instead of what they did."""
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # SIG_IGN would keep the number from the pipe, a handler that does nothing lets it through.
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def wait(self, timeout_s: float) -> list[int]:
        """Return what is queued, waiting up to `timeout_s` seconds for the first."""
        ready, _, _ = select.select([self._read_fd], [], [], max(timeout_s, 0.0))
        return list(os.read(self._read_fd, 4096)) if ready else []

    def close(self) -> None:
        """Put everything back as it was."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
