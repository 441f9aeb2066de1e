"""A client of raw sockets: sends the bytes it is given, and reads answers with its own small parser.

It is strict on purpose: two framing headers, a body shorter than announced or bytes behind an answer are
failures here, where a client library would be lenient.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, read to its end.

    Attributes:
        headers: as written, in order.
        body: decoded of chunks.
        is_whole: False where the connection ended in the middle of the body.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes = field(repr=False)
    is_whole: bool = True

    def all(self, name: str) -> list[str]:
        """Return the values of a header, in any case."""
        return [value for key, value in self.headers if key.lower() == name]

    def header(self, name: str) -> str | None:
        """Return the value of a header that may be there once at most."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object of an answer in OpenAI's shape, checked for that shape."""
        assert self.header("content-type") == "application/json", self.headers
        whole = self.json()
        assert list(whole) == ["error"], whole
        error = whole["error"]
        assert {"message", "type", "param", "code"} <= error.keys(), error
        assert isinstance(error["message"], str), error
        return dict(error)

    @property
    def code(self) -> str:
        """Return the code of an error."""
        return str(self.error["code"])


def request(
    body: bytes | dict[str, Any] = b"",
    *headers: str,
    method: str = "POST",
    target: str = PATH,
    has_length: bool = True,
) -> bytes:
    """Return a whole request in HTTP/1.1.

    Args:
        body: a mapping is sent as JSON.
        headers: whole lines without their end, behind `Host` and `Content-Type`.
        has_length: whether `Content-Length` is put in.
    """
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [f"{method} {target} HTTP/1.1", "Host: gateway", *headers]
    if data or method == "POST":
        lines.insert(2, "Content-Type: application/json")
        if has_length:
            lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


def chat(model: str = "chat-model", **keys: Any) -> dict[str, Any]:
    """Return the body of a short chat request."""
    return {"model": model, "messages": [{"role": "user", "content": "go"}], "max_tokens": 2, **keys}


class WireClient:
    """One connection to a gateway; a context manager.

    Args:
        url: `http://host:port`.
        timeout: seconds for each read.
    """

    def __init__(self, url: str, timeout: float = 10.0, *, receive_buffer: int | None = None) -> None:
        place = urlsplit(url)
        family = socket.AF_INET6 if ":" in (place.hostname or "") else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if receive_buffer is not None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.settimeout(timeout)
            self.socket.connect((place.hostname, place.port))
        except OSError:
            self.socket.close()
            raise
        self._buffer = b""

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.socket.sendall(data)

    def send_request(self, *args: Any, **keys: Any) -> None:
        """Send `request(...)`."""
        self.send(request(*args, **keys))

    def ask(self, *args: Any, **keys: Any) -> Answer:
        """Send `request(...)` and return its answer."""
        self.send(request(*args, **keys))
        return self.answer(is_head=keys.get("method") == "HEAD")

    def read_until(self, mark: bytes) -> bytes:
        """Return everything up to and with `mark`.

        Raises:
            EOFError: the connection ended before; `args[0]` holds what came.
        """
        while mark not in self._buffer:
            if not self._receive():
                got, self._buffer = self._buffer, b""
                raise EOFError(got)
        got, found, self._buffer = self._buffer.partition(mark)
        return got + found

    def answer(self, *, is_head: bool = False) -> Answer:
        """Read the next answer, an interim one (1xx) too.

        Args:
            is_head: it answers HEAD, and so has no body.

        Raises:
            EOFError: the connection ended before its head was whole.
        """
        status, headers = self.head()
        if is_head or status < 200 or status in (204, 304):
            return Answer(status, headers, b"")
        lengths = [value for key, value in headers if key.lower() == "content-length"]
        codings = [value for key, value in headers if key.lower() == "transfer-encoding"]
        assert len(lengths) + len(codings) <= 1, f"more than one framing: {headers}"
        try:
            if codings:
                assert codings == ["chunked"], codings
                return Answer(status, headers, self._chunks())
            if lengths:
                return Answer(status, headers, self._exactly(int(lengths[0])))
        except EOFError as end:
            return Answer(status, headers, end.args[0], is_whole=False)
        while self._receive():
            pass
        body, self._buffer = self._buffer, b""
        return Answer(status, headers, body)

    def head(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        """Read the head of the next answer; its body is still to be read."""
        head = self.read_until(b"\r\n\r\n").decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1", head
        headers = []
        for line in lines:
            name, colon, value = line.partition(":")
            assert colon, head
            assert name == name.strip(), head
            headers.append((name, value.strip()))
        return int(status), tuple(headers)

    def is_answered(self, timeout: float) -> bool:
        """Wait so many seconds for the first byte of an answer; the end of the connection is one too."""
        kept = self.socket.gettimeout()
        self.socket.settimeout(timeout)
        try:
            return bool(self._buffer) or not self._receive() or bool(self._buffer)
        except TimeoutError:
            return False
        finally:
            self.socket.settimeout(kept)

    def is_closed(self) -> bool:
        """Wait for the other side's end of file; return False if bytes come or nothing happens in time."""
        if self._buffer:
            return False
        try:
            return not self._receive()
        except TimeoutError:
            return False

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def _exactly(self, length: int) -> bytes:
        while len(self._buffer) < length:
            if not self._receive():
                got, self._buffer = self._buffer, b""
                raise EOFError(got)
        got, self._buffer = self._buffer[:length], self._buffer[length:]
        return got

    def _chunks(self) -> bytes:
        body = b""
        try:
            while size := int(self.read_until(b"\r\n"), 16):
                piece = self._exactly(size + 2)
                assert piece.endswith(b"\r\n"), piece[-20:]
                body += piece[:-2]
            assert self.read_until(b"\r\n") == b"\r\n"
        except EOFError:
            raise EOFError(body) from None
        return body
