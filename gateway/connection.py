"""The server side of one client connection: HTTP/1.1 requests in, bytes out.

Two parsers share the work. A head with nothing unusual in it is parsed by
`gunicorn_h1c` and used as it is. Whatever matters to request smuggling
(Transfer-Encoding, Expect, Upgrade, a header that comes twice, HTTP/1.0, a name
with an underscore, a target outside of printable ASCII) must please gunicorn's
own parser in Python as well, with every strictness it has. What the first one
refuses is refused; the second one then only says how.

The connection's greenlet reads; during a request a watcher looks for a client
that leaves. Deadlines are a field that the worker's sweep reads.
"""

from __future__ import annotations

import re
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
import gunicorn_h1c
from gevent import get_hub
from gunicorn.config import Config as GunicornConfig
from gunicorn.http import errors as gunicorn_errors
from gunicorn.http.message import Request as GunicornRequest
from gunicorn.http.unreader import IterUnreader

from conf.schema import ClientTimeouts
from gateway.channel import CLIENT_GONE, DRAIN, READABLE, TIMEOUT, WRITABLE, Channel, Parker
from gateway.core import errors
from gateway.turns import Turns, breathe
from gateway.unreader import SourceUnreader

FOREVER = float("inf")
LINGER_S = 5.0
"""How long an early refusal reads and discards what the client still sends."""
LAST_LINGER_S = 0.5
"""The same where the worker is about to end."""
DISCARD_MAX_BYTES = 256 * 1024
"""An unread body up to this size is read and dropped, so that the connection can go on."""
MAX_HEAD_BYTES = 128 * 1024

PAUSE_BYTES = 256 * 1024
"""So much of a body is read before others run."""
DECOMPRESS_STEP_BYTES = 1024 * 1024
"""What one step of decompression yields; others run between two steps."""

_TARGET_OK = re.compile(rb"/[\x21\x22\x24-\x7e]*\Z")  # without "#": a target has no fragment
_CAREFUL_HEADERS = frozenset(
    (b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer", b"http2-settings")
)
_TCP_LEFT = (7, 8)  # enum in linux/tcp.h: CLOSE, the peer has reset; CLOSE_WAIT, it has sent FIN


class ClientClosed(Exception):
    """The client closed, reset or left the connection; nobody is there to answer."""


@dataclass(slots=True)
class RequestHead:
    """The head of a request.

    `headers` keeps the order and spelling of the wire; `fields` maps lower-case
    names to values (of the careful path: joined by commas when repeated).
    """

    method: str
    target: bytes
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    fields: dict[bytes, bytes]
    http11: bool
    keep_alive: bool
    content_length: int
    expects_continue: bool = False
    gunicorn_request: GunicornRequest | None = field(default=None, repr=False)


class ClientConnection:
    """One accepted connection; owned by the greenlet that serves it.

    Attributes:
        parker: where the greenlet waits.
        turns: for work on large bodies.
        deadline: monotonic seconds at which the sweep calls `on_deadline`; `FOREVER` for none.
        on_deadline: what the sweep does; by default it wakes the greenlet with `TIMEOUT`.
        idle: between two requests; a draining worker closes such a connection.
        gone: the client has closed or reset its side.
        shutdown: the drain time-out of the worker is over; whoever runs the request ends it.
        close_after: the connection cannot carry another request.
        bytes_out: bytes of responses handed to the socket so far.
    """

    __slots__ = (
        "_buffer",
        "_gunicorn_config",
        "_max_body_bytes",
        "_on_gone",
        "_timeouts",
        "address",
        "bytes_out",
        "channel",
        "close_after",
        "deadline",
        "gone",
        "idle",
        "on_deadline",
        "parker",
        "requests",
        "shutdown",
        "turns",
    )

    def __init__(
        self,
        channel: Channel,
        address: tuple[Any, ...],
        timeouts: ClientTimeouts,
        max_body_bytes: int,
        gunicorn_config: GunicornConfig,
        turns: Turns,
    ) -> None:
        self.channel = channel
        self.address = address
        self.parker = Parker()
        self.turns = turns
        self.deadline = FOREVER
        self.on_deadline: Callable[[float], None] = self.wake_by_deadline
        self.idle = True
        self.gone = False
        self.shutdown = False
        self.close_after = False
        self.requests = 0
        self.bytes_out = 0
        self._buffer = b""
        self._timeouts = timeouts
        self._max_body_bytes = max_body_bytes
        self._gunicorn_config = gunicorn_config
        self._on_gone: Callable[[], None] | None = None

    # Reading.

    def read_some(self, *, expects_wait: bool = False) -> bytes:
        """Read what the client sends next; b"" at its end of file.

        Blocks the greenlet until bytes, the end or the deadline come.

        Args:
            expects_wait: let others run first, and save the read that finds nothing.

        Raises:
            errors.SlowBody: `deadline` passed.
            ClientClosed: the connection broke.
        """
        channel = self.channel
        while True:
            if not expects_wait:
                try:
                    data = channel.recv_or_none()
                except OSError as exc:
                    self.gone = True
                    raise ClientClosed from exc
                if data is not None:
                    return data
            expects_wait = False
            channel.start_reading(self._on_readable)
            bits = self.parker.park()
            if bits & TIMEOUT:
                raise errors.ShuttingDown() if self.shutdown else errors.SlowBody()
            if bits & DRAIN and self.idle and not bits & READABLE:
                raise ClientClosed

    def _on_readable(self) -> None:
        self.parker.wake(READABLE)

    def wake_by_deadline(self, now: float) -> None:
        self.deadline = FOREVER
        self.parker.wake(TIMEOUT)

    def read_head(self) -> RequestHead | None:
        """Wait for the next request and parse its head; None when the client is done.

        Raises:
            errors.ApiError: the head is malformed, too large or too slow; close after answering.
            ClientClosed: the connection broke, or the worker drains.
        """
        self.idle = not self._buffer
        data = self._buffer
        wait_s = self._timeouts.keepalive if self.requests and not data else self._timeouts.header
        self.deadline = time.monotonic() + wait_s
        self._buffer = b""
        if data:
            gevent.sleep(0)  # a client that sends request upon request must not keep the others waiting
        last_length = 0
        while True:
            if data:
                try:
                    parsed = gunicorn_h1c.parse_request(data, last_len=last_length)
                except gunicorn_h1c.IncompleteError:
                    last_length = len(data)
                    if last_length > MAX_HEAD_BYTES:
                        raise self._refusal(data, errors.HeadTooLarge()) from None
                except gunicorn_h1c.ParseError as exc:
                    raise self._refusal(data, errors.MalformedRequest(f"{_MALFORMED}{exc}.")) from exc
                else:
                    head = self._plain_head(parsed, data) or self._read_head_carefully(data)
                    break
            try:
                more = self.read_some(expects_wait=not data)
            except errors.SlowBody:
                if self.idle:
                    return None
                raise
            if not more:
                return None
            if self.idle:
                self.idle = False
                self.deadline = time.monotonic() + self._timeouts.header
            data = data + more if data else more
        self.deadline = FOREVER
        self.requests += 1
        return head

    def _plain_head(self, parsed: dict[str, Any], data: bytes) -> RequestHead | None:
        """Take a head as `gunicorn_h1c` parsed it, or None when it needs the careful parser."""
        if parsed["minor_version"] != 1:
            return None
        headers: list[tuple[bytes, bytes]] = parsed["headers"]
        fields = {name.lower(): value for name, value in headers}
        if len(fields) != len(headers) or not _CAREFUL_HEADERS.isdisjoint(fields):
            return None
        target: bytes = parsed["path"]
        if not _TARGET_OK.match(target) or b"_" in b"".join(fields):
            return None
        method: bytes = parsed["method"]
        if not data.startswith(b"%b %b H" % (method, target)):
            return None  # more than one space; or an empty line before
        length = fields.get(b"content-length")
        if length is None:
            content_length = 0
        elif length.isdigit() and len(length) < 19:
            content_length = int(length)
        else:
            return None
        connection = fields.get(b"connection")
        path, _, query = target.decode("ascii").partition("?")
        self._buffer = data[parsed["consumed"] :]
        return RequestHead(
            method=method.decode("ascii"),
            target=target,
            path=path,
            query=query,
            headers=headers,
            fields=fields,
            http11=True,
            keep_alive=connection is None or b"close" not in connection.lower(),
            content_length=content_length,
        )

    def _refusal(self, data: bytes, default: errors.ApiError) -> errors.ApiError:
        """Say what is wrong with a head that is refused, as well as gunicorn's parser can tell."""
        try:
            GunicornRequest(self._gunicorn_config, IterUnreader([data]), self.address, self.requests + 1)
        except gunicorn_errors.ParseException as exc:
            return _malformed(exc)
        except (gunicorn_errors.NoMoreData, StopIteration):
            pass
        if data.partition(b"\r\n\r\n")[0].count(b"\r\n") > self._gunicorn_config.limit_request_fields:
            return errors.HeadTooLarge()
        return default

    def _read_head_carefully(self, data: bytes) -> RequestHead:
        unreader = SourceUnreader(self, data)
        try:
            request = GunicornRequest(self._gunicorn_config, unreader, self.address, self.requests + 1)
        except (gunicorn_errors.NoMoreData, StopIteration) as exc:
            raise ClientClosed from exc
        except gunicorn_errors.ParseException as exc:
            raise _malformed(exc) from exc
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        fields: dict[bytes, bytes] = {}
        for name, value in headers:
            key = name.lower()
            fields[key] = fields[key] + b", " + value if key in fields else value
        coding = fields.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            # gunicorn lets others pass in front of `chunked`, and leaves the decoding to the application.
            raise errors.MalformedRequest("Only 'Transfer-Encoding: chunked' is supported.", status=501)
        if "#" in request.uri:
            raise errors.MalformedRequest(_MALFORMED + "a target has no fragment.")
        target, path = request.uri, request.path
        if not target.startswith("/"):
            # An absolute target: the engine gets the path, never the authority that the client wrote.
            target = f"{path}?{request.query}" if request.query else path
        tokens = {token.strip() for token in fields.get(b"connection", b"").lower().split(b",")}
        http11 = request.version >= (1, 1)
        content_length = int(fields.get(b"content-length", b"0")) if coding is None else -1
        return RequestHead(
            method=request.method,
            target=target.encode("ascii"),
            path=path,
            query=request.query,
            headers=headers,
            fields=fields,
            http11=http11,
            # HTTP/1.0 keeps a connection only when both sides say so; we never do.
            keep_alive=http11 and b"close" not in tokens and not request.should_close(),
            content_length=content_length,
            expects_continue=request._expected_100_continue,
            gunicorn_request=request,
        )

    def read_body(self, head: RequestHead) -> bytes:
        """Read the whole body, decoded of chunking and of `Content-Encoding: gzip`.

        Raises:
            errors.BodyTooLarge: more than `max_body_bytes`; nothing more was read.
            errors.SlowBody: no progress within the body time-out.
            errors.BadEncoding: a content encoding other than gzip or identity, or broken gzip.
            errors.MalformedRequest: broken chunking.
            ClientClosed: the client left before the body was whole.
        """
        if head.content_length > self._max_body_bytes:
            self.close_after = True
            raise errors.BodyTooLarge(self._max_body_bytes)
        if head.expects_continue:
            head.expects_continue = False
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.gunicorn_request is not None:
            body = self._read_body_carefully(head.gunicorn_request, head.content_length)
        else:
            body = self._read_exactly(head.content_length)
        head.content_length = 0
        encoding = head.fields.get(b"content-encoding")
        if encoding is not None:
            body = self._decompress(body, encoding)
        return body

    def _read_exactly(self, length: int) -> bytes:
        buffer = self._buffer
        if len(buffer) >= length:
            self._buffer = buffer[length:]
            return buffer[:length] if self._buffer else buffer
        parts = [buffer]
        missing = length - len(buffer)
        self._buffer = b""
        self.close_after = True  # a body that is not read to its end costs the connection
        pause_at = missing - PAUSE_BYTES
        while missing > 0:
            self.deadline = time.monotonic() + self._timeouts.body
            data = self.read_some()
            if not data:
                self.gone = True
                raise ClientClosed
            missing -= len(data)
            parts.append(data)
            if missing < pause_at:
                # A client that is faster than we are would never let us wait.
                pause_at = missing - PAUSE_BYTES
                breathe()
        self.close_after = False
        self.deadline = FOREVER
        body = self.turns.run(length, b"".join, parts)
        if missing < 0:
            self._buffer = body[length:]
            body = body[:length]
        return body

    def _read_body_carefully(self, request: GunicornRequest, content_length: int) -> bytes:
        if content_length == 0:
            # gunicorn reads a request without a length up to the end of file; by HTTP/1.1 it has no body.
            self._buffer = request.unreader.take_buffered()
            return b""
        parts: list[bytes] = []
        total = 0
        pause_at = PAUSE_BYTES
        # Until the body has been read to its end, nobody knows where the next request starts.
        self.close_after = True
        request.unreader.pause_s = self._timeouts.body
        while True:
            try:
                data = request.body.read(65536)
            except gunicorn_errors.NoMoreData as exc:
                self.gone = True
                raise ClientClosed from exc
            except gunicorn_errors.ParseException as exc:
                raise _malformed(exc) from exc
            if not data:
                break
            total += len(data)
            if total > self._max_body_bytes:
                raise errors.BodyTooLarge(self._max_body_bytes)
            parts.append(data)
            if total > pause_at:
                pause_at = total + PAUSE_BYTES
                breathe()
        if content_length > total:
            self.gone = True
            raise ClientClosed
        self.deadline = FOREVER
        self.close_after = False
        self._buffer = request.unreader.take_buffered()
        return self.turns.run(total, b"".join, parts)

    def _decompress(self, body: bytes, encoding: bytes) -> bytes:
        encoding = encoding.strip().lower()
        if encoding in (b"", b"identity"):
            return body
        if encoding not in (b"gzip", b"x-gzip"):
            raise errors.BadEncoding(encoding.decode("latin-1"))
        parts: list[bytes] = []
        total = 0
        while True:  # over the members: gzip files may be joined
            decoder = zlib.decompressobj(wbits=31)
            while not decoder.eof:
                try:
                    part = decoder.decompress(body, DECOMPRESS_STEP_BYTES)
                except zlib.error as exc:
                    raise errors.BadEncoding("gzip") from exc
                body = decoder.unconsumed_tail
                if not part and not body and not decoder.eof:
                    raise errors.BadEncoding("gzip")  # cut short
                total += len(part)
                if total > self._max_body_bytes:
                    raise errors.BodyTooLarge(self._max_body_bytes)
                parts.append(part)
                if body:
                    breathe()
            body = decoder.unused_data
            if not body:
                return self.turns.run(total, b"".join, parts)

    def discard_body(self, head: RequestHead) -> None:
        """Drop a body that nobody read: a small one is read, a large one costs the connection."""
        if self.close_after:
            return  # it was begun, and not read to its end
        if head.content_length == 0:
            if head.gunicorn_request is not None:
                self._buffer = head.gunicorn_request.unreader.take_buffered()
            return
        if head.expects_continue or not 0 < head.content_length <= DISCARD_MAX_BYTES:
            self.close_after = True
            return
        if head.gunicorn_request is not None:
            self._read_body_carefully(head.gunicorn_request, head.content_length)
        else:
            self._read_exactly(head.content_length)
        head.content_length = 0

    # The client's presence during a request.

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` in the hub as soon as the client closes its side.

        Bytes of a pipelined request end the watch (they stay in the socket); the
        sweep then asks the kernel instead (`has_left`).
        """
        self._on_gone = on_gone
        self.channel.start_reading(self._on_watched_readable)

    def unwatch(self) -> None:
        self._on_gone = None

    def _on_watched_readable(self) -> None:
        try:
            data = self.channel.sock.recv(1, socket.MSG_PEEK)  # type: ignore[call-arg]
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.channel.stop_reading()
            return
        self.channel.stop_reading()
        self._left()

    def check_presence(self) -> None:
        """For the sweep: notice a client that left behind a pipelined request."""
        if self._on_gone is None or self.channel.reading or self.gone:
            return
        info = self.channel.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)  # type: ignore[attr-defined]
        if info[0] in _TCP_LEFT:
            self._left()

    def _left(self) -> None:
        self.gone = True
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    # Writing.

    def send(self, data: bytes) -> None:
        """Write all of `data`, waiting for a slow reader up to the write time-out.

        Raises:
            ClientClosed: the client left or did not read in time.
        """
        channel = self.channel
        self.bytes_out += len(data)
        view: bytes | memoryview = data
        while True:
            try:
                sent = channel.send_some(view)
            except OSError as exc:
                self.gone = True
                raise ClientClosed from exc
            if sent == len(view):
                return
            view = memoryview(view)[sent:]
            if not sent:
                self._wait_writable()

    def _wait_writable(self) -> None:
        deadline = self.deadline
        self.deadline = time.monotonic() + self._timeouts.write
        self.channel.start_writing(self._on_writable)
        try:
            bits = self.parker.park()
        finally:
            self.channel.stop_writing()
            self.deadline = deadline
        if bits & (TIMEOUT | CLIENT_GONE) and not bits & WRITABLE:
            self.gone = True
            raise ClientClosed

    def _on_writable(self) -> None:
        self.parker.wake(WRITABLE)

    # The end.

    def close(self) -> None:
        self.deadline = FOREVER
        self._on_gone = None
        self.channel.close()

    def linger(self) -> None:
        """Close so that an answer sent before the request was read is not lost to a reset.

        Sends FIN, then reads and drops what comes for at most `LINGER_S`.
        """
        try:
            self.channel.sock.shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
            self.deadline = time.monotonic() + (LAST_LINGER_S if self.shutdown else LINGER_S)
            self.idle = False
            while self.read_some():
                if time.monotonic() > self.deadline:
                    break
        except (OSError, ClientClosed, errors.SlowBody):
            pass
        self.close()


_MALFORMED = "The HTTP request is malformed: "


def _malformed(exc: gunicorn_errors.ParseException) -> errors.ApiError:
    """Translate gunicorn's refusal of a request into ours, with the status gunicorn would send."""
    if isinstance(exc, gunicorn_errors.UnsupportedTransferCoding):
        return errors.MalformedRequest("Only 'Transfer-Encoding: chunked' is supported.", status=501)
    if isinstance(exc, gunicorn_errors.ExpectationFailed):
        return errors.MalformedRequest("Only 'Expect: 100-continue' is supported.", status=417)
    if isinstance(exc, gunicorn_errors.LimitRequestLine):
        return errors.MalformedRequest("The request line is too long.", status=414)
    if isinstance(exc, gunicorn_errors.LimitRequestHeaders):
        return errors.HeadTooLarge()
    return errors.MalformedRequest(_MALFORMED + _printable(str(exc)))


def _printable(text: str) -> str:
    """What a parser complains of comes from the client: at most a line of ASCII of it is shown."""
    return text.encode("ascii", "backslashreplace").decode()[:200]


class Sweep:
    """Looks at every connection of the worker each `interval_s` and runs passed deadlines.

    One libev timer for all: a deadline costs a field, not a timer.
    """

    def __init__(self, interval_s: float = 0.1) -> None:
        self.connections: set[ClientConnection] = set()
        self._timer = get_hub().loop.timer(interval_s, interval_s)
        self._ticks = 0
        self.hooks: list[Callable[[float], None]] = []

    def start(self) -> None:
        self._timer.start(self._tick)

    def stop(self) -> None:
        self._timer.stop()

    def _tick(self) -> None:
        now = time.monotonic()
        self._ticks += 1
        due = [c for c in self.connections if c.deadline <= now]
        for connection in due:
            connection.on_deadline(now)
        if self._ticks % 5 == 0:
            for connection in list(self.connections):
                if not connection.channel.reading:
                    connection.check_presence()
        for hook in self.hooks:
            hook(now)
