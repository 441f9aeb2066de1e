"""An HTTP client that sees what is on the wire: when each byte came, and how the response ended.

The response is parsed by h11, which shares no code with the gateway and takes a body that is cut short
for an error.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import h11

CHAT = "/v1/chat/completions"


def chat(*, stream: bool = True, model: str = "chat-model", content: str = "hello", **fields: Any) -> bytes:
    """Return a request body."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, "stream": stream, **fields}).encode()


class Truncated(Exception):
    """The connection ended before the response was whole."""


class RawClient:
    """One connection to the gateway.

    Attributes:
        payload: of the present response, decoded of its framing.
        is_whole: the present response has come to its end.
    """

    def __init__(self, url: str, *, timeout: float = 10.0, receive_buffer: int = 0) -> None:
        parts = urlsplit(url)
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout)
        self.sock.connect((parts.hostname, parts.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timeout = timeout
        self._parser = h11.Connection(h11.CLIENT)
        self._response: h11.Response | None = None
        self.payload = bytearray()
        self.is_whole = False

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def head(
        self, length: int, *, path: str = CHAT, http10: bool = False, headers: dict[str, str] | None = None
    ) -> bytes:
        """Return the head of a POST, and prepare for its response."""
        if self._parser.our_state is h11.DONE:
            self._parser.start_next_cycle()
        self._response = None
        self.payload = bytearray()
        self.is_whole = False
        lines = {
            "host": "gateway",
            "content-type": "application/json",
            "content-length": str(length),
            **(headers or {}),
        }
        data = self._parser.send(h11.Request(method="POST", target=path, headers=list(lines.items())))
        assert data is not None
        return data.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1) if http10 else data

    def post(
        self,
        body: bytes,
        *,
        path: str = CHAT,
        http10: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a request, whole."""
        data = self.head(len(body), path=path, http10=http10, headers=headers)
        self._parser.send(h11.Data(data=body))
        self._parser.send(h11.EndOfMessage())
        self.sock.sendall(data + body)

    def expect_response(self) -> None:
        """Read the response to a request that has been sent by other means; call `head` before."""
        self._parser.send(h11.EndOfMessage())

    @property
    def status(self) -> int:
        """Status of the response; waits for its head."""
        while self._response is None:
            self._read()
        return self._response.status_code

    def header(self, name: str) -> str | None:
        """Return a header of the response; waits for its head."""
        assert self.status
        assert self._response is not None
        found = [value for key, value in self._response.headers if key == name.encode()]
        return found[-1].decode("latin-1") if found else None

    def read_until(self, length: int) -> bytes:
        """Wait until at least `length` bytes of payload are here, and return all that are.

        Raises:
            TimeoutError: they did not come.
            Truncated: the response ended before.
        """
        while len(self.payload) < length:
            if self.is_whole:
                raise Truncated(f"whole at {len(self.payload)} of {length} bytes")
            self._read()
        return bytes(self.payload)

    def read_all(self) -> bytes:
        """Wait for the end of the response and return the payload.

        Raises:
            Truncated: the connection ended before the response did.
        """
        while not self.is_whole:
            self._read()
        return bytes(self.payload)

    def read_broken(self) -> bytes:
        """Wait until the connection ends in the middle of the response, and return what came of it."""
        try:
            self.read_all()
        except Truncated:
            return bytes(self.payload)
        raise AssertionError(f"the response is whole: {bytes(self.payload)!r}")

    def json(self) -> Any:
        """Return the decoded payload of the whole response."""
        return json.loads(self.read_all())

    def error(self) -> Any:
        """Return the error object of the whole response."""
        return self.json()["error"]

    def is_closed(self, timeout: float = 5.0) -> bool:
        """Tell whether the gateway closes the connection, without another byte."""
        self.sock.settimeout(timeout)
        try:
            return self.sock.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def reset(self) -> None:
        """Leave with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        """Leave with FIN (or RST, if something has not been read)."""
        self.sock.close()

    def _read(self) -> None:
        """Take what the socket has; blocks until there is something."""
        deadline = time.monotonic() + self._timeout
        while True:
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionError as exc:
                raise Truncated(repr(exc)) from exc
            self._parser.receive_data(data)
            if self._take():
                return

    def _take(self) -> bool:
        came = False
        while True:
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError as exc:
                raise Truncated(str(exc)) from exc
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return came
            came = True
            if isinstance(event, h11.Response):
                self._response = event
            elif isinstance(event, h11.Data):
                self.payload += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.is_whole = True
                return True
            elif isinstance(event, h11.ConnectionClosed):
                raise Truncated("closed")
