"""One try at one endpoint: connect, send the request, read the head of the response.

The greenlet waits here for the engine, and at the same time for the client's leaving
and for the deadlines; whichever comes first ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.channel import CLIENT_GONE, TIMEOUT, UPSTREAM, WRITABLE
from gateway.connection import FOREVER, ClientClosed, ClientConnection
from gateway.core import errors
from gateway.core.framing import (
    BodyFraming,
    ChunkedDecoder,
    ChunkError,
    FramingKind,
    ResponseHead,
    parse_response_head,
)
from gateway.turns import breathe
from gateway.upstream import Upstream, UpstreamPool

SEND_STEP_BYTES = 256 * 1024
"""So much of a body is sent before others run."""
MAX_HEAD_BYTES = 128 * 1024
JOIN_MAX_BYTES = 64 * 1024
"""A body up to this size goes out in one call with its head; a larger one is not copied for that."""


class _StaleConnection(Exception):
    """The engine had closed a kept connection before this request reached it."""


class AttemptDeadlines(NamedTuple):
    """When a try gives up.

    Attributes:
        connect_s: seconds for opening a connection, 0 for no limit.
        headers_s: seconds from the sent request to the response head.
        total: monotonic seconds at which the whole request is over.
        ping_s: seconds of silence after which `on_silence` is called, `FOREVER` for never.
    """

    connect_s: float
    headers_s: float
    total: float
    ping_s: float = FOREVER


class Attempt:
    """A try under way, and then its response.

    Attributes:
        upstream: the connection that carried it, once there is one.
        head: the response's head.
        rest: bytes read behind the head.
        sent_at: monotonic seconds at which the request was out.
    """

    __slots__ = (
        "_connection",
        "_deadlines",
        "_has_answered",
        "_has_pinged",
        "_is_sent",
        "_on_silence",
        "_pool",
        "_received",
        "head",
        "rest",
        "sent_at",
        "upstream",
    )

    upstream: Upstream
    head: ResponseHead

    def __init__(
        self,
        connection: ClientConnection,
        pool: UpstreamPool,
        deadlines: AttemptDeadlines,
        on_silence: Callable[[], None],
    ) -> None:
        self.rest = b""
        self.sent_at = 0.0
        self._connection = connection
        self._pool = pool
        self._deadlines = deadlines
        self._on_silence = on_silence
        self._received = b""  # of the response, while the head is not whole
        self._has_answered = False  # a byte of the response has come
        self._is_sent = False  # the engine has been sent all of the request
        self._has_pinged = False  # the client has got bytes: no second try

    def run(self, head: bytes, body: bytes) -> None:
        """Send the request and read the response head.

        A kept connection that turns out to be closed is replaced by a new one, once: the
        engine cannot have seen the request (TECH section 11). Not after a ping, which is a
        byte that reached the client, and a sign that the engine had the request for long.

        Raises:
            errors.UpstreamUnreachable: no connection, or it broke before a byte came.
            errors.UpstreamTimeout: no head in time.
            errors.UpstreamProtocol: what came is not an HTTP response.
            errors.ShuttingDown: the worker's drain time-out is over.
            ClientClosed: the client left.
        """
        upstream = self._pool.checkout()
        if upstream is not None:
            try:
                self._exchange(upstream, head, body)
            except _StaleConnection as exc:
                if self._has_pinged:
                    raise errors.UpstreamUnreachable() from exc
            else:
                return
        upstream = self._pool.connect(self._deadlines.connect_s)
        try:
            self._exchange(upstream, head, body)
        except _StaleConnection as exc:
            raise errors.UpstreamUnreachable() from exc

    def _exchange(self, upstream: Upstream, head: bytes, body: bytes) -> None:
        self.upstream = upstream
        self._received = b""
        self._has_answered = self._is_sent = False
        is_whole = False
        try:
            self._send(upstream, head, body)
            self._read_head(upstream)
            is_whole = True
        finally:
            if not is_whole:
                upstream.close()

    def _send(self, upstream: Upstream, head: bytes, body: bytes) -> None:
        connection = self._connection
        if connection.gone:
            raise ClientClosed
        parts: tuple[bytes, ...] = (head + body,) if len(body) <= JOIN_MAX_BYTES else (head, body)
        channel = upstream.channel
        self.sent_at = time.monotonic()
        for part in parts:
            view: bytes | memoryview = part
            while len(view):
                try:
                    sent = channel.send_some(
                        memoryview(view)[:SEND_STEP_BYTES] if len(view) > SEND_STEP_BYTES else view
                    )
                except OSError:
                    # An engine may refuse a large body before it has read it, and then close: its answer is
                    # still there to be read. If there is none, reading says so.
                    return
                if sent == len(view):
                    break
                view = memoryview(view)[sent:]
                if sent == SEND_STEP_BYTES:
                    # An engine that reads quickly would take a large body in one call; others have to run.
                    breathe()
                    if connection.gone:
                        raise ClientClosed
                    continue
                channel.start_writing(self._on_room)
                channel.start_reading(self._on_readable)
                try:
                    self._park(self.sent_at + self._deadlines.headers_s)
                finally:
                    channel.stop_writing()
                    channel.stop_reading()
                if self._is_answered_early():
                    return
        self._is_sent = True

    def _is_answered_early(self) -> bool:
        """Tell whether the engine answered, or left, before it got the whole body; no use in sending on."""
        try:
            data = self.upstream.channel.recv_or_none()
        except OSError:
            return True
        if data is None:
            return False
        if not data:
            return True
        self._has_answered = True
        self._received += data
        return self._parse_head() is not None

    def _parse_head(self) -> ResponseHead | None:
        """Take the final head out of what has been received; None while it is not whole.

        Raises:
            errors.UpstreamProtocol: this is no HTTP response.
        """
        while self._received:
            head = parse_response_head(self._received)
            if head is None or head.status >= 200:
                return head
            # 100 Continue, 103 Early Hints: the response follows.
            self._received = self._received[head.consumed :]
        return None

    def _on_room(self) -> None:
        self._connection.parker.wake(WRITABLE)

    def _on_readable(self) -> None:
        self._connection.parker.wake(UPSTREAM)

    def next_bytes(self, deadline: float) -> bytes:
        """Wait for bytes of the response; b"" at its end.

        Raises:
            OSError: the connection broke.
            errors.UpstreamTimeout, errors.ShuttingDown, ClientClosed: see `run`.
        """
        channel = self.upstream.channel
        channel.start_reading(self._on_readable)
        try:
            while True:
                self._park(deadline)
                data = channel.recv_or_none()
                if data is not None:
                    return data
        finally:
            if not channel.closed:
                channel.stop_reading()

    def _park(self, deadline: float) -> None:
        """Wait for the engine; `deadline` is in monotonic seconds."""
        connection = self._connection
        deadline = min(deadline, self._deadlines.total)
        ping_s = self._deadlines.ping_s
        ping_at = time.monotonic() + ping_s if ping_s != FOREVER else FOREVER
        while True:
            connection.deadline = min(deadline, ping_at)
            bits = connection.parker.park()
            if bits & CLIENT_GONE or connection.gone:
                raise ClientClosed
            if bits & (UPSTREAM | WRITABLE):
                connection.deadline = FOREVER
                return
            if bits & TIMEOUT:
                if connection.shutdown:
                    raise errors.ShuttingDown()
                now = time.monotonic()
                if now >= deadline:
                    raise errors.UpstreamTimeout()
                if now >= ping_at:
                    self._has_pinged = True
                    self._on_silence()
                    ping_at = now + ping_s

    def _read_head(self, upstream: Upstream) -> None:
        deadline = self.sent_at + self._deadlines.headers_s
        while True:
            head = self._parse_head()
            if head is not None:
                self.head = head
                self.rest = self._received[head.consumed :]
                self._received = b""
                return
            if len(self._received) > MAX_HEAD_BYTES:
                raise errors.UpstreamProtocol()
            try:
                more = self.next_bytes(deadline)
            except OSError as exc:
                raise self._lost(upstream) from exc
            if not more:
                raise self._lost(upstream)
            self._has_answered = True
            self._received += more

    def _lost(self, upstream: Upstream) -> Exception:
        """Say what it means that the connection ended before the response head did."""
        if self._has_answered:
            return errors.UpstreamProtocol()
        return _StaleConnection() if upstream.reused else errors.UpstreamUnreachable()

    def read_all(self, limit: int, idle_s: float) -> bytes:
        """Read the whole body, decoded of its framing; the connection goes back to its pool when it can.

        Args:
            limit: most bytes to accept.
            idle_s: longest pause between two pieces.

        Raises:
            errors.UpstreamInterrupted: the body broke off, or is longer than `limit`.
            errors.UpstreamTimeout, errors.ShuttingDown, ClientClosed: see `run`.
        """
        framing = self.head.framing
        is_whole = False
        try:
            body = self._read_framed(framing, limit, idle_s)
            is_whole = True
        except (OSError, ChunkError) as exc:
            raise errors.UpstreamInterrupted() from exc
        finally:
            if not is_whole:
                self.upstream.close()
        self.release()
        return body

    def _read_framed(self, framing: BodyFraming, limit: int, idle_s: float) -> bytes:
        parts: list[bytes] = []
        total = 0
        data = self.rest
        decoder = ChunkedDecoder() if framing.kind is FramingKind.CHUNKED else None
        while True:
            payload = data if decoder is None or not data else decoder.feed(data)
            total += len(payload)
            parts.append(payload)
            if total > limit:
                raise errors.UpstreamInterrupted()
            if decoder is not None and decoder.done:
                if decoder.leftover:
                    self.upstream.close()
                break
            if framing.kind is FramingKind.NONE or (
                framing.kind is FramingKind.LENGTH and total >= framing.length
            ):
                if total > framing.length:
                    self.upstream.close()
                    return b"".join(parts)[: framing.length]
                break
            data = self.next_bytes(time.monotonic() + idle_s)
            if not data:
                if framing.kind is not FramingKind.CLOSE:
                    raise errors.UpstreamInterrupted()
                self.upstream.close()
                break
        return b"".join(parts)

    def release(self) -> None:
        """The response has been read to its end: keep the connection if the engine does."""
        if self.head.keep_alive and self._is_sent and not self.upstream.channel.closed:
            self.upstream.give_back()
        else:
            self.upstream.close()
