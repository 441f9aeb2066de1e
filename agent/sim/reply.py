"""Answers of the simulated engine that take time, and the faults that strike them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from agent.sim.connection import Connection
from agent.sim.engine import Engine, Work
from agent.sim.faults import Fault, FaultKind
from agent.sim.script import DONE, Script, Usage

_REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found", 405: b"Method Not Allowed",
    413: b"Payload Too Large", 429: b"Too Many Requests", 500: b"Internal Server Error", 502: b"Bad Gateway",
    503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip
_ERROR_EVENT = (
    b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError",'
    b'"param":null,"code":500}}\n\n'
)


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """What the head of an answer needs to know.

    Attributes:
        request_id: for `x-request-id`.
        is_keep_alive: whether the connection goes on afterwards.
    """

    request_id: bytes
    is_keep_alive: bool


def head(status: int, envelope: Envelope, fields: bytes) -> bytes:
    """Return a response's head.

    Args:
        fields: more header lines, each with its CR LF.
    """
    return b"HTTP/1.1 %d %b\r\ndate: %b\r\nserver: llmgw-sim\r\n%bx-request-id: %b\r\n%b\r\n" % (
        status,
        _REASONS.get(status, b"Unknown"),
        _date(),
        fields,
        envelope.request_id,
        b"" if envelope.is_keep_alive else b"connection: close\r\n",
    )


_date_cache: list[tuple[int, bytes]] = [(0, b"")]


def _date() -> bytes:
    now = int(time.time())
    second, text = _date_cache[0]
    if second != now:
        text = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now)).encode()
        _date_cache[0] = (now, text)
    return text


def respond(
    connection: Connection,
    status: int,
    envelope: Envelope,
    body: bytes,
    content_type: bytes = b"application/json",
    fields: bytes = b"",
) -> None:
    """Send a whole answer and end it."""
    kind = b"content-type: %b\r\n" % content_type if content_type else b""
    fields = b"content-length: %d\r\n%b%b" % (len(body), kind, fields)
    connection.write(head(status, envelope, fields) + body)
    connection.finish(time.monotonic(), is_keep_alive=envelope.is_keep_alive)


class HungReply:
    """An answer that never comes."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone

    def on_disconnect(self) -> None:
        """Count the client that gave up."""
        self._on_gone()


class WorkReply:
    """The answer to a request whose works the engine has; the base of the others.

    Args:
        works: set before they are submitted.
    """

    def __init__(self, connection: Connection, engine: Engine, envelope: Envelope) -> None:
        self.connection = connection
        self.engine = engine
        self.envelope = envelope
        # Emptied when the answer ends: reply, work and sink would be a cycle, left to the collector.
        self.works: Sequence[Work] = ()
        self._ended = 0

    def on_disconnect(self) -> None:
        """Give slots and blocks back at once."""
        now = time.monotonic()
        for work in self.works:
            self.engine.abort(work, now)
        self.works = ()

    def _is_last(self, work: Work) -> bool:
        """Note a step; whether it is the last (several works may end in one step, and are told in turn)."""
        self._ended += work.is_over
        return self._ended == len(self.works)

    def usage(self) -> Usage:
        """Return the tokens so far."""
        engine = self.engine
        return Usage(
            sum(work.prompt.tokens for work in self.works),
            sum(work.produced * work.sequences for work in self.works if work.generates),
            sum(work.cached_tokens(engine.block_size) for work in self.works),
        )


class BatchReply(WorkReply):
    """A whole answer computed from works that generate nothing: embeddings, scores."""

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        envelope: Envelope,
        body: Callable[[Usage], bytes],
    ) -> None:
        super().__init__(connection, engine, envelope)
        self._body = body

    def on_step(self, work: Work) -> None:
        """Answer once the last work is over."""
        if self._is_last(work):
            usage = self.usage()
            self.works = ()
            respond(self.connection, 200, self.envelope, self._body(usage))
            self.connection.process()


class GenerationReply(WorkReply):
    """A completion, streamed or whole.

    Args:
        faults: of this request, by kind; only those of a reply matter here.
        sends_head_first: send the head when the request was accepted, not with the first token.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        envelope: Envelope,
        script: Script,
        faults: dict[FaultKind, Fault],
        *,
        sends_head_first: bool,
    ) -> None:
        super().__init__(connection, engine, envelope)
        self._script = script
        self._faults = faults
        self._is_headless = True
        self._events = 0
        self._is_stream = script.generation.is_stream
        self._is_chunked = FaultKind.EARLY_CLOSE not in faults
        if FaultKind.EARLY_CLOSE in faults:
            self.envelope = Envelope(envelope.request_id, is_keep_alive=False)
        self._is_plain = self._is_stream and not faults and script.is_plain
        if self._is_stream and sends_head_first:
            self._send_head()

    def part_sink(self, part: int) -> GenerationReply | _Part:
        """Return the sink for the works of a prompt."""
        return self if part == 0 else _Part(self, part)

    def on_step(self, work: Work) -> None:
        """Send the events of the first prompt's step."""
        produced = work.produced
        if self._is_plain and 1 < produced < work.steps and self.connection.reply is self:
            # The short way of nearly every token.
            self.connection.write(self._script.middle_chunk(produced))
        else:
            self.on_part_step(0, work)

    def on_part_step(self, part: int, work: Work) -> None:
        """Send the events of a step; the end, once all works are over."""
        if self.connection.reply is not self:
            return  # another prompt's event, a moment ago, found that the client has left
        if not self._is_stream:
            if self._is_last(work):
                self._send_whole()
            return
        running = self.usage() if self._script.generation.with_running_usage else None
        events = self._script.events(part, work.produced, running)
        if self._is_headless:
            self._send_head()
        is_last = self._is_last(work)
        huge = self._faults.get(FaultKind.HUGE_EVENT)
        if huge is not None and work.produced == 1:
            events.append(self._script.text_event(b"x" * int(huge.number())))
        if is_last:
            usage = self.usage() if self._script.generation.with_usage else None
            events += self._script.ending(usage)
        self._send_events(events, is_last=is_last)

    def _send_head(self) -> None:
        self._is_headless = False
        fields = b"content-type: text/event-stream; charset=utf-8\r\n"
        if FaultKind.BOTH_FRAMINGS in self._faults:
            fields += b"content-length: 100\r\n"
        if self._is_chunked:
            fields += b"transfer-encoding: chunked\r\n"
        self.connection.is_bytewise = FaultKind.BYTE_BY_BYTE in self._faults
        self.connection.write(head(200, self.envelope, fields))

    def _send_events(self, events: list[bytes], *, is_last: bool) -> None:
        """Send events in one write, up to where a fault strikes."""
        faults = self._faults
        if not faults:
            data = b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])
            self._write(data, is_last=is_last)
            return
        out: list[bytes] = []
        for event in events:
            if FaultKind.NO_DONE in faults and event == DONE:
                continue
            if FaultKind.CRLF in faults:
                event = event.replace(b"\n", b"\r\n")
            if self._strikes(out, event):
                return
            out.append(self._framed(event))
            self._events += 1
        self._write(b"".join(out), is_last=is_last)

    def _strikes(self, out: list[bytes], event: bytes) -> bool:
        """Let a fault end the stream before `event`, if it is time."""
        faults = self._faults
        for kind in (
            FaultKind.HANG_STREAM,
            FaultKind.DROP_STREAM,
            FaultKind.ERROR_EVENT,
            FaultKind.BAD_CHUNK,
        ):
            fault = faults.get(kind)
            if fault is None or self._events < fault.number():
                continue
            sent = b"".join(out)
            match kind:
                case FaultKind.HANG_STREAM:
                    self.connection.write(sent)
                    for work in self.works:
                        self.engine.hold(work)
                case FaultKind.ERROR_EVENT:
                    self._abort_works()
                    self._write(sent + self._framed(_ERROR_EVENT) + self._framed(DONE), is_last=True)
                case FaultKind.DROP_STREAM:
                    framed = self._framed(event)
                    self._abort_works()
                    self.connection.write(sent + framed[: len(framed) // 2])
                    self._end("rst" in fault.parts())
                case _:
                    self._abort_works()
                    self.connection.write(sent + b"zz\r\n%b\r\n" % event)
                    self._end()
            return True
        return False

    def _abort_works(self) -> None:
        """End the works; the connection's end will be ours, not the client's."""
        self.on_disconnect()
        self.connection.reply = None

    def _end(self, reset: bool = False) -> None:
        if reset:
            self.connection.close(reset=True)
        else:
            self.connection.close_when_sent()

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    def _write(self, data: bytes, *, is_last: bool) -> None:
        if is_last:
            self.works = ()
            self.connection.write(data + b"0\r\n\r\n" if self._is_chunked else data)
            self.connection.finish(time.monotonic(), is_keep_alive=self.envelope.is_keep_alive)
            self.connection.process()
        else:
            self.connection.write(data)

    def _send_whole(self) -> None:
        body = self._script.whole(self.usage())
        self.works = ()
        faults, connection = self._faults, self.connection
        if not faults:
            respond(connection, 200, self.envelope, body)
            connection.process()
            return
        fields = b"content-type: application/json\r\n"
        if FaultKind.BOTH_FRAMINGS in faults:
            fields += b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % len(body)
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        elif FaultKind.BAD_CHUNK in faults:
            fields += b"transfer-encoding: chunked\r\n"
            body = b"zz\r\n%b\r\n0\r\n\r\n" % body
        elif FaultKind.EARLY_CLOSE not in faults:
            fields += b"content-length: %d\r\n" % len(body)
        connection.is_bytewise = FaultKind.BYTE_BY_BYTE in faults
        is_cut = faults.keys() & {FaultKind.DROP_STREAM, FaultKind.HANG_STREAM}
        connection.write(head(200, self.envelope, fields) + (body[: len(body) // 2] if is_cut else body))
        if FaultKind.HANG_STREAM in faults:
            return
        if FaultKind.DROP_STREAM in faults or FaultKind.BAD_CHUNK in faults:
            connection.reply = None
            self._end(FaultKind.DROP_STREAM in faults and "rst" in faults[FaultKind.DROP_STREAM].parts())
            return
        connection.finish(time.monotonic(), is_keep_alive=self.envelope.is_keep_alive)
        connection.process()


class _Part:
    """Sink for the works of a prompt that is not the first."""

    def __init__(self, reply: GenerationReply, part: int) -> None:
        self._reply = reply
        self._part = part

    def on_step(self, work: Work) -> None:
        """Pass it on with its number."""
        self._reply.on_part_step(self._part, work)
