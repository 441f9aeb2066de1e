"""Serves a WSGI application on the admin listeners.

The launcher opens them and hands them down, so that they outlive this process. A coordinator that is started
by hand, as tests do, opens its own.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence

import gevent
from gevent import socket
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer

from conf.values import ListenAddress
from gateway.core.errors import MalformedRequest

# Operators, their dashboards and a few Prometheus; the next one waits in the backlog.
MAX_CONNECTIONS = 64
# Longest wait for the next byte, in either direction: a silent client gives its place back.
SILENCE_S = 30.0
_STOP_S = 1.0
_BIND_PATIENCE_S = 5.0
_BIND_RETRY_S = 0.1


def inherited(fds: Sequence[int]) -> list[socket.socket]:
    """Return the listeners behind file descriptors."""
    return [socket.socket(fileno=fd) for fd in fds]


def open_listener(address: ListenAddress) -> socket.socket:
    """Listen on an address; waits up to five seconds for another process to let go of it.

    Raises:
        OSError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in address.host or not address.host else socket.AF_INET
    deadline = time.monotonic() + _BIND_PATIENCE_S
    while True:
        try:
            return socket.create_server(
                (address.host, address.port), family=family, dualstack_ipv6=not address.host
            )
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
        gevent.sleep(_BIND_RETRY_S)


LOG = logging.getLogger(__name__)


class _Handler(WSGIHandler):
    """A connection whose silence ends it, and whose nonsense is no news."""

    def __init__(self, sock: socket.socket, address: object, server: WSGIServer) -> None:
        sock.settimeout(SILENCE_S)
        super().__init__(sock, address, server)

    def log_error(self, msg: str, *args: object) -> None:
        """Take what pywsgi has to say about requests it cannot read."""
        LOG.debug("admin_request_malformed", extra={"detail": msg % args if args else msg})

    def _handle_client_error(self, ex: Exception) -> tuple[str, bytes]:
        """Answer a request that cannot be read; pywsgi would print a traceback for some."""
        self.log_error("%r", ex)
        error = MalformedRequest()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status_line}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return str(error.status), head.encode() + body


class AdminServer:
    """The admin listener.

    Args:
        listeners: closed by `stop`.
        application: WSGI.
    """

    def __init__(self, listeners: Sequence[socket.socket], application: object) -> None:
        pool = Pool(MAX_CONNECTIONS)
        self._servers = [
            WSGIServer(
                listener,
                application,
                spawn=pool,
                handler_class=_Handler,
                log=None,  # requests of operators are no news
                error_log=LOG,
            )
            for listener in listeners
        ]

    @property
    def addresses(self) -> list[str]:
        """Where it listens, as `host:port`."""
        return [str(ListenAddress(*server.socket.getsockname()[:2])) for server in self._servers]

    def start(self) -> None:
        """Begin to accept; returns at once."""
        for server in self._servers:
            server.start()

    def stop(self) -> None:
        """Accept no more, and end what is still running after a second."""
        for server in self._servers:
            server.stop(timeout=_STOP_S)
