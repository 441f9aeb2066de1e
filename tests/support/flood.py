"""Clients that ask again as soon as they have an answer, many in one thread, timing each first token.

One epoll loop for all; of an answer only its first event and its end are looked for, so that a flood costs
little beside what it floods. Connections are kept.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_END = b"\r\n0\r\n\r\n"
_TAIL = len(_END)


def body(prompt: str, *, model: str, max_tokens: int, stream: bool = True) -> bytes:
    """Return a chat request."""
    messages = [{"role": "user", "content": prompt}]
    fields = {"model": model, "messages": messages, "stream": stream, "max_tokens": max_tokens}
    return json.dumps(fields).encode()


class Load:
    """What clients of one kind ask, and what they saw.

    Attributes:
        ttfts: seconds from each request to the first event of its answer, in order of arrival.
        ended: answers that came to their end.
        refused: answers without an event, by status.
    """

    def __init__(self, make_body: Callable[[int], bytes], *, band: str, tenant: str) -> None:
        """Describe requests.

        Args:
            make_body: makes the body of the n-th request.
        """
        self._make_body = make_body
        self._lines = f"x-llmgw-band: {band}\r\nx-tenant-id: {tenant}\r\n".encode()
        self._asked = 0
        self.ttfts: list[float] = []
        self.ended = 0
        self.refused: dict[int, int] = {}

    def next_request(self) -> bytes:
        data = self._make_body(self._asked)
        self._asked += 1
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: flood\r\ncontent-type: application/json\r\n"
            b"%bcontent-length: %d\r\n\r\n%b" % (self._lines, len(data), data)
        )


class _Client:
    __slots__ = ("has_token", "load", "sent_at", "sock", "tail")

    def __init__(self, sock: socket.socket, load: Load) -> None:
        self.sock = sock
        self.load = load
        self.tail = b""
        self.has_token = False
        self.sent_at = 0.0


class Flood:
    """All clients of one test."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._poll = select.epoll()
        self._clients: dict[int, _Client] = {}
        self._of_load: dict[int, list[_Client]] = {}

    def add(self, load: Load, clients: int, url: str | None = None) -> None:
        """Open connections that ask from now on, one request at a time each.

        Args:
            url: of another gateway than the one all else goes to.
        """
        parts = urlsplit(url or self._url)
        for _ in range(clients):
            sock = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=20)
            client = _Client(sock, load)
            self._clients[client.sock.fileno()] = client
            self._of_load.setdefault(id(load), []).append(client)
            self._poll.register(client.sock, select.EPOLLIN)
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ask(client)
            self._turn(0.0)

    def remove(self, load: Load) -> None:
        """Close the connections of a load, in the middle of whatever they do."""
        for client in self._of_load.pop(id(load), ()):
            self._drop(client)

    def run(self, until: Callable[[], object], timeout: float, message: str) -> None:
        """Go on until a condition holds.

        Raises:
            AssertionError: the time was over.
        """
        deadline = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < deadline, f"waited {timeout:g} s for: {message}"
            self._turn(0.05)

    def run_for(self, seconds: float) -> None:
        """Go on for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._turn(min(left, 0.05))

    def close(self) -> None:
        """Close everything."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._poll.close()

    def _turn(self, wait_s: float) -> None:
        ready = self._poll.poll(wait_s, 1024)
        now = time.monotonic()
        for fd, _ in ready:
            client = self._clients.get(fd)
            if client is not None:
                self._read(client, now)

    def _read(self, client: _Client, now: float) -> None:
        data = client.sock.recv(65536)
        assert data, f"the gateway closed a connection: {client.tail!r}"
        load = client.load
        if not client.has_token:
            seen = client.tail + data
            if b"data:" not in seen:
                client.tail = seen
                head, end, rest = seen.partition(b"\r\n\r\n")
                if end and b"content-length:" in head.lower():
                    self._take_refusal(client, head, rest)
                return
            client.has_token = True
            load.ttfts.append(now - client.sent_at)
        client.tail = (client.tail + data)[-_TAIL:]
        if client.tail == _END:
            load.ended += 1
            self._ask(client)

    def _take_refusal(self, client: _Client, head: bytes, rest: bytes) -> None:
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) >= length:
            status = int(head[9:12])
            client.load.refused[status] = client.load.refused.get(status, 0) + 1
            self._ask(client)

    def _ask(self, client: _Client) -> None:
        client.tail = b""
        client.has_token = False
        client.sent_at = time.monotonic()
        client.sock.sendall(client.load.next_request())

    def _drop(self, client: _Client) -> None:
        self._poll.unregister(client.sock)
        del self._clients[client.sock.fileno()]
        client.sock.close()
