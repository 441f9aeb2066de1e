"""HTTP/1.1 response framing without I/O: heads, how a body ends, chunks.

Rules:
    - A message whose end is in doubt is refused (`UpstreamProtocol`, `ChunkError`), never guessed: two
      parsers that disagree on where a response ends make one client see another one's answer.
    - Transfer-Encoding beats Content-Length; with both, the connection is not used again (RFC 9112 6.3).
    - Chunk extensions and trailers are read over within limits and dropped: they are hop-by-hop.

Source: RFC 9112 sections 4, 6 and 7.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final, NamedTuple

import gunicorn_h1c

from conf.errors import LlmgwError
from gateway.core.errors import UpstreamProtocol

CHUNK_LINE_MAX_BYTES: Final = 4096
"""Longest size line of a chunk, extensions included."""
TRAILERS_MAX_BYTES: Final = 16 * 1024
CHUNK_MAX_BYTES: Final = 2**40
LENGTH_MAX_DIGITS: Final = 18

Header = tuple[bytes, bytes]


class FramingKind(Enum):
    """How the end of a body is known."""

    NONE = auto()  # there is no body
    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()  # by the end of the connection


class BodyFraming(NamedTuple):
    """How a body is delimited; `length` is in bytes, 0 unless the kind is LENGTH."""

    kind: FramingKind
    length: int = 0


_NO_BODY: Final = BodyFraming(FramingKind.NONE)
_CHUNKED: Final = BodyFraming(FramingKind.CHUNKED)
_UNTIL_CLOSE: Final = BodyFraming(FramingKind.CLOSE)


class ResponseHead(NamedTuple):
    """The head of a response.

    Attributes:
        status: 100 to 999.
        reason: phrase of the status line; may be empty.
        headers: in the order and spelling of the wire, values stripped of white space around them.
        consumed: bytes of the head; the body starts there.
        framing: how the body ends.
        keep_alive: the connection can carry another request once the body has been read.
        content_type: value in lower case; b"" when there is none.
    """

    status: int
    reason: bytes
    headers: list[Header]
    consumed: int
    framing: BodyFraming
    keep_alive: bool
    content_type: bytes


def parse_response_head(data: bytes, *, method: str = "POST") -> ResponseHead | None:
    """Parse the head of a response.

    An interim response (status below 200) is a head of its own, with the framing NONE; the caller skips it
    and parses what follows. Whoever reads also limits how long a head may get.

    Args:
        data: everything read so far.
        method: of the request.

    Returns:
        None while the head is not whole.

    Raises:
        UpstreamProtocol: this is not, and will not become, a response with an unambiguous end.
    """
    try:
        parsed = gunicorn_h1c.parse_response(data)
    except gunicorn_h1c.IncompleteError:
        if not b"HTTP/1.".startswith(data[:7]):
            raise UpstreamProtocol() from None
        return None
    except gunicorn_h1c.ParseError as exc:
        raise UpstreamProtocol() from exc
    status: int = parsed["status"]
    if status < 100 or status == 101:  # nobody asked for another protocol
        raise UpstreamProtocol()
    headers: list[Header] = parsed["headers"]
    http11 = parsed["minor_version"] != 0
    length = coding = connection = None
    content_type = b""
    for name, value in headers:
        # Only lengths that matter are lowered; the loop runs over every header of every response.
        size = len(name)
        if size == 14:
            if name.lower() == b"content-length":
                length = value if length is None else _same_length(length, value)
        elif size == 12:
            if name.lower() == b"content-type":
                content_type = value.lower()
        elif size == 17:
            if name.lower() == b"transfer-encoding":
                coding = value if coding is None else coding + b"," + value
        elif size == 10:
            if name.lower() == b"connection":
                connection = value if connection is None else connection + b"," + value
        elif size == 0:  # a continuation line, obsolete since 2014
            raise UpstreamProtocol()
    tokens = _tokens(connection) if connection is not None else ()
    keep_alive = b"close" not in tokens if http11 else b"keep-alive" in tokens
    if status < 200 or status == 204 or status == 304 or method == "HEAD":
        framing = _NO_BODY
        if status < 200 and (coding is not None or length is not None):
            raise UpstreamProtocol()
    elif coding is not None:
        if coding.strip().lower() != b"chunked" or not http11:
            raise UpstreamProtocol()
        framing = _CHUNKED
        keep_alive = keep_alive and length is None
    elif length is not None:
        framing = BodyFraming(FramingKind.LENGTH, _length(length))
        if framing.length == 0:
            framing = _NO_BODY
    else:
        framing = _UNTIL_CLOSE
        keep_alive = False
    return ResponseHead(
        status, parsed["message"], headers, parsed["consumed"], framing, keep_alive, content_type
    )


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]


def _same_length(first: bytes, second: bytes) -> bytes:
    """Accept a repeated Content-Length only if it says the same (RFC 9110 8.6)."""
    if _length(first) != _length(second):
        raise UpstreamProtocol()
    return first


def _length(value: bytes) -> int:
    if not value.isdigit():
        values = value.split(b",")  # one header that repeats itself
        if len(values) == 1:
            raise UpstreamProtocol()
        value = values[0].strip()
        if any(other.strip() != value for other in values) or not value.isdigit():
            raise UpstreamProtocol()
    if len(value) > LENGTH_MAX_DIGITS:
        raise UpstreamProtocol()
    return int(value)


# Chunks.


class ChunkError(LlmgwError):
    """What came is not chunked coding; the connection is of no more use."""


_plain_size = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n").match
# RFC 9112 7.1.1: white space may precede an extension; a bare CR or LF may stand nowhere.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?\Z")


def whole_chunks(data: bytes) -> bytes | None:
    """Return the payload of `data` if that is exactly one or several whole plain chunks.

    Plain: no extensions, not the last chunk, nothing behind it. Then `data` itself can be passed on as
    chunked coding, without being taken apart and put together again. Only valid between chunks.
    """
    match = _plain_size(data)
    if match is None:
        return None
    size = int(match[1], 16)
    start = match.end()
    end = start + size
    total = len(data)
    if end + 2 == total:
        # One chunk, and nothing else: nearly every read of an event stream.
        return data[start:end] if size and data.endswith(b"\r\n") else None
    parts = []
    while size:
        if end + 2 > total or data[end] != 13 or data[end + 1] != 10:
            return None
        parts.append(data[start:end])
        at = end + 2
        if at == total:
            return b"".join(parts)
        match = _plain_size(data, at)
        if match is None:
            return None
        size = int(match[1], 16)
        start = match.end()
        end = start + size
    return None


def encode_chunk(payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the pieces of a chunk, to be joined or sent as they are; empty ones for an empty payload.

    An empty chunk would be the last one.
    """
    if not payload:
        return b"", b"", b""
    return b"%x\r\n" % len(payload), payload, b"\r\n"


class _State(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILERS = auto()
    DONE = auto()


class ChunkedDecoder:
    """Takes chunked coding apart, cut anywhere.

    Attributes:
        done: the last chunk and the trailers have been read.
        leftover: bytes that came behind them; they belong to no response.
    """

    __slots__ = ("_held", "_missing", "_state", "_trailer_bytes", "done", "leftover")

    def __init__(self) -> None:
        self.done = False
        self.leftover = b""
        self._state = _State.SIZE
        self._held = b""  # of a line or of the CRLF behind a chunk
        self._missing = 0  # of the chunk under way
        self._trailer_bytes = 0

    @property
    def is_between_chunks(self) -> bool:
        """Whether the next byte is the first one of a chunk."""
        return self._state is _State.SIZE and not self._held

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the connection and return the payload in them.

        Raises:
            ChunkError: this is not chunked coding, or a line of it is too long.
        """
        if self._state is _State.SIZE and not self._held:
            payload = whole_chunks(data)
            if payload is not None:
                return payload
        if self._held:
            data = self._held + data
            self._held = b""
        parts: list[bytes] = []
        at, total = 0, len(data)
        while at < total or self._state is _State.DONE:
            state = self._state
            if state is _State.DATA:
                end = at + self._missing
                if end > total:
                    parts.append(data[at:] if at else data)
                    self._missing = end - total
                    break
                parts.append(data[at:end])
                at = end
                self._state = _State.DATA_END
            elif state is _State.DATA_END:
                if total - at < 2:
                    if data[at] != 13:
                        raise ChunkError
                    self._held = data[at:]
                    break
                if data[at] != 13 or data[at + 1] != 10:
                    raise ChunkError
                at += 2
                self._state = _State.SIZE
            elif state is _State.SIZE:
                end = self._line_end(data, at, CHUNK_LINE_MAX_BYTES)
                if end < 0:
                    break
                self._start_chunk(data[at:end])
                at = end + 2
            elif state is _State.TRAILERS:
                end = self._line_end(data, at, TRAILERS_MAX_BYTES - self._trailer_bytes)
                if end < 0:
                    break
                self._trailer_bytes += end + 2 - at
                if end == at:
                    self._state = _State.DONE
                    self.done = True
                at = end + 2
            else:
                self.leftover += data[at:]
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _line_end(self, data: bytes, at: int, limit: int) -> int:
        """Find the CRLF of the line at `at`; -1, with the line's beginning held, when it has not come."""
        end = data.find(b"\n", at, at + limit + 2)
        if end < 0:
            if len(data) - at > limit:
                raise ChunkError
            if self._state is _State.SIZE:
                self._check_size_so_far(data[at : at + 17])
            self._held = data[at:]
            return -1
        if end == at or data[end - 1] != 13:
            raise ChunkError
        return end - 1

    def _check_size_so_far(self, beginning: bytes) -> None:
        """Notice at once what can never become a size line, without waiting for its end."""
        if re.match(rb"[0-9A-Fa-f]{1,16}(?:[ \t;\r]|\Z)", beginning) is None:
            raise ChunkError

    def _start_chunk(self, line: bytes) -> None:
        match = _SIZE_LINE.match(line)
        if match is None:
            raise ChunkError
        size = int(match[1], 16)
        if size > CHUNK_MAX_BYTES:
            raise ChunkError
        self._missing = size
        self._state = _State.DATA if size else _State.TRAILERS
