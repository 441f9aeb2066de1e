"""Sockets of the simulated engine: one epoll loop, connections that never block.

One system call per event is the price that cannot be avoided (half a microsecond of Python, six of kernel);
everything here is about not adding to it: no task, no timer and no buffer per event, and no write interest as
long as the kernel takes what is sent.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import traceback
from collections.abc import Callable
from typing import Protocol

from agent.sim.http import BadRequestError, Request, RequestReader

_READ = select.EPOLLIN | select.EPOLLRDHUP
_RECEIVE_BYTES = 256 * 1024
_RESET = struct.pack("ii", 1, 0)  # linger of 0 s: close() sends RST
_RETRY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Handler(Protocol):
    """Who answers requests."""

    def on_accept(self, connection: Connection) -> None:
        """A client has come."""

    def on_request(self, connection: Connection, request: Request) -> None:
        """Answer at once, or set `connection.reply` and answer later."""

    def on_bad_request(self, connection: Connection, error: BadRequestError) -> None:
        """Say no; the connection will be closed."""

    def on_closed(self, connection: Connection) -> None:
        """The connection is gone."""


class Reply(Protocol):
    """An answer that takes time."""

    def on_disconnect(self) -> None:
        """Stop: nobody is there to hear it."""


class Connection:
    """One client's connection.

    Attributes:
        reply: the answer under way; set by the handler, taken back by `finish`.
        requests: how many came on it.
        idle_since: monotonic seconds of its last answer's end.
        is_control: came in by the control listener.
        is_bytewise: send every byte by itself.
    """

    __slots__ = (
        "_closes_when_sent", "_handler", "_has_continued", "_outbox", "_poller", "_reader", "_send",
        "_socket", "_tls", "fd", "idle_since", "is_bytewise", "is_closed", "is_control", "reply", "requests",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, poller: Poller, handler: Handler, now: float, *, is_control: bool
    ) -> None:
        self._socket = sock
        self._send = sock.send
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._poller = poller
        self._handler = handler
        self._reader = RequestReader()
        self._outbox = bytearray()
        self._closes_when_sent = False
        self._has_continued = False
        self.fd = sock.fileno()
        self.reply: Reply | None = None
        self.requests = 0
        self.idle_since = now
        self.is_control = is_control
        self.is_bytewise = False
        self.is_closed = False
        poller.add(self.fd, self.on_event, _READ)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request of which nothing has come."""
        return self.reply is None and not self._outbox and self._reader.is_between_requests

    def on_event(self, mask: int) -> None:
        """React to epoll."""
        if mask & select.EPOLLOUT:
            self._flush()
        if mask & ~select.EPOLLOUT and not self.is_closed:
            self._receive()

    def write(self, data: bytes) -> None:
        """Send `data`, now as far as the kernel takes it."""
        if self.is_bytewise:
            self._write_bytewise(data)
            return
        if self._outbox:
            self._outbox += data
            return
        try:
            sent = self._send(data)
        except _RETRY:
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._keep(data[sent:])

    def finish(self, now: float, *, is_keep_alive: bool) -> None:
        """End the current answer; go on to the next request, or close once everything is sent."""
        self.reply = None
        self.is_bytewise = False
        self.idle_since = now
        if not is_keep_alive:
            self.close_when_sent()

    def close_when_sent(self) -> None:
        """Close as soon as the outbox is empty."""
        if self._outbox:
            self._closes_when_sent = True
        else:
            self.close()

    def close(self, *, reset: bool = False) -> None:
        """Close now; with `reset`, as a crashed engine's kernel would."""
        if self.is_closed:
            return
        self.is_closed = True
        self._poller.remove(self.fd)
        reply, self.reply = self.reply, None
        if reply is not None:
            reply.on_disconnect()
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()
        self._handler.on_closed(self)

    def process(self) -> None:
        """Hand complete requests to the handler, one at a time."""
        # The handler may answer at once, and the client may have sent the next request already.
        while self.reply is None and not self.is_closed and not self._closes_when_sent:
            try:
                request = self._reader.next()
            except BadRequestError as error:
                self._handler.on_bad_request(self, error)
                self.close_when_sent()
                return
            if request is None:
                if self._reader.wants_continue and not self._has_continued:
                    self._has_continued = True
                    self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            self._has_continued = False
            self.requests += 1
            self._handler.on_request(self, request)

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except _RETRY:
                return
            except OSError:
                self.close()
                return
            if not data:
                # Engines take a half-closed connection for a client that left (uvicorn does).
                self.close()
                return
            self._reader.feed(data)
            if self.reply is None:
                self.process()
            # TLS may hold more that epoll does not know of.
            if self.is_closed or not self._tls:
                return

    def _flush(self) -> None:
        try:
            sent = self._send(self._outbox)
        except _RETRY:
            return
        except OSError:
            self.close()
            return
        del self._outbox[:sent]
        if not self._outbox:
            self._poller.change(self.fd, _READ)
            if self._closes_when_sent:
                self.close()

    def _keep(self, data: bytes) -> None:
        self._outbox += data
        self._poller.change(self.fd, _READ | select.EPOLLOUT)

    def _write_bytewise(self, data: bytes) -> None:
        self.is_bytewise = False
        for at in range(len(data)):
            if self.is_closed:
                return
            self.write(data[at : at + 1])
        self.is_bytewise = True


class Poller:
    """An epoll with a function per descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._functions: dict[int, Callable[[int], None]] = {}

    def add(self, fd: int, function: Callable[[int], None], mask: int = select.EPOLLIN) -> None:
        """Call `function(mask)` when `fd` is ready."""
        self._functions[fd] = function
        self._epoll.register(fd, mask)

    def change(self, fd: int, mask: int) -> None:
        """Wait for something else."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """Forget `fd`, which is still open."""
        del self._functions[fd]
        self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` and call what is ready.

        Short waits are exact to some 50 us: epoll itself knows whole milliseconds, so select waits for it.
        """
        if 0 < timeout_s < 0.05:
            select.select((self._epoll,), (), (), timeout_s)
            timeout_s = 0
        for fd, mask in self._epoll.poll(timeout_s, 256):
            # One function may have removed the descriptor of another.
            function = self._functions.get(fd)
            if function is None:
                continue
            try:
                function(mask)
            except Exception:  # the boundary: a fault of ours ends one connection, loudly
                traceback.print_exc()
                owner = getattr(function, "__self__", None)
                if isinstance(owner, Connection):
                    owner.close(reset=True)


class Listener:
    """A listening port that can refuse connections and take them again under the same number.

    Args:
        host: address; with a colon for IPv6.
        port: 0 for any.
        tls: makes it a TLS port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        poller: Poller,
        accept: Callable[[socket.socket], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host = host
        self._poller = poller
        self._accept = accept
        self._tls = tls
        # Bound but never listening: it keeps the port ours while connections are refused.
        self._reservation = self._bind(port)
        self.port: int = self._reservation.getsockname()[1]
        self._socket: socket.socket | None = None
        self.open()

    def open(self) -> None:
        """Take connections."""
        if self._socket is not None:
            return
        self._socket = self._bind(self.port)
        self._socket.listen(4096)
        self._poller.add(self._socket.fileno(), self._on_event)

    def refuse(self) -> None:
        """Refuse connections; those that wait to be accepted are reset."""
        if self._socket is None:
            return
        self._poller.remove(self._socket.fileno())
        self._socket.close()
        self._socket = None

    def _bind(self, port: int) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((self._host, port))
        sock.setblocking(False)
        return sock

    def _on_event(self, mask: int) -> None:
        while self._socket is not None:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # none left, or one that is gone already
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                try:
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except OSError:
                    sock.close()
                    continue
            self._accept(sock)
