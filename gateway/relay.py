"""Carries a response body from the engine to the client, in hub callbacks.

While it runs, the request's greenlet sleeps: each piece that arrives is checked,
counted and sent on in the callback of the engine's read watcher (SPIKE section 1:
this is what makes a streamed event cheap). A client that reads too slowly stops the
engine's watcher until it has caught up; the memory of a stream is bounded by one
read. Deadlines come from the worker's sweep.

Framing. An SSE event leaves when its last byte has come. When a read consists of
whole chunks that hold whole events, it is sent on as it is, framing included;
otherwise the events are put into chunks of their own. Any other body goes on as it
comes. A body that the engine does not finish is not finished here either.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import NamedTuple

from gateway.channel import NO_ROOM_TO_WRITE, NOTHING_TO_READ, UPSTREAM
from gateway.connection import FOREVER, ClientConnection
from gateway.core import errors
from gateway.core.framing import (
    BodyFraming,
    ChunkedDecoder,
    ChunkError,
    FramingKind,
    encode_chunk,
    whole_chunks,
)
from gateway.core.sse import EventTooLarge, SseRelay
from gateway.core.usage import UsageTap
from gateway.upstream import Upstream

LAST_CHUNK = b"0\r\n\r\n"
READ_BYTES = 65536


class RelayEnd(Enum):
    """Why a relay ended."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKE = "upstream_interrupted"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    EVENT_TOO_LARGE = "event_too_large"
    SHUTTING_DOWN = "shutting_down"
    FAILED = "internal_error"


class RelayDeadlines(NamedTuple):
    """When a relay gives up; monotonic seconds for `first_byte` and `total`, else seconds.

    Attributes:
        first_byte: until when the first piece of the body must have come.
        total: until when the body must be whole.
        idle_s: longest pause between two pieces.
        write_s: longest pause in which the client takes nothing.
        ping_s: silence after which `ping` is sent; `FOREVER` for never.
    """

    first_byte: float
    total: float
    idle_s: float
    write_s: float
    ping_s: float = FOREVER


class Relay:
    """One response body under way.

    Attributes:
        end: set once; None while it runs.
        first_at: monotonic seconds at which the first piece (of SSE: the first data event) went out; 0: none.
        failure: the exception behind `RelayEnd.FAILED`.
        client_http11: the client understands chunks.
    """

    __slots__ = (
        "_backlog",
        "_client",
        "_connection",
        "_deadlines",
        "_decoder",
        "_ends_with_done",
        "_engine",
        "_finish_with",
        "_head",
        "_is_aligned",
        "_last_at",
        "_missing",
        "_on_data",
        "_ping",
        "_pinged_at",
        "_recv",
        "_send",
        "_sse",
        "_stalled_at",
        "_tap",
        "_upstream",
        "client_http11",
        "end",
        "failure",
        "first_at",
    )

    def __init__(
        self,
        connection: ClientConnection,
        upstream: Upstream,
        framing: BodyFraming,
        head: bytes,
        deadlines: RelayDeadlines,
        *,
        client_http11: bool,
        sse: SseRelay | None = None,
        tap: UsageTap | None = None,
        ping: bytes = b"",
        ends_with_done: bool = False,
    ) -> None:
        """Prepare to relay.

        Args:
            connection: of the client; its request has been read.
            upstream: the engine's connection, read up to the end of the response head.
            framing: how the engine delimits the body.
            head: the response head for the client, sent with the first piece; b"" if it has been sent.
            deadlines: see there.
            client_http11: whether the client's side is chunked where no length is known.
            sse: for an event stream: what happens to its events.
            tap: for other bodies: reads the usage on the way.
            ping: bytes that show life on a silent event stream.
            ends_with_done: an event stream is whole only with `[DONE]`, or an error event, at its end. Asked
                where its framing does not tell.
        """
        self.end: RelayEnd | None = None
        self.first_at = 0.0
        self.failure: Exception | None = None
        self.client_http11 = client_http11
        self._connection = connection
        self._client = connection.channel
        self._upstream = upstream
        self._engine = upstream.channel
        self._recv = upstream.channel.sock.recv
        self._send = connection.channel.sock.send
        self._head = head
        self._deadlines = deadlines
        self._sse = sse
        self._tap = tap
        self._ping = ping
        self._ends_with_done = ends_with_done
        self._backlog: list[bytes | memoryview] = []
        self._stalled_at = 0.0
        self._finish_with: RelayEnd | None = None
        self._last_at = self._pinged_at = monotonic()
        self._decoder: ChunkedDecoder | None = None
        self._is_aligned = client_http11  # between chunks, so that whole ones may pass as they are
        self._missing = 0
        self._on_data: Callable[[bytes], None]
        if framing.kind is FramingKind.CHUNKED:
            self._decoder = ChunkedDecoder()
            self._on_data = self._chunked_events if sse is not None else self._chunked_bytes
        elif framing.kind is FramingKind.LENGTH:
            self._missing = framing.length
            self._on_data = self._counted
        else:
            self._on_data = self._until_close

    @property
    def last_at(self) -> float:
        """When the last piece came from the engine; monotonic seconds."""
        return self._last_at

    def silent_since(self, now: float) -> float:
        """Return since when the engine has been silent: not at all while the client holds it up."""
        return now if self._backlog or self._finish_with is not None else self._last_at

    def run(self, rest: bytes, *, is_empty: bool = False) -> RelayEnd:
        """Relay to the end; blocks the greenlet.

        Args:
            rest: what has been read behind the response head.
            is_empty: the response has no body.
        """
        connection = self._connection
        connection.on_deadline = self._on_deadline
        connection.watch(self._on_client_gone)
        if is_empty:
            self._push(b"")
            self._finish(RelayEnd.COMPLETE)
        elif rest:
            self._take(rest)
        if self._head and self.end is None:
            self._push(b"")
        try:
            if self._is_running():
                self._schedule(self._last_at)
                if not self._backlog and self._finish_with is None:
                    self._engine.start_reading(self._on_engine_readable)
                while self._is_running():
                    connection.parker.park()
        finally:
            connection.unwatch()
            connection.on_deadline = connection.wake_by_deadline
            connection.deadline = FOREVER
            self._client.stop_writing()
            self._engine.stop_reading()
        assert self.end is not None
        return self.end

    def _is_running(self) -> bool:
        # Asked, not read, around a park: mypyc would take an attribute that was None for None ever after.
        return self.end is None

    # The engine's side. These run in the hub; no switch.

    def _on_engine_readable(self) -> None:
        # The socket's own methods, not the channel's: this runs for every event.
        try:
            data = self._recv(READ_BYTES)
        except NOTHING_TO_READ:
            return
        except OSError:
            self._break_off(RelayEnd.UPSTREAM_BROKE)
            return
        if data:
            self._last_at = monotonic()
            self._take(data)
        else:
            self._end_of_file()

    def _take(self, data: bytes) -> None:
        try:
            self._on_data(data)
        except ChunkError:
            self._break_off(RelayEnd.UPSTREAM_BROKE)
        except EventTooLarge:
            self._break_off(RelayEnd.EVENT_TOO_LARGE)
        except Exception as exc:  # the top of this callback: a fault here must end the request, not hang it
            self.failure = exc
            self._break_off(RelayEnd.FAILED)

    def _chunked_events(self, data: bytes) -> None:
        sse = self._sse
        assert sse is not None
        if self._is_aligned:
            payload = whole_chunks(data)
            if payload is not None:
                events = sse.feed(payload)
                if events is payload:
                    self._push(data)
                elif events:
                    self._push_event_bytes(events)
                return
        decoder = self._decoder
        assert decoder is not None
        events = sse.feed(decoder.feed(data))
        self._is_aligned = self.client_http11 and decoder.is_between_chunks
        if decoder.done:
            events += sse.finish()
        if events:
            self._push_event_bytes(events)
        if decoder.done:
            self._finish_body(bool(decoder.leftover))

    def _push_event_bytes(self, events: bytes) -> None:
        self._push(b"".join(encode_chunk(events)) if self.client_http11 else events)

    def _chunked_bytes(self, data: bytes) -> None:
        decoder = self._decoder
        assert decoder is not None
        payload = decoder.feed(data)
        if self._tap is not None:
            self._tap.feed(payload)
        if not self.client_http11:
            self._push(payload)
        elif payload:
            self._push(b"".join(encode_chunk(payload)))
        if decoder.done:
            self._finish_body(bool(decoder.leftover))

    def _counted(self, data: bytes) -> None:
        extra = len(data) - self._missing
        if extra > 0:
            data = data[: self._missing]
        self._missing -= len(data)
        done = self._missing == 0
        if self._sse is not None:
            events = self._sse.feed(data)
            if done:
                events += self._sse.finish()
            if events:
                self._push_event_bytes(events)
        else:
            if self._tap is not None:
                self._tap.feed(data)
            self._push(data)
        if done:
            self._finish_body(extra > 0)

    def _until_close(self, data: bytes) -> None:
        if self._sse is not None:
            data = self._sse.feed(data)
        elif self._tap is not None:
            self._tap.feed(data)
        if data:
            self._push_event_bytes(data)

    def _end_of_file(self) -> None:
        if self._decoder is not None or self._missing:
            self._break_off(RelayEnd.UPSTREAM_BROKE)
            return
        # A body without a length ends with the connection, and nothing tells a whole one from one cut short,
        # but that an event stream has to end between two events, and some with `[DONE]`.
        sse = self._sse
        if sse is not None and (
            sse.has_partial or (self._ends_with_done and not sse.saw_done and not sse.saw_error)
        ):
            self._break_off(RelayEnd.UPSTREAM_BROKE)
            return
        self._finish_body(has_stray_bytes=True)

    def _finish_body(self, has_stray_bytes: bool) -> None:
        """The body is whole: end the client's side of it too."""
        if has_stray_bytes:
            # Bytes behind the response, or its end by close: this connection has no next response.
            self._upstream.close()
        if self.client_http11 and (
            self._sse is not None or self._decoder is not None or not self._is_counted()
        ):
            self._push(LAST_CHUNK)
        self._finish(RelayEnd.COMPLETE)

    def _is_counted(self) -> bool:
        return self._on_data == self._counted

    # The client's side.

    def _push(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
            self._head = b""
        self._connection.bytes_out += len(data)
        if self._backlog:
            self._backlog.append(data)
            return
        try:
            sent = self._send(data)
        except NO_ROOM_TO_WRITE:
            sent = 0
        except OSError:
            self._on_client_gone()
            return
        if not self.first_at and (self._sse is None or self._sse.first_data):
            self.first_at = self._last_at
        if sent != len(data):
            now = self._stalled_at = monotonic()
            self._backlog.append(memoryview(data)[sent:])
            self._engine.stop_reading()
            self._client.start_writing(self._on_client_writable)
            self._schedule(now)

    def _on_client_writable(self) -> None:
        backlog = self._backlog
        now = monotonic()
        try:
            while backlog:
                sent = self._client.send_some(backlog[0])
                if sent:
                    self._stalled_at = now
                if sent < len(backlog[0]):
                    backlog[0] = memoryview(backlog[0])[sent:]
                    return
                backlog.pop(0)
        except OSError:
            self._on_client_gone()
            return
        self._client.stop_writing()
        self._stalled_at = 0.0
        if self._finish_with is not None:
            self._set_end(self._finish_with)
        else:
            self._last_at = now
            self._engine.start_reading(self._on_engine_readable)
            self._schedule(now)

    def _on_client_gone(self) -> None:
        self._connection.gone = True
        self._backlog.clear()
        self._set_end(RelayEnd.CLIENT_GONE)

    # The end.

    def _break_off(self, end: RelayEnd) -> None:
        """End a body that did not become whole, so that nobody takes it for whole."""
        self._upstream.close()
        if self._sse is not None:
            self._sse.discard()
            self._push_event_bytes(errors.sse_event(_broken(end)))
            if self.client_http11:
                # The error event is the sign; without the last chunk some clients drop it unread.
                self._push(LAST_CHUNK)
        elif self._head:
            self._push(b"")
        self._finish(end)

    def _finish(self, end: RelayEnd) -> None:
        if self._backlog:
            self._finish_with = end
            self._engine.stop_reading()
        else:
            self._set_end(end)

    def _set_end(self, end: RelayEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        self._engine.stop_reading()
        self._connection.parker.wake(UPSTREAM)

    # Time.

    def _schedule(self, now: float) -> None:
        """Tell the sweep when to look at this relay again: at the earliest time that anything may be due."""
        deadlines = self._deadlines
        if self._stalled_at:
            due = self._stalled_at + deadlines.write_s
            self._connection.deadline = due if self._finish_with is not None else min(due, deadlines.total)
            return
        # Before the first byte the idle time does not count, but the first byte does not come here to say so:
        # the sweep has to look again within that time.
        due = (
            self._last_at + deadlines.idle_s
            if self.first_at
            else min(deadlines.first_byte, now + deadlines.idle_s)
        )
        if self._ping:
            due = min(due, max(self._last_at, self._pinged_at) + deadlines.ping_s)
        self._connection.deadline = min(due, deadlines.total)

    def _on_deadline(self, now: float) -> None:
        deadlines = self._deadlines
        if self._stalled_at and now >= self._stalled_at + deadlines.write_s:
            self._on_client_gone()
        elif self._finish_with is not None:
            pass  # all has been said, and the client is still reading it
        elif self._connection.shutdown:
            self._break_off(RelayEnd.SHUTTING_DOWN)
        elif now >= deadlines.total:
            self._break_off(RelayEnd.UPSTREAM_TIMEOUT)
        elif not self._stalled_at:
            limit = self._last_at + deadlines.idle_s if self.first_at else deadlines.first_byte
            if now >= limit:
                self._break_off(RelayEnd.UPSTREAM_TIMEOUT)
            elif self._ping and now >= max(self._last_at, self._pinged_at) + deadlines.ping_s:
                self._pinged_at = now
                self._push_event_bytes(self._ping)
        if self.end is None:
            self._schedule(now)


def _broken(end: RelayEnd) -> errors.ApiError:
    if end is RelayEnd.SHUTTING_DOWN:
        return errors.ShuttingDown()
    if end is RelayEnd.UPSTREAM_TIMEOUT:
        return errors.UpstreamTimeout()
    return errors.StreamBroken()
