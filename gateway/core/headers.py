"""Which headers pass, in both directions, and as what.

Rules:
    - Hop-by-hop headers and those named in `Connection` end here (RFC 9110 7.6.1), and framing is made anew.
    - A client's credentials never reach an engine: Authorization, cookies, API key headers. The engine's own
      key is put in.
    - `x-llmgw-*` is between client and gateway. An engine cannot set it on a response.
    - Everything else passes in its order and spelling.
    - Engines are asked for uncompressed answers: events and usage are read on the way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

Header = tuple[bytes, bytes]

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_TO_ENGINES: Final = _HOP_BY_HOP | {
    b"accept-encoding",
    b"api-key",
    b"authorization",
    b"content-encoding",  # bodies go on decoded
    b"content-length",
    b"cookie",
    b"cookie2",
    b"expect",
    b"host",
    b"ocp-apim-subscription-key",
    b"x-api-key",
    b"x-auth-token",
    b"x-goog-api-key",
    b"x-request-id",
}
_NOT_TO_CLIENTS: Final = _HOP_BY_HOP | {
    b"alt-svc",  # would send clients past the gateway
    b"content-length",
    b"server",
    b"set-cookie",
    b"set-cookie2",
    b"x-powered-by",
    b"x-request-id",
}
_OWN_PREFIX: Final = b"x-llmgw-"

_is_request_id = re.compile(rb"[A-Za-z0-9._:/=+@-]{1,128}").fullmatch


# The caches are bounded: clients choose how names are spelled, and how many there are.


@lru_cache(maxsize=512)
def _passes_to_engine(name: bytes) -> bool:
    lowered = name.lower()
    return lowered not in _NOT_TO_ENGINES and not lowered.startswith(_OWN_PREFIX)


@lru_cache(maxsize=512)
def _passes_to_client(name: bytes) -> bool:
    lowered = name.lower()
    return lowered not in _NOT_TO_CLIENTS and not lowered.startswith(_OWN_PREFIX)


def accept_request_id(value: bytes | None, rng: random.Random) -> str:
    """Return the client's request id if it is fit for logs and headers, else a new one.

    Args:
        value: as sent; None if it sent none.
        rng: source of the new id.
    """
    if value is not None and _is_request_id(value):
        return value.decode("ascii")
    return f"req-{rng.getrandbits(128):032x}"


def engine_request_head(
    target: bytes,
    headers: Sequence[Header],
    *,
    host: bytes,
    content_length: int,
    request_id: str,
    api_key: str | None = None,
    method: bytes = b"POST",
) -> bytes:
    """Build the head of the request to an engine.

    Args:
        target: path and query.
        headers: the client's, in wire order; free of CR, LF and NUL, as every parser of requests guarantees.
        host: authority of the engine's URL.
        content_length: bytes of the body.
        request_id: sent as `x-request-id`.
        api_key: what the engine wants as bearer token.
    """
    lines = [b"%b %b HTTP/1.1\r\nHost: %b\r\n" % (method, target, host)]
    named = _named_in_connection(headers)
    for header in headers:
        if _passes_to_engine(header[0]) and (named is None or header[0].lower() not in named):
            lines.append(b"%b: %b\r\n" % header)
    if api_key is not None:
        lines.append(b"Authorization: Bearer %b\r\n" % api_key.encode("latin-1", "replace"))
    lines.append(
        b"Accept-Encoding: identity\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
        % (request_id.encode("ascii"), content_length)
    )
    return b"".join(lines)


def client_header_lines(headers: Sequence[Header]) -> bytes:
    """Return those of an engine's response headers that a client gets, as lines ending in CRLF.

    Framing, `Connection` and the gateway's own headers are the caller's.
    """
    named = _named_in_connection(headers)
    if named is None:
        return b"".join([b"%b: %b\r\n" % header for header in headers if _passes_to_client(header[0])])
    return b"".join(
        [
            b"%b: %b\r\n" % header
            for header in headers
            if _passes_to_client(header[0]) and header[0].lower() not in named
        ]
    )


def _named_in_connection(headers: Sequence[Header]) -> set[bytes] | None:
    """Return the header names that `Connection` lists; None, as nearly always, when it lists none."""
    named = None
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            tokens = {token.strip().lower() for token in value.split(b",")} - {b"close", b"keep-alive", b""}
            # A client must not be able to have end-to-end headers removed that carry meaning for the engine.
            tokens.discard(b"content-type")
            if tokens:
                named = tokens if named is None else named | tokens
    return named
