"""Clients that ask once each and of whom some leave, at any moment; one epoll loop for all."""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

LEAVE_WITHIN_S = 0.3


class Storm:
    """The clients of one test.

    Attributes:
        opened: requests sent.
        answered: whole answers.
        left: clients that went on their own.
        cut: connections that ended without a whole answer.
        statuses: of whole answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        rng: random.Random,
        *,
        leaving: float = 0.2,
        bands: Sequence[str] = ("platinum", "gold", "silver", "bronze"),
        tenants: int = 20,
    ) -> None:
        """Prepare; nobody asks yet.

        Args:
            urls: of gateways; each request goes to any of them.
            leaving: part of the clients that leave within `LEAVE_WITHIN_S`.
            bands: each request is of any of them, as it is of any tenant.
        """
        self.send_to(urls)
        self._rng = rng
        self._leaving, self._bands, self._tenants = leaving, bands, tenants
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, float, bytes]] = {}
        self.opened = self.answered = self.left = self.cut = 0
        self.statuses: dict[int, int] = {}

    @property
    def under_way(self) -> int:
        """Clients that have no answer yet."""
        return len(self._open)

    def send_to(self, urls: Sequence[str]) -> None:
        """Send requests there from now on."""
        self._addresses = [(parts.hostname or "", parts.port or 80) for parts in map(urlsplit, urls)]

    def open(self, data: bytes) -> None:
        """Connect and ask."""
        rng = self._rng
        band, tenant = rng.choice(self._bands).encode(), rng.randrange(self._tenants)
        sock = socket.create_connection(rng.choice(self._addresses), timeout=10)
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: storm\r\ncontent-type: application/json\r\n"
            b"x-llmgw-band: %b\r\nx-tenant-id: t%d\r\ncontent-length: %d\r\n\r\n%b"
            % (band, tenant, len(data), data)
        )
        leaves_at = float("inf")
        if rng.random() < self._leaving:
            leaves_at = time.monotonic() + rng.random() * LEAVE_WITHIN_S
        self._open[sock.fileno()] = (sock, leaves_at, b"")
        self._poll.register(sock, select.EPOLLIN)
        self.opened += 1

    def turn(self) -> None:
        """Read what there is, and let leave who is due."""
        for fd, _ in self._poll.poll(0.01):
            sock, leaves_at, seen = self._open[fd]
            try:
                data = sock.recv(65536)
            except ConnectionError:
                data = b""
            seen += data
            if not data:
                self.cut += 1
            elif seen.endswith(b"\r\n0\r\n\r\n") or (b"content-length" in seen and seen.endswith(b"}")):
                status = int(seen[9:12])
                self.statuses[status] = self.statuses.get(status, 0) + 1
                self.answered += 1
            else:
                self._open[fd] = (sock, leaves_at, seen)
                continue
            self._close(fd)
        now = time.monotonic()
        for fd in [fd for fd, (_, leaves_at, _) in self._open.items() if leaves_at <= now]:
            self.left += 1
            self._close(fd)

    def close(self) -> None:
        """Have everybody leave."""
        for fd in list(self._open):
            self._close(fd)
        if not self._poll.closed:
            self._poll.close()

    def _close(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._open.pop(fd)[0].close()
