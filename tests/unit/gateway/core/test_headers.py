from __future__ import annotations

import random

import pytest

from gateway.core.headers import accept_request_id, client_header_lines, engine_request_head

CLIENT = [
    (b"Host", b"gateway:8080"),
    (b"X-One", b"1"),
    (b"authorization", b"Bearer sk-secret"),
    (b"X-Api-Key", b"sk-secret"),
    (b"api-key", b"sk-secret"),
    (b"Cookie", b"s=secret"),
    (b"Proxy-Authorization", b"Basic secret"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"7"),
    (b"Content-Encoding", b"gzip"),
    (b"Expect", b"100-continue"),
    (b"TE", b"trailers"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Connection", b"keep-alive, X-Hop"),
    (b"x-hop", b"secret"),
    (b"Accept-Encoding", b"gzip"),
    (b"X-LLMGW-Replica", b"secret"),
    (b"X-Request-ID", b"raw"),
    (b"traceparent", b"00-1-2-01"),
    (b"x-TWO", b"2"),
]


def request_lines(headers: list[tuple[bytes, bytes]], api_key: str | None = None) -> list[bytes]:
    head = engine_request_head(
        b"/v1/x?y=1", headers, host=b"node:9001", content_length=5, request_id="req-1", api_key=api_key
    )
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


def test_headers_reach_the_engine_in_their_order_and_spelling() -> None:
    lines = request_lines(CLIENT)
    assert lines[:2] == [b"POST /v1/x?y=1 HTTP/1.1", b"Host: node:9001"]
    passed = [b"X-One: 1", b"Content-Type: application/json", b"traceparent: 00-1-2-01", b"x-TWO: 2"]
    assert lines[2:-3] == passed
    assert lines[-3:] == [b"Accept-Encoding: identity", b"X-Request-Id: req-1", b"Content-Length: 5"]


def test_credentials_of_the_client_never_reach_an_engine() -> None:
    assert b"secret" not in b"".join(request_lines(CLIENT))


def test_engine_gets_its_own_key() -> None:
    assert b"Authorization: Bearer sk-engine" in request_lines(CLIENT, api_key="sk-engine")


def test_body_type_stays_even_if_connection_names_it() -> None:
    headers = [(b"Content-Type", b"application/json"), (b"Connection", b"content-type, close")]
    assert b"Content-Type: application/json" in request_lines(headers)


def test_b33_hop_by_hop_headers_and_framing_of_an_engine_end_here() -> None:
    lines = client_header_lines(
        [
            (b"Transfer-Encoding", b"chunked"),
            (b"Content-Length", b"5"),
            (b"Connection", b"x-foo, keep-alive"),
            (b"X-Foo", b"1"),
            (b"Keep-Alive", b"timeout=5"),
            (b"Upgrade", b"h2c"),
            (b"Trailer", b"X-Sum"),
            (b"Proxy-Authenticate", b"Basic"),
            (b"Content-Type", b"application/json"),
            (b"X-Bar", b"2"),
        ]
    )
    assert lines == b"Content-Type: application/json\r\nX-Bar: 2\r\n"


def test_engine_cannot_speak_for_the_gateway_or_set_cookies() -> None:
    headers = [
        (b"Server", b"uvicorn"),
        (b"x-llmgw-replica", b"me"),
        (b"Set-Cookie", b"a=b"),
        (b"x-request-id", b"1"),
    ]
    assert client_header_lines(headers) == b""


def test_connection_with_nothing_but_the_usual_tokens_drops_nothing_else() -> None:
    assert client_header_lines([(b"Connection", b"Keep-Alive, close"), (b"A", b"b")]) == b"A: b\r\n"


@pytest.mark.parametrize("value", [b"a", b"req-0123.4:5_6/7=8+9@x", b"x" * 128])
def test_b29_sound_request_id_of_the_client_is_kept(value: bytes) -> None:
    assert accept_request_id(value, random.Random(1)) == value.decode()


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"a\r\nFAKE",
        b"a\nb",
        b"a b",
        b"\x1b[31m",
        b"x" * 129,
        b"x" * 10_240,
        "é".encode(),
        b"a\x00",
        b'"',
        b"a%0d%0a\n",
    ],
)
def test_b29_unsound_request_id_is_replaced(value: bytes | None) -> None:
    first, second = (accept_request_id(value, random.Random(seed)) for seed in (1, 2))
    assert first != second
    assert first.isascii()
    assert first.startswith("req-")
    assert len(first) == 36
