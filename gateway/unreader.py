"""Feeds gunicorn's parser from a connection. Apart, because mypyc cannot compile gunicorn's subclasses."""

from __future__ import annotations

import time
from typing import Protocol

from gunicorn.http.unreader import Unreader


class Source(Protocol):
    """What a connection offers: more bytes (b"" at the end), and when it gives up waiting for them."""

    deadline: float

    def read_some(self) -> bytes: ...


class SourceUnreader(Unreader):
    """gunicorn's source of bytes.

    Attributes:
        pause_s: longest wait for the next bytes; None while the deadline is another's.
    """

    def __init__(self, source: Source, head: bytes) -> None:
        """Give `head` first, then what comes from `source`."""
        super().__init__()
        self.pause_s: float | None = None
        self._source = source
        self.buf.write(head)

    def chunk(self, size_hint: int | None = None) -> bytes:
        """Wait for bytes."""
        if self.pause_s is not None:
            self._source.deadline = time.monotonic() + self.pause_s
        return self._source.read_some()
