"""HTTP/1.1 as the simulated engine reads it: bytes in, requests out. Pure."""

from __future__ import annotations

import msgspec

from conf.errors import LlmgwError

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 100 * 1024 * 1024


class BadRequestError(LlmgwError):
    """The peer does not speak HTTP, or asks for too much; the connection cannot go on.

    Args:
        status: what to answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request(msgspec.Struct):
    """A request as it came.

    Attributes:
        method: in upper case.
        target: path and query.
        headers: names in lower case; of a repeated header, the last.
        raw_headers: (name, value) as sent, in order.
        body: without its transfer coding.
        is_keep_alive: the client will send another.
    """

    method: str
    target: str
    headers: dict[bytes, bytes]
    raw_headers: list[tuple[bytes, bytes]]
    body: bytes
    is_keep_alive: bool

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


class RequestReader:
    """Reads one connection's requests, one after the other."""

    __slots__ = ("_body", "_buffer", "_chunk_left", "_head", "_length", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Request | None = None
        self._length = -1  # of the body; -1: chunked
        self._chunk_left = 0
        self._body = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        self._buffer += data

    @property
    def is_between_requests(self) -> bool:
        """Whether nothing of a request has come yet."""
        return self._head is None and not self._buffer

    @property
    def wants_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body."""
        head = self._head
        return head is not None and head.headers.get(b"expect", b"").lower() == b"100-continue"

    def next(self) -> Request | None:
        """Return a complete request, or None until there is one.

        Raises:
            BadRequestError: this will never be one.
        """
        if self._head is None and (not self._buffer or not self._read_head()):
            return None
        request = self._head
        assert request is not None
        if self._length >= 0:
            if len(self._buffer) < self._length:
                return None
            request.body = bytes(self._buffer[: self._length])
            del self._buffer[: self._length]
        else:
            if not self._read_chunks():
                return None
            request.body = bytes(self._body)
            self._body = bytearray()
        self._head = None
        return request

    def _read_head(self) -> bool:
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0:
            self._searched = len(buffer)
            if len(buffer) > MAX_HEAD_BYTES:
                raise BadRequestError(431, "head too large")
            return False
        lines = bytes(buffer[:end]).split(b"\r\n")
        del buffer[: end + 4]
        self._searched = 0
        parts = lines[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            raise BadRequestError(400, "not HTTP")
        headers: dict[bytes, bytes] = {}
        raw = []
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadRequestError(400, "header without colon")
            value = value.strip(b" \t")
            raw.append((name, value))
            headers[name.lower()] = value
        connection = headers.get(b"connection", b"").lower()
        is_keep_alive = b"close" not in connection and (
            parts[2] == b"HTTP/1.1" or b"keep-alive" in connection
        )
        self._head = Request(
            parts[0].decode("latin-1"), parts[1].decode("latin-1"), headers, raw, b"", is_keep_alive
        )
        if b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"].lower() != b"chunked":
                raise BadRequestError(400, "unknown transfer coding")
            self._length = -1
            self._chunk_left = 0
        else:
            length = headers.get(b"content-length", b"0")
            if not length.isdigit():
                raise BadRequestError(400, "bad content length")
            self._length = int(length)
            if self._length > MAX_BODY_BYTES:
                raise BadRequestError(413, "body too large")
        return True

    def _read_chunks(self) -> bool:
        """Move complete chunks to the body; True once the last and its trailers are read.

        `_chunk_left` counts what is missing of the current chunk with its line break; -1 in the trailers.
        """
        buffer = self._buffer
        at = 0
        try:
            while True:
                if self._chunk_left > 0:
                    piece = buffer[at : at + self._chunk_left]
                    if not piece:
                        return False
                    at += len(piece)
                    self._chunk_left -= len(piece)
                    self._body += piece
                    if self._chunk_left:
                        return False
                    if not self._body.endswith(b"\r\n"):
                        raise BadRequestError(400, "chunk without end")
                    del self._body[-2:]
                    if len(self._body) > MAX_BODY_BYTES:
                        raise BadRequestError(413, "body too large")
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    if len(buffer) - at > MAX_HEAD_BYTES:
                        raise BadRequestError(400, "chunk size too long")
                    return False
                line = bytes(buffer[at:end])
                at = end + 2
                if self._chunk_left < 0:
                    if not line:
                        return True
                    continue
                try:
                    size = int(line.partition(b";")[0].strip(), 16)
                except ValueError:
                    raise BadRequestError(400, "bad chunk size") from None
                self._chunk_left = size + 2 if size > 0 else -1
        finally:
            del buffer[:at]
