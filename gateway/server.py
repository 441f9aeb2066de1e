"""Accepts connections and serves their requests: parse, hand to falcon, write what falcon made.

A relayed response has been written by the time falcon returns (`Exchange.is_answered`);
everything else (errors, models, health) is an ordinary WSGI response, written here.
"""

from __future__ import annotations

import io
import logging
import random
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

import gevent
from gunicorn.config import Config as GunicornConfig

from conf.schema import Config
from gateway.access import Accountant
from gateway.channel import DRAIN, Channel, plain_socket, set_nodelay
from gateway.connection import ClientClosed, ClientConnection, RequestHead, Sweep
from gateway.core import errors
from gateway.core.headers import accept_request_id
from gateway.exchange import Exchange
from gateway.turns import Turns

EXCHANGE_KEY = "llmgw.exchange"
"""Where a request's `Exchange` stands in the WSGI environ."""

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_log = logging.getLogger(__name__)


class _LocalResponse:
    """WSGI's `start_response`, keeping what it is told."""

    __slots__ = ("headers", "status")

    def __init__(self) -> None:
        self.status = ""
        self.headers: list[tuple[str, str]] = []

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
        self.status = status
        self.headers = headers


class HttpServer:
    """The connections of one worker.

    Attributes:
        config: in force for new connections; replaced by a reload.
        is_draining: no request is taken any more, running ones finish.
    """

    def __init__(
        self,
        app: WsgiApp,
        config: Config,
        gunicorn_config: GunicornConfig,
        sweep: Sweep,
        accountant: Accountant,
        rng: random.Random,
        hot_paths: frozenset[str],
        run_hot: Callable[[Exchange], None],
    ) -> None:
        """Serve `app`.

        Args:
            hot_paths: paths whose POST goes to `run_hot` without a detour through falcon.
            run_hot: answers such a request, or raises what falcon's error handlers answer.
        """
        self.config = config
        self.is_draining = False
        self._app = app
        self._gunicorn_config = gunicorn_config
        self._sweep = sweep
        self._accountant = accountant
        self._rng = rng
        self._turns = Turns()
        self._hot_paths = hot_paths
        self._run_hot = run_hot
        self._environ: dict[str, Any] = {
            "SCRIPT_NAME": "",
            "SERVER_NAME": "llmgw",
            "SERVER_PORT": "0",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
        }

    @property
    def active(self) -> int:
        """Connections with a request under way."""
        return sum(not connection.idle for connection in self._sweep.connections)

    def handle(self, accepted: socket.socket, address: tuple[Any, ...]) -> None:
        """Serve one connection until it closes; the top of its greenlet."""
        sock = plain_socket(accepted.detach())
        connection = None
        try:
            set_nodelay(sock)
            connection = ClientConnection(
                Channel(sock),
                address,
                self.config.client,
                self.config.max_body_bytes,
                self._gunicorn_config,
                self._turns,
            )
            self._sweep.connections.add(connection)
            self._accountant.connections.add(1)
            self._serve(connection)
        except (ClientClosed, gevent.GreenletExit):
            pass
        except OSError:
            _log.debug("connection_broke", exc_info=True)
        except Exception:
            _log.exception("connection_failed")
        finally:
            if connection is None:
                sock.close()
            else:
                self._sweep.connections.discard(connection)
                self._accountant.connections.add(-1)
                connection.close()

    def _serve(self, connection: ClientConnection) -> None:
        while True:
            try:
                head = connection.read_head()
            except errors.ApiError as error:
                self._refuse(connection, error)
                return
            if head is None:
                return
            exchange = Exchange(
                connection, head, accept_request_id(head.fields.get(b"x-request-id"), self._rng)
            )
            self._answer(exchange)
            if connection.gone:
                return
            if connection.close_after or not head.keep_alive:
                if connection.close_after:
                    connection.linger()
                return
            if self.is_draining:
                return

    def _answer(self, exchange: Exchange) -> None:
        head = exchange.head
        if head.method == "POST" and head.path in self._hot_paths:
            # Falcon's routing costs a tenth of such a request. What is raised here, falcon answers as ever.
            try:
                self._run_hot(exchange)
            except Exception as exc:
                exchange.failure = exc
            else:
                return
        local = _LocalResponse()
        environ = self._make_environ(exchange)
        body = b"".join(self._app(environ, local))
        if exchange.is_answered:
            return
        connection = exchange.connection
        exchange.status = int(local.status[:3])
        try:
            if not connection.gone:
                self._discard_body(connection, head)
                connection.send(self._local_bytes(exchange, local, body))
        finally:
            self._accountant.finish(exchange)

    def _discard_body(self, connection: ClientConnection, head: RequestHead) -> None:
        try:
            connection.discard_body(head)
        except (errors.SlowBody, errors.ShuttingDown):
            connection.close_after = True

    def _local_bytes(self, exchange: Exchange, local: _LocalResponse, body: bytes) -> bytes:
        head, connection = exchange.head, exchange.connection
        lines = [f"HTTP/1.1 {local.status}"]
        has_length = False
        for name, value in local.headers:
            has_length = has_length or name.lower() == "content-length"
            lines.append(f"{name}: {value}")
        if not has_length and exchange.status not in (204, 304):
            lines.append(f"content-length: {len(body)}")
        if connection.close_after or not head.keep_alive or self.is_draining:
            connection.close_after = connection.close_after or self.is_draining
            lines.append("connection: close")
        text = ("\r\n".join(lines) + "\r\n").encode("latin-1") + exchange.own_header_lines() + b"\r\n"
        return text if head.method == "HEAD" else text + body

    def _make_environ(self, exchange: Exchange) -> dict[str, Any]:
        head = exchange.head
        path = head.path
        environ = self._environ.copy()
        # HEAD is answered as GET; its body is left out when it is written.
        environ["REQUEST_METHOD"] = "GET" if head.method == "HEAD" else head.method
        environ["PATH_INFO"] = unquote_to_bytes(path).decode("latin-1") if "%" in path else path
        environ["QUERY_STRING"] = head.query
        environ[EXCHANGE_KEY] = exchange
        if head.method != "POST":
            for name, value in head.fields.items():
                environ["HTTP_" + name.decode("latin-1").upper().replace("-", "_")] = value.decode("latin-1")
        return environ

    def _refuse(self, connection: ClientConnection, error: errors.ApiError) -> None:
        """Answer a request whose head could not be read, and close."""
        body = error.body()
        request_id = accept_request_id(None, self._rng)
        connection.close_after = True
        head = (
            f"HTTP/1.1 {error.status_line}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        connection.send(head.encode("latin-1") + body)
        refused = RequestHead("-", b"-", "-", "", [], {}, http11=True, keep_alive=False, content_length=0)
        exchange = Exchange(connection, refused, request_id)
        exchange.status, exchange.outcome = error.status, error.code
        self._accountant.finish(exchange)
        connection.linger()

    # Shutting down.

    def drain(self) -> None:
        """Take no more requests; connections that wait for one close now."""
        self.is_draining = True
        for connection in list(self._sweep.connections):
            if connection.idle:
                connection.parker.post(DRAIN)

    def close_idle(self) -> None:
        """While draining: close connections that have become idle since."""
        for connection in list(self._sweep.connections):
            if connection.idle:
                connection.parker.post(DRAIN)

    def end_all(self) -> None:
        """The drain time-out is over: end what still runs, streams with an error event."""
        now = time.monotonic()
        for connection in list(self._sweep.connections):
            connection.shutdown = True
            connection.deadline = now
