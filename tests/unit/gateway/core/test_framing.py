from __future__ import annotations

import pytest

from gateway.core.errors import UpstreamProtocol
from gateway.core.framing import (
    CHUNK_LINE_MAX_BYTES,
    TRAILERS_MAX_BYTES,
    BodyFraming,
    ChunkedDecoder,
    ChunkError,
    FramingKind,
    ResponseHead,
    encode_chunk,
    parse_response_head,
)


def parsed(*lines: bytes, method: str = "POST") -> ResponseHead:
    head = parse_response_head(b"\r\n".join([*lines, b"", b""]), method=method)
    assert head is not None
    return head


def test_head_is_parsed_with_what_follows_left_alone() -> None:
    data = b"HTTP/1.1 200 All right\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nX:  y \r\n\r\nbody"
    head = parse_response_head(data)
    assert head is not None
    assert (head.status, head.reason) == (200, b"All right")
    assert head.headers == [(b"Content-Type", b"Text/Event-Stream; charset=utf-8"), (b"X", b"y")]
    assert data[head.consumed :] == b"body"
    assert head.content_type == b"text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("lines", "kind", "length", "keep_alive"),
    [
        ([b"HTTP/1.1 200 OK", b"Content-Length: 5"], FramingKind.LENGTH, 5, True),
        ([b"HTTP/1.1 200 OK", b"Content-Length: 0"], FramingKind.NONE, 0, True),
        ([b"HTTP/1.1 200 OK", b"content-length: 5", b"Content-Length: 5"], FramingKind.LENGTH, 5, True),
        ([b"HTTP/1.1 200 OK", b"Content-Length: 5, 5"], FramingKind.LENGTH, 5, True),
        ([b"HTTP/1.1 200 OK", b"Transfer-Encoding: Chunked"], FramingKind.CHUNKED, 0, True),
        ([b"HTTP/1.1 200 OK"], FramingKind.CLOSE, 0, False),
        ([b"HTTP/1.1 200 OK", b"Connection: Close", b"Content-Length: 5"], FramingKind.LENGTH, 5, False),
        ([b"HTTP/1.1 200 OK", b"Connection: x, close", b"Content-Length: 5"], FramingKind.LENGTH, 5, False),
        ([b"HTTP/1.0 200 OK", b"Content-Length: 5"], FramingKind.LENGTH, 5, False),
        ([b"HTTP/1.0 200 OK", b"Content-Length: 5", b"Connection: Keep-Alive"], FramingKind.LENGTH, 5, True),
        ([b"HTTP/1.1 204 No Content"], FramingKind.NONE, 0, True),
        ([b"HTTP/1.1 304 Not Modified", b"Content-Length: 5"], FramingKind.NONE, 0, True),
        ([b"HTTP/1.1 100 Continue"], FramingKind.NONE, 0, True),
    ],
)
def test_end_of_a_body_is_known_from_its_head(
    lines: list[bytes], kind: FramingKind, length: int, keep_alive: bool
) -> None:
    head = parsed(*lines)
    assert head.framing == BodyFraming(kind, length)
    assert head.keep_alive is keep_alive


def test_b33_chunked_beats_a_length_and_ends_the_connection() -> None:
    head = parsed(b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Transfer-Encoding: chunked")
    assert head.framing.kind is FramingKind.CHUNKED
    assert not head.keep_alive


def test_answer_to_head_has_no_body() -> None:
    assert parsed(b"HTTP/1.1 200 OK", b"Content-Length: 5", method="HEAD").framing.kind is FramingKind.NONE


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"SSH-2.0-OpenSSH",
        b"\x16\x03\x01",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\x00c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\n",
    ],
)
def test_head_that_leaves_a_doubt_is_refused(data: bytes) -> None:
    with pytest.raises(UpstreamProtocol):
        parse_response_head(data)


@pytest.mark.parametrize("data", [b"", b"HT", b"HTTP/1.", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nA: b\r\n"])
def test_head_that_has_not_all_come_is_waited_for(data: bytes) -> None:
    assert parse_response_head(data) is None


# Chunks.


def feed_in_pieces(data: bytes, size: int) -> None:
    decoder = ChunkedDecoder()
    for at in range(0, len(data), size):
        decoder.feed(data[at : at + size])


def test_chunk_of_nothing_is_not_sent_since_it_would_end_the_body() -> None:
    assert b"".join(encode_chunk(b"")) == b""
    assert b"".join(encode_chunk(b"x" * 26)) == b"1a\r\n" + b"x" * 26 + b"\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b" 1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b"1\na\r\n",
        b"1\r\nabc",
        b"1\r\na\rb",
        b"1\r\na\n\n",
        b"1\r\na0\r\n",
        b"1;a\x00\r\n",
        b"1;a\rb\r\n",
        b"1 2\r\n",
        b"11111111111111111\r\n",
        b"fffffffffffffff\r\n",
        b"0\r\nA: b\n\n",
        b"HTTP/1.1 200 OK\r\n",
        b"1\r\na\r\n2\r\nbbXX",
    ],
)
def test_what_is_not_chunked_coding_is_refused(data: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkedDecoder().feed(data)
    with pytest.raises(ChunkError):
        feed_in_pieces(data, 1)


@pytest.mark.parametrize("data", [b"data: x", b"z", b'{"a"', b"\n", b"12g"])
def test_garbage_is_noticed_without_waiting_for_the_end_of_its_line(data: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkedDecoder().feed(data)


@pytest.mark.parametrize(
    "data", [b"1;" + b"x" * CHUNK_LINE_MAX_BYTES, b"0\r\nA: " + b"x" * TRAILERS_MAX_BYTES]
)
def test_lines_without_end_are_refused(data: bytes) -> None:
    with pytest.raises(ChunkError):
        feed_in_pieces(data, 1000)


def test_trailers_without_end_are_refused() -> None:
    with pytest.raises(ChunkError):
        feed_in_pieces(b"0\r\n" + b"A: b\r\n" * TRAILERS_MAX_BYTES, 1000)


def test_decoder_says_when_the_next_byte_begins_a_chunk() -> None:
    decoder = ChunkedDecoder()
    assert decoder.is_between_chunks
    decoder.feed(b"2\r\na")
    assert not decoder.is_between_chunks
    decoder.feed(b"b\r\n")
    assert decoder.is_between_chunks
    decoder.feed(b"2")
    assert not decoder.is_between_chunks
