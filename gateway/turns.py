"""Keeps a worker's loop turning while large bodies are read, parsed and edited (case B99).

A body of 32 MiB costs some 50 to 150 ms of processor time in each step. One such step is bearable to the
streams of the same worker; ten in a row are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import gevent
from gevent.lock import BoundedSemaphore

LARGE_BYTES = 1024 * 1024
"""Work on more bytes than this takes turns; smaller work is done where it stands."""
_MOMENT_S = 1e-6

P = ParamSpec("P")
T = TypeVar("T")


def breathe() -> None:
    """Let the loop turn once, its sockets included.

    `sleep(0)` does not promise that: callbacks that lead to callbacks run up to 50 times before libev looks
    at a socket again. A timer is due only after it has.
    """
    gevent.sleep(_MOMENT_S)


class Turns:
    """Long work of a worker's greenlets, one piece at a time, with a turn of the loop before each."""

    def __init__(self) -> None:
        self._only_one = BoundedSemaphore(1)

    def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work` and return what it returns; waits for others first if `size` bytes are many."""
        if size <= LARGE_BYTES:
            return work(*args, **kwargs)
        with self._only_one:
            breathe()
            return work(*args, **kwargs)
