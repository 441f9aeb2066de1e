"""Asks an engine its questions over HTTP; every failure becomes a `Failure`, nothing else comes out.

Rules:
    - One connection per endpoint, kept open between looks. Engines close idle ones (uvicorn after 5 s), so an
      old connection that breaks is tried once more with a new one.
    - A deadline bounds the whole answer, not the pause between two bytes: an engine that drips does not hold.
    - An answer is read up to a limit; nobody's /metrics can fill our memory.
    - Redirects are not followed: an engine that sends us elsewhere does not serve.

http.client and not urllib3: 16 endpoints are asked 16 questions a second for ever, and urllib3 takes 320 µs
for one where this takes 120.
"""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

import gevent

from conf.version import __version__
from coordinator.core.look import Answer, Failure, Reply
from shm.endpoints import EndpointRecord

# vLLM's /metrics has 60 KB, SGLang's 120 KB, and both grow with the number of adapters and ranks.
MAX_ANSWER_BYTES = 8 * 2**20


class TlsContexts:
    """TLS settings by what the configuration says; made once, since reading a CA bundle takes 10 ms."""

    def __init__(self) -> None:
        self._made: dict[tuple[str | None, bool], ssl.SSLContext] = {}

    def get(self, ca: str | None, *, verify: bool) -> ssl.SSLContext:
        """Return the context for an authority's file, or for the system's own authorities.

        Raises:
            OSError: the file cannot be read, or holds no certificate.
        """
        context = self._made.get((ca, verify))
        if context is None:
            context = ssl.create_default_context(cafile=ca)
            if not verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            self._made[ca, verify] = context
        return context

    def clear(self) -> None:
        """Forget them, so that a replaced CA file is read."""
        self._made.clear()


class Probe:
    """The connection to one endpoint."""

    def __init__(self, record: EndpointRecord, *, timeout_s: float, contexts: TlsContexts) -> None:
        """Prepare; connects with the first question.

        Args:
            record: whom to ask, and with which key.
            timeout_s: deadline of one answer, connecting included.
            contexts: shared by all probes.
        """
        self._record = record
        self._timeout_s = timeout_s
        self._contexts = contexts
        self._base_path = urlsplit(record.url).path
        self._headers = {"user-agent": f"llmgw/{__version__}"}
        if record.api_key:
            self._headers["authorization"] = f"Bearer {record.api_key}"
        self._connection: http.client.HTTPConnection | None = None  # None, or at rest between two answers

    def ask(self, path: str) -> Reply:
        """GET a path below the endpoint's address. Switches greenlets; returns within the deadline."""
        with gevent.Timeout(self._timeout_s, False):
            if self._connection is not None:
                reply = self._ask(path)
                if reply is not Failure.BROKEN:
                    return reply
            return self._ask(path)
        return Failure.TIMEOUT

    def close(self) -> None:
        """Close the connection. The next question would open a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, path: str) -> Reply:
        connection, self._connection = self._connection, None
        is_at_rest = False
        try:
            if connection is None:
                connection = self._open()
            connection.request("GET", self._base_path + path, headers=self._headers)
            with connection.getresponse() as response:
                body = response.read(MAX_ANSWER_BYTES + 1)
                if len(body) > MAX_ANSWER_BYTES:
                    return Failure.TOO_LARGE
                if response.length:  # read(n) does not tell that the end is missing
                    return Failure.BROKEN
                is_at_rest = not response.will_close
                return Answer(response.status, body)
        except ConnectionRefusedError:
            return Failure.REFUSED
        except ssl.SSLError:
            return Failure.TLS
        except TimeoutError:  # the kernel's, for want of an answer to SYN
            return Failure.TIMEOUT
        except (ConnectionError, http.client.HTTPException):
            return Failure.BROKEN
        except (OSError, UnicodeError):  # no route, no such name, a name that cannot be one
            return Failure.UNREACHABLE
        finally:
            # Also where the deadline, or the end of this greenlet, comes in between.
            if is_at_rest:
                self._connection = connection
            elif connection is not None:
                connection.close()

    def _open(self) -> http.client.HTTPConnection:
        url = urlsplit(self._record.url)
        host = url.hostname or ""
        if url.scheme != "https":
            return http.client.HTTPConnection(host, url.port)
        try:
            context = self._contexts.get(self._record.tls_ca, verify=self._record.tls_verify)
        except OSError as exc:
            raise ssl.SSLError(f"{self._record.tls_ca}: {exc.strerror}") from exc
        return http.client.HTTPSConnection(host, url.port, context=context)
