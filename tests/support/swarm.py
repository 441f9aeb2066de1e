"""Very many clients in one thread: each sends one request and keeps the bytes it gets.

One selector for all; what came is looked at when the run is over, so that the client costs little beside
what it watches.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"


@dataclass(eq=False)
class Stream:
    """One request and its answer.

    Attributes:
        received: bytes of the answer, framing included.
        times: monotonic seconds of each read.
        is_over: the last chunk has come, or the connection has ended.
    """

    sock: socket.socket
    key: Any
    received: bytearray = field(default_factory=bytearray)
    times: list[float] = field(default_factory=list)
    is_over: bool = False

    @property
    def has_token(self) -> bool:
        """Whether an event has come."""
        return b"data:" in self.received

    @property
    def status(self) -> int:
        """Status of the answer; 0 while there is none."""
        return int(self.received[9:12]) if len(self.received) > 12 else 0

    def payload(self) -> bytes:
        """Return the body without its chunks.

        Raises:
            AssertionError: it is not whole.
        """
        head, _, body = bytes(self.received).partition(HEAD_END)
        assert b"transfer-encoding: chunked" in head.lower(), head
        out = []
        at = 0
        while True:
            end = body.find(b"\r\n", at)
            assert end >= 0, f"short: {body[-200:]!r}"
            size = int(body[at:end], 16)
            at = end + 2 + size + 2
            assert at <= len(body), f"short: {body[-200:]!r}"
            if not size:
                assert at == len(body), f"bytes behind the end: {body[-200:]!r}"
                return b"".join(out)
            out.append(body[end + 2 : at - 2])

    def text(self) -> str:
        """Return what the events say together; all are chunks of chat, and `[DONE]` is the last."""
        events = self.payload().split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""], events[-3:]
        parts = []
        for event in events[:-2]:
            assert event.startswith(b"data: "), event
            for choice in json.loads(event[6:])["choices"]:
                parts.append(choice["delta"].get("content") or "")
        return "".join(parts)


class Swarm:
    """The clients of one test.

    Attributes:
        streams: all that were opened, in order.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._selector = selectors.DefaultSelector()
        self.streams: list[Stream] = []

    def open(self, body: bytes, key: Any = None) -> Stream:
        """Connect and send a request."""
        sock = socket.create_connection(self._address, timeout=20)
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: swarm\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        sock.setblocking(False)
        stream = Stream(sock, key)
        self.streams.append(stream)
        self._selector.register(sock, selectors.EVENT_READ, stream)
        return stream

    def run(self, until: Callable[[], object], timeout: float, message: str) -> None:
        """Read until a condition holds; asked after every turn of the selector.

        Raises:
            AssertionError: the time was over.
        """
        deadline = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < deadline, f"waited {timeout:g} s for: {message}"
            self.turn(0.02)

    def turn(self, timeout: float = 0.0) -> None:
        """Read once from all that have something."""
        for key, _ in self._selector.select(timeout):
            self._read(key.data)

    def leave(self, streams: Iterable[Stream]) -> None:
        """Close connections, whatever is on them."""
        for stream in streams:
            if stream.sock.fileno() >= 0:
                if not stream.is_over:
                    self._selector.unregister(stream.sock)
                stream.is_over = True
                stream.sock.close()

    def close(self) -> None:
        """Close what is open."""
        self.leave(self.streams)
        self._selector.close()

    def _read(self, stream: Stream) -> None:
        try:
            data = stream.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        stream.received += data
        stream.times.append(time.monotonic())
        if not data or stream.received.endswith(b"\r\n0\r\n\r\n"):
            stream.is_over = True
            self._selector.unregister(stream.sock)
