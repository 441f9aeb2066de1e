"""An engine of raw sockets that does as it is told: refuse, hang, reset, drip, talk nonsense.

It runs in threads of the test. Paths that have no script answer as a healthy vLLM that serves `chat-model`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable

Script = Callable[[socket.socket], None]

METRICS = (
    b"# HELP vllm:num_requests_waiting Requests waiting.\n"
    b"# TYPE vllm:num_requests_waiting gauge\n"
    b'vllm:num_requests_waiting{engine="0",model_name="chat-model"} 2.0\n'
    b'vllm:num_requests_running{engine="0",model_name="chat-model"} 3.0\n'
    b'vllm:kv_cache_usage_perc{engine="0",model_name="chat-model"} 0.25\n'
)


def response(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    """Return a whole HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def models(*names: str) -> bytes:
    """Return the response to `/v1/models`."""
    return response(json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode())


def send(data: bytes) -> Script:
    """Answer with `data`, as it is, and keep the connection."""
    return lambda connection: connection.sendall(data)


def hang(connection: socket.socket) -> None:
    """Say nothing until the other side has enough."""
    connection.recv(1)


def reset(connection: socket.socket) -> None:
    """Break the connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def close(connection: socket.socket) -> None:
    """Break the connection with FIN."""
    connection.close()


def drip(connection: socket.socket) -> None:
    """Send a body that never ends, a byte every 20 ms."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"#")
        time.sleep(0.02)


class ScriptedEngine:
    """A server on a free port of 127.0.0.1.

    Attributes:
        port: keeps through `refuse` and `listen`.
        heads: every request's head as it came, oldest first.
    """

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self._scripts: dict[str, Script] = {
            "/health": send(response()),
            "/v1/models": send(models("chat-model")),
            "/metrics": send(response(METRICS)),
        }
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = 0
        self.listen()

    @property
    def url(self) -> str:
        """Address for `endpoints[].url`."""
        return f"http://127.0.0.1:{self.port}"

    def script(self, path: str, script: Script | bytes) -> None:
        """Set what happens when `path` is asked for; bytes are the whole response."""
        self._scripts[path] = send(script) if isinstance(script, bytes) else script

    def count(self, path: str) -> int:
        """Return how often `path` was asked for."""
        return sum(head.startswith(f"GET {path} ".encode()) for head in tuple(self.heads))

    @property
    def open_connections(self) -> int:
        """Connections that neither side has closed yet."""
        with self._lock:
            return len(self._connections)

    def refuse(self) -> None:
        """Refuse connections, and break those that are open, as an engine that died."""
        if self._listener is not None:
            # close() alone would leave accept() waiting, and the port taken.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self._thread.join()
        with self._lock:
            for connection in self._connections:
                _shut(connection)

    def listen(self) -> None:
        """Accept connections (again)."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while head := _read_head(connection):
                    self.heads.append(head)
                    path = head.split(b" ", 2)[1].decode()
                    missing = send(response(b"", "404 Not Found"))
                    self._scripts.get(path, missing)(connection)
        except OSError:
            pass  # the other side went away, or a script broke the connection
        finally:
            with self._lock:
                self._connections.discard(connection)


def _read_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = connection.recv(4096)
        if not data:
            return b""
        head += data
    return head


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
