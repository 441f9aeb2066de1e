"""Segments for tests, and processes that hold slots in them."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shm.layout import Sizes
from shm.segment import Segment


@contextmanager
def made_segment(directory: Path, sizes: Sizes | None = None) -> Iterator[Segment]:
    """Make a segment in a folder of the test's, and unmap it at the end."""
    segment = Segment.create(directory, sizes or Sizes())
    try:
        yield segment
    finally:
        segment.close()


class Forked:
    """A forked process that runs one function and ends.

    Attributes:
        pid: its process id.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        """Fork. The child never returns into the test: it ends with 0, or 1 and a traceback."""
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def report(write_fd: int) -> None:
    """Tell the test that the child is ready."""
    os.write(write_fd, b".")


def await_report(read_fd: int) -> None:
    """Wait until a child is ready."""
    if os.read(read_fd, 1) != b".":
        raise AssertionError("the child ended before it was ready")
