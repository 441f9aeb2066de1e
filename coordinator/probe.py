"""Asks an engine its questions over HTTP; every failure becomes a `Failure`, nothing else comes out.

Rules:
    - One connection per endpoint, kept open between looks. Engines close idle ones (uvicorn after 5 s), so an
      old connection that breaks is tried once more with a new one.
    - A deadline bounds the whole answer, not the pause between two bytes: an engine that drips does not hold.
    - An answer is read up to a limit; nobody's /metrics can fill our memory.
    - Redirects are not followed: an engine that sends us elsewhere does not serve.
"""

from __future__ import annotations

import errno
import ssl
from urllib.parse import urlsplit

import gevent
import urllib3
from urllib3.exceptions import (
    HTTPError,
    InsecureRequestWarning,
    NewConnectionError,
    SSLError,
    TimeoutError,
)
from urllib3.util.ssl_ import create_urllib3_context

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
            context = create_urllib3_context()
            if verify:
                context.verify_mode = ssl.CERT_REQUIRED
                if ca is None:
                    context.load_default_certs()
                else:
                    context.load_verify_locations(ca)
            else:
                # The operator said so; a warning per request would say it again and again.
                urllib3.disable_warnings(InsecureRequestWarning)
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
        self._pool: urllib3.HTTPConnectionPool | None = None
        self._has_spoken = False  # the kept connection has carried an answer

    def ask(self, path: str) -> Reply:
        """GET a path below the endpoint's address. Switches greenlets; returns within the deadline."""
        reply: Reply = Failure.TIMEOUT
        with gevent.Timeout(self._timeout_s, False):
            reply = self._ask(path)
            if reply is Failure.BROKEN and self._has_spoken:
                self._has_spoken = False
                reply = self._ask(path)
        self._has_spoken = isinstance(reply, Answer)
        return reply

    def close(self) -> None:
        """Close the connection. The next question would open a new one."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _ask(self, path: str) -> Reply:
        try:
            if self._pool is None:
                self._pool = self._open()
            response = self._pool.urlopen(
                "GET",
                self._base_path + path,
                headers=self._headers,
                retries=False,
                redirect=False,
                timeout=None,  # the deadline is ours
                preload_content=False,
                decode_content=False,
            )
            with response:  # closes what was not read to its end
                body = response.read(MAX_ANSWER_BYTES + 1)
                if len(body) > MAX_ANSWER_BYTES:
                    return Failure.TOO_LARGE
                response.release_conn()
            return Answer(response.status, body)
        except NewConnectionError as exc:  # its cause is the socket's error, or that of the name's look-up
            return _failure_to_connect(exc.__cause__)
        except SSLError:
            return Failure.TLS
        except TimeoutError:  # the kernel's, for want of an answer to SYN
            return Failure.TIMEOUT
        except HTTPError:
            return Failure.BROKEN
        except OSError:  # the authority's file, which is read with the first question
            return Failure.TLS

    def _open(self) -> urllib3.HTTPConnectionPool:
        record = self._record
        if not record.url.lower().startswith("https:"):
            return urllib3.connection_from_url(record.url, maxsize=1)
        context = self._contexts.get(record.tls_ca, verify=record.tls_verify)
        return urllib3.connection_from_url(
            record.url,
            maxsize=1,
            ssl_context=context,
            assert_hostname=None if record.tls_verify else False,
            cert_reqs="CERT_REQUIRED" if record.tls_verify else "CERT_NONE",
        )


def _failure_to_connect(cause: BaseException | None) -> Failure:
    if isinstance(cause, ssl.SSLError):
        return Failure.TLS
    number = cause.errno if isinstance(cause, OSError) else None
    if number == errno.ECONNREFUSED:
        return Failure.REFUSED
    if number in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return Failure.BROKEN
    return Failure.UNREACHABLE
