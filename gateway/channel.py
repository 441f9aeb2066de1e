"""Non-blocking byte channels and the one place where a request's greenlet waits.

A client connection has one greenlet. Whatever may end its wait (bytes from the
client, bytes from the engine, room to write, a deadline, a client that left)
arrives as a bit through its `Parker`, so there is no `gevent.Timeout` and no
extra greenlet per request (their cost: SPIKE section 4).

A `Channel` is a connected socket with its two libev watchers. It is used from
greenlets (`recv_or_none`, then park) and from hub callbacks (the relay) alike;
it never blocks and never switches by itself.
"""

from __future__ import annotations

import socket as _socket_module
import ssl
from collections.abc import Callable
from typing import Any, Protocol

import gevent
from gevent import get_hub, monkey

READABLE = 1
"""The channel that the greenlet reads has bytes or an end of file."""
WRITABLE = 2
"""The channel that the greenlet writes has room."""
UPSTREAM = 4
"""The engine's channel is readable, or the relay has finished."""
CLIENT_GONE = 8
"""The client closed or reset its side."""
TIMEOUT = 16
"""The deadline that the sweep watches has passed."""
DRAIN = 32
"""The worker drains: idle connections close."""
ADMITTED = 64
"""The coordinator has answered a waiting request."""

_PlainSocket: type[_socket_module.socket] = monkey.get_original("socket", "socket")

READ_EVENT, WRITE_EVENT = 1, 2  # libev's EV_READ and EV_WRITE

NOTHING_TO_READ = (BlockingIOError, ssl.SSLWantReadError)
NO_ROOM_TO_WRITE = (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError)
"""What a non-blocking socket raises instead of waiting."""


class Parker:
    """The single waiting point of one greenlet.

    `park` and `wake` share one word of pending bits: a wake-up that arrives
    while the greenlet runs is not lost. `wake` is called in the hub, or in the
    greenlet itself before it parks.
    """

    __slots__ = ("_greenlet", "_hub", "_parked", "_pending")

    def __init__(self) -> None:
        self._greenlet = gevent.getcurrent()
        self._hub = get_hub()
        self._parked = False
        self._pending = 0

    def park(self) -> int:
        """Wait for at least one bit and return all that have come."""
        if not self._pending:
            self._parked = True
            try:
                self._hub.switch()
            finally:
                self._parked = False
        bits, self._pending = self._pending, 0
        return bits

    def wake(self, bits: int) -> None:
        """Set `bits`; switch to the greenlet if it is parked. Called in the hub."""
        self._pending |= bits
        if self._parked:
            self._parked = False
            self._greenlet.switch()

    def post(self, bits: int) -> None:
        """Set `bits` from another greenlet: the hub wakes the parked one at its next turn."""
        self._pending |= bits
        if self._parked:
            self._hub.loop.run_callback(self._wake_posted)

    def _wake_posted(self) -> None:
        if self._parked and self._pending:
            self._parked = False
            self._greenlet.switch()

    def clear(self, bits: int) -> None:
        """Forget pending `bits` (a phase that cared about them is over)."""
        self._pending &= ~bits


class NonBlockingSocket(Protocol):
    """What a channel needs of a socket in non-blocking mode."""

    def fileno(self) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def send(self, data: Any, /) -> int: ...
    def close(self) -> None: ...


def plain_socket(fd: int) -> _socket_module.socket:
    """Adopt a connected descriptor as a plain (not gevent's) non-blocking socket."""
    sock = _PlainSocket(fileno=fd)
    sock.setblocking(False)
    return sock


def set_nodelay(sock: _socket_module.socket) -> None:
    """Send small writes at once; a no-op on sockets that are not TCP."""
    if sock.family in (_socket_module.AF_INET, _socket_module.AF_INET6):
        sock.setsockopt(_socket_module.IPPROTO_TCP, _socket_module.TCP_NODELAY, 1)


class Channel:
    """A connected socket with its watchers; never blocks.

    While `reading`, the callback given to `start_reading` is called in the hub. The
    watcher is level-triggered: whoever leaves bytes unread turns it off.
    """

    __slots__ = ("_read_watcher", "_write_watcher", "closed", "fd", "reading", "sock", "writing")

    def __init__(self, sock: NonBlockingSocket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.closed = False
        self.reading = False
        self.writing = False
        self._read_watcher = get_hub().loop.io(self.fd, READ_EVENT)
        self._write_watcher: Any = None

    def start_reading(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the hub whenever the socket is readable."""
        if self.reading:
            # Several times a request: an assignment, not a stop and a start.
            self._read_watcher.callback = callback
        else:
            self.reading = True
            self._read_watcher.start(callback)

    def stop_reading(self) -> None:
        if self.reading:
            self.reading = False
            self._read_watcher.stop()

    def start_writing(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the hub whenever the socket has room."""
        if self._write_watcher is None:
            self._write_watcher = get_hub().loop.io(self.fd, WRITE_EVENT)
        elif self.writing:
            self._write_watcher.stop()
        self.writing = True
        self._write_watcher.start(callback)

    def stop_writing(self) -> None:
        if self.writing:
            self.writing = False
            self._write_watcher.stop()

    def recv_or_none(self, size: int = 65536) -> bytes | None:
        """Read what is there: b"" at the end of file, None when there is nothing yet.

        Raises:
            OSError: the connection broke (reset, TLS failure).
        """
        try:
            return self.sock.recv(size)
        except NOTHING_TO_READ:
            return None

    def send_some(self, data: bytes | memoryview) -> int:
        """Write as much as the socket takes now; 0 when it takes nothing.

        Raises:
            OSError: the peer is gone.
        """
        try:
            return self.sock.send(data)
        except NO_ROOM_TO_WRITE:
            return 0

    def close(self) -> None:
        """Stop the watchers and close the socket; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self.reading = self.writing = False
        self._read_watcher.stop()
        self._read_watcher.close()
        if self._write_watcher is not None:
            self._write_watcher.stop()
            self._write_watcher.close()
        self.sock.close()
