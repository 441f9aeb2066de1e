"""Connections to engines: opened by urllib3, then driven without it.

urllib3 resolves, connects and does TLS (SPIKE section 3: the rest of it costs
more than the whole request). A connection that waits for its next request keeps
its read watcher on, so an engine that closes it takes it out of the pool at
that moment, not at the next request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from gateway.channel import Channel, plain_socket
from gateway.core import errors
from shm.endpoints import EndpointRecord

IDLE_MAX_S = 4.0
"""Idle connections are closed after this: uvicorn, which serves vLLM and SGLang, closes them after 5 s."""


class Upstream:
    """One connection to an engine.

    Attributes:
        channel: the socket with its watchers.
        reused: it has carried a request before; a failure before the first byte of a
            response then means that the engine had closed it (TECH section 11).
        idle_since: monotonic seconds, while in the pool.
    """

    __slots__ = ("channel", "idle_since", "pool", "reused")

    def __init__(self, channel: Channel, pool: UpstreamPool) -> None:
        self.channel = channel
        self.pool = pool
        self.reused = False
        self.idle_since = 0.0

    def close(self) -> None:
        self.channel.close()

    def give_back(self) -> None:
        """Return the connection to its pool; its response has been read to the end."""
        self.pool.give_back(self)

    def on_idle_readable(self) -> None:
        # An idle engine has nothing to say: this is its end of file, a reset, or a stray byte.
        self.pool.drop(self)


class UpstreamPool:
    """Connections of one worker to one endpoint; last in, first out.

    Attributes:
        record: the endpoint as it was when the pool was made.
        host_header: what goes out as `Host`.
        base_path: path prefix of the endpoint's URL, without a slash at its end.
    """

    def __init__(self, record: EndpointRecord) -> None:
        self.record = record
        url = urlsplit(record.url)
        self.host_header = url.netloc.rpartition("@")[2].encode("ascii")
        self.base_path = url.path.rstrip("/").encode("ascii")
        self._idle: list[Upstream] = []
        self._closed = False
        self._is_tls = url.scheme == "https"
        host = url.hostname or ""
        if self._is_tls:
            options: dict[str, Any] = {"cert_reqs": "CERT_REQUIRED", "ca_certs": record.tls_ca}
            if not record.tls_verify:
                options = {"cert_reqs": "CERT_NONE", "assert_hostname": False}
            self._factory: HTTPConnectionPool = HTTPSConnectionPool(host, url.port or 443, **options)
        else:
            self._factory = HTTPConnectionPool(host, url.port or 80)

    def checkout(self) -> Upstream | None:
        """Take the most recently used idle connection, if there is one."""
        while self._idle:
            upstream = self._idle.pop()
            if time.monotonic() - upstream.idle_since < IDLE_MAX_S:
                upstream.channel.stop_reading()
                return upstream
            upstream.close()
        return None

    def connect(self, timeout_s: float) -> Upstream:
        """Open a new connection; blocks the greenlet for at most `timeout_s` (0: no limit).

        Raises:
            errors.UpstreamUnreachable: name, connection or TLS failed, or the time was over.
        """
        # `_new_conn` is how urllib3's own pools make a connection with the pool's TLS settings;
        # there is no public way to have one without sending a request.
        connection: Any = self._factory._new_conn()
        connection.timeout = timeout_s or None
        try:
            connection.connect()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
            connection.close()
            raise errors.UpstreamUnreachable() from exc
        sock = connection.sock
        if self._is_tls:
            sock.settimeout(0.0)
            return Upstream(Channel(sock), self)
        return Upstream(Channel(plain_socket(sock.detach())), self)

    def give_back(self, upstream: Upstream) -> None:
        """Keep a connection for the next request."""
        if self._closed:
            upstream.close()
            return
        upstream.reused = True
        upstream.idle_since = time.monotonic()
        upstream.channel.start_reading(upstream.on_idle_readable)
        self._idle.append(upstream)

    def drop(self, upstream: Upstream) -> None:
        """Close an idle connection."""
        if upstream in self._idle:
            self._idle.remove(upstream)
        upstream.close()

    def close_idle(self, now: float) -> None:
        """Close what has been idle too long; the oldest stand first."""
        idle = self._idle
        while idle and now - idle[0].idle_since >= IDLE_MAX_S:
            idle.pop(0).close()

    def close(self) -> None:
        """Close what is idle now, and what is given back later."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


class UpstreamPools:
    """The pools of a worker, one per endpoint as it is configured now."""

    def __init__(self) -> None:
        self._pools: dict[str, UpstreamPool] = {}

    def of(self, record: EndpointRecord) -> UpstreamPool:
        """Return the pool of an endpoint; made at its first request."""
        pool = self._pools.get(record.id)
        if pool is None:
            pool = self._pools[record.id] = UpstreamPool(record)
        return pool

    def keep(self, records: Iterable[EndpointRecord]) -> None:
        """Close the pools of endpoints that are gone or have changed. Called when the table was replaced."""
        current = {record.id: record for record in records}
        for endpoint_id, pool in list(self._pools.items()):
            if current.get(endpoint_id) != pool.record:
                self._pools.pop(endpoint_id).close()

    def close_idle(self, now: float) -> None:
        for pool in self._pools.values():
            pool.close_idle(now)
