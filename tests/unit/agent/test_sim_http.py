"""The simulated engine's HTTP reader, cut at every byte."""

from __future__ import annotations

import pytest

from agent.sim.http import BadRequestError, Request, RequestReader

SIZED = b"POST /v1/x?a=1 HTTP/1.1\r\nHost: h\r\nX-Odd:  v \r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
)
BARE = b"GET /health HTTP/1.0\r\n\r\n"


def read(*pieces: bytes) -> list[Request]:
    reader = RequestReader()
    found = []
    for piece in pieces:
        reader.feed(piece)
        while (request := reader.next()) is not None:
            found.append(request)
    assert reader.is_between_requests
    return found


@pytest.mark.parametrize("cut", range(1, len(SIZED + CHUNKED + BARE)))
def test_requests_are_the_same_wherever_they_are_cut(cut: int) -> None:
    data = SIZED + CHUNKED + BARE
    sized, chunked, bare = read(data[:cut], data[cut:])
    assert (sized.method, sized.path, sized.target, sized.body) == ("POST", "/v1/x", "/v1/x?a=1", b"hello")
    assert (b"X-Odd", b"v") in sized.raw_headers
    assert sized.headers[b"x-odd"] == b"v"
    assert (chunked.path, chunked.body, chunked.is_keep_alive) == ("/c", b"hello", True)
    assert (bare.body, bare.is_keep_alive) == (b"", False)


def test_requests_can_come_byte_by_byte() -> None:
    data = SIZED + CHUNKED
    assert [request.body for request in read(*(data[i : i + 1] for i in range(len(data))))] == [b"hello"] * 2


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"a" * 70_000,
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    reader = RequestReader()
    reader.feed(data)
    with pytest.raises(BadRequestError):
        reader.next()


def test_client_that_waits_for_continue_is_noticed() -> None:
    reader = RequestReader()
    reader.feed(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
    assert reader.next() is None
    assert reader.wants_continue
