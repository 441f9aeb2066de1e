"""An engine that the test plays itself: it takes a request, and sends each byte when the test says so.

engine = RawEngine()
...                                  # a client asks the gateway for something
request = engine.next_request()
request.send(HEAD + first_event)     # the test's thread writes; nothing else does
...                                  # the client has the event: only now the next byte
request.send(rest)
request.finish()                     # the connection may carry another request

Rules:
    - Requests of the coordinator (health, models, metrics) are answered as by a healthy vLLM.
    - A POST is handed to the test by `next_request`, or answered by `answer` if that is set.
    - Nothing is sent, read or closed but on command: a frozen engine is one whose test does nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import queue
import re
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.scripted_engine import METRICS, models, response
from tests.support.wait import wait_until

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(payload: bytes) -> bytes:
    """Return `payload` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = b"0\r\n\r\n"


def event(text: str) -> bytes:
    """Return a chat chunk with `text` as an event."""
    return b'data: {"object":"x","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


@dataclass(eq=False)
class RawRequest:
    """A POST as it reached the engine, and the connection on which the test answers it.

    Attributes:
        head: with its empty line.
        body: b"" if the engine does not read bodies.
        body_bytes: its length as announced.
        port: of the engine it reached.
        connection: number of the connection, from 0 in the order of their first POST.
        nth: how many POSTs the connection has carried before this one.
    """

    sock: socket.socket
    head: bytes
    body: bytes
    body_bytes: int
    port: int
    connection: int
    nth: int
    _finished: threading.Event = field(default_factory=threading.Event)

    def header(self, name: str) -> str | None:
        """Return the value of the header `name`."""
        match = re.search(rb"(?im)^%b:[ \t]*(.*?)\r$" % re.escape(name.encode()), self.head)
        return None if match is None else match[1].decode("latin-1")

    @property
    def request_id(self) -> str | None:
        """What the gateway calls this request."""
        return self.header("x-request-id")

    def send(self, data: bytes) -> None:
        """Send bytes, whole."""
        self.sock.settimeout(20)
        self.sock.sendall(data)

    def finish(self) -> None:
        """The response is whole: the connection waits for its next request."""
        self._finished.set()

    def close(self) -> None:
        """End the connection with FIN."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._finished.set()

    def reset(self) -> None:
        """End the connection with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()
        self._finished.set()

    def wait_closed(self, timeout: float = 5.0) -> float:
        """Wait until the gateway has closed this connection; return the seconds that took.

        Raises:
            AssertionError: it is still open.
        """
        started = time.monotonic()
        self.sock.settimeout(timeout)
        try:
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            raise AssertionError(f"the gateway kept the engine's connection for {timeout:g} s") from None
        except OSError:
            pass
        self.close()
        return time.monotonic() - started

    def is_received(self) -> bool:
        """Tell whether the gateway's kernel has acknowledged everything sent."""
        left = fcntl.ioctl(self.sock, termios.TIOCOUTQ, struct.pack("i", 0))
        return bool(struct.unpack("i", left)[0] == 0)

    def is_open(self) -> bool:
        """Tell whether the gateway still holds this connection; reads nothing."""
        self.sock.settimeout(0)
        try:
            return self.sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


class RawEngine:
    """A server on a free port of 127.0.0.1.

    Args:
        serves: names of models it lists.
        inbox: where POSTs go; several engines may share one.

    Attributes:
        requests: every POST, oldest first.
        answer: called with each POST in the connection's own thread, instead of `next_request`.
        keeps_bodies: whether the body that was read is kept; if not, it is b"" and only `body_bytes` tells.
        keepalive_s: closes connections that have been idle so long after a POST; None: never.
        reads_bodies: whether a request's body is read before the test gets it.
            If not, its receive buffer is small, so that a large body stays with its sender.
    """

    def __init__(
        self,
        *,
        reads_bodies: bool = True,
        serves: Sequence[str] = ("chat-model",),
        inbox: queue.Queue[RawRequest] | None = None,
    ) -> None:
        self.requests: list[RawRequest] = []
        self.answer: Callable[[RawRequest], None] | None = None
        self.keeps_bodies = True
        self.keepalive_s: float | None = None
        self.reads_bodies = reads_bodies
        self._fixed = {
            b"/health": response(),
            b"/v1/models": models(*serves),
            b"/metrics": response(METRICS),
        }
        self.inbox: queue.Queue[RawRequest] = inbox or queue.Queue()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._connections = 0
        self._listener = socket.socket()
        if not reads_bodies:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Address for `endpoints[].url`."""
        return f"http://127.0.0.1:{self.port}"

    def drop_unseen(self) -> list[RawRequest]:
        """Return the POSTs that the test did not take, and close them."""
        unseen = []
        with contextlib.suppress(queue.Empty):
            while True:
                unseen.append(self.inbox.get_nowait())
                unseen[-1].close()
        return unseen

    def next_request(self, timeout: float = 10.0) -> RawRequest:
        """Wait for the next POST."""
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no request reached the engine within {timeout:g} s") from None

    def close(self) -> None:
        """Stop, and break what is open."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for request in self.requests:
            request.close()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not self._sockets, 5.0, "the engine's connections to end")

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                self._serve_requests(sock)
        except OSError:
            pass  # the gateway went away, or the test broke the connection
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def _serve_requests(self, sock: socket.socket) -> None:
        buffer = b""
        number = -1
        nth = 0
        while True:
            # Closed as uvicorn does it: at a time, whether or not a request is on its way.
            sock.settimeout(self.keepalive_s if number >= 0 and not buffer else None)
            while b"\r\n\r\n" not in buffer:
                data = sock.recv(65536)  # TimeoutError is an OSError: it ends the connection
                sock.settimeout(None)
                if not data:
                    return
                buffer += data
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            head += b"\r\n\r\n"
            if head.startswith(b"GET "):
                sock.sendall(self._fixed.get(head.split(b" ", 2)[1], response(b"", "404 Not Found")))
                continue
            if number < 0:
                with self._lock:
                    number = self._connections
                    self._connections += 1
            body = b""
            match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            length = int(match[1]) if match else 0
            if self.reads_bodies:
                pieces = [buffer]
                have = len(buffer)
                while have < length:
                    data = sock.recv(1 << 20)
                    if not data:
                        return
                    if self.keeps_bodies:
                        pieces.append(data)
                    have += len(data)
                buffer = b"".join(pieces) if self.keeps_bodies else b""
                body, buffer = buffer[:length], buffer[length:]
            request = RawRequest(sock, head, body, length, self.port, number, nth)
            nth += 1
            self.requests.append(request)
            if self.answer is not None:
                self.answer(request)
                request.finish()
            else:
                self.inbox.put(request)
            request._finished.wait()
