"""Chunked coding, cut anywhere and broken anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import UpstreamProtocol
from gateway.core.framing import ChunkedDecoder, ChunkError, encode_chunk, parse_response_head, whole_chunks

payloads = st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.just(b"x" * 300)), max_size=8)
extensions = st.sampled_from([b"", b"", b"", b";a", b" ; a=b", b';a="b;c"'])
trailers = st.sampled_from([b"", b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n"])


@st.composite
def coded(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A payload and a chunked coding of it."""
    parts = draw(payloads)
    out = b""
    for part in parts:
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"00%X"])) % len(part)
        out += size + draw(extensions) + b"\r\n" + part + b"\r\n"
    out += draw(st.sampled_from([b"0", b"000"])) + draw(extensions) + b"\r\n" + draw(trailers) + b"\r\n"
    return b"".join(parts), out


def pieces_of(data: st.DataObject, stream: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@given(coded(), st.binary(max_size=5), st.data())
def test_payload_comes_out_whole_for_every_cut(
    coded: tuple[bytes, bytes], behind: bytes, data: st.DataObject
) -> None:
    payload, stream = coded
    decoder = ChunkedDecoder()
    out = b"".join(decoder.feed(piece) for piece in pieces_of(data, stream + behind))
    assert out == payload
    assert decoder.done
    assert decoder.leftover == behind


@given(coded(), st.data())
def test_stream_that_stops_early_is_never_done(coded: tuple[bytes, bytes], data: st.DataObject) -> None:
    payload, stream = coded
    end = data.draw(st.integers(0, len(stream) - 1))
    decoder = ChunkedDecoder()
    out = b"".join(decoder.feed(piece) for piece in pieces_of(data, stream[:end]))
    assert payload.startswith(out)
    assert not decoder.done


@given(coded(), st.data())
def test_cuts_make_no_difference_to_what_a_broken_stream_yields(
    coded: tuple[bytes, bytes], data: st.DataObject
) -> None:
    stream = bytearray(coded[1])
    stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))

    def decode(pieces: list[bytes]) -> tuple[bytes, bool, bytes, bool]:
        decoder = ChunkedDecoder()
        out = b""
        try:
            for piece in pieces:
                out += decoder.feed(piece)
        except ChunkError:
            return b"", False, b"", True
        return out, decoder.done, decoder.leftover, False

    whole = bytes(stream)
    assert decode(pieces_of(data, whole)) == decode([whole])


@given(
    st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=6),
    st.sampled_from([b"", b"\r", b"0\r\n\r\n"]),
)
def test_whole_chunks_are_recognised_only_without_a_rest(parts: list[bytes], rest: bytes) -> None:
    stream = b"".join(b"".join(encode_chunk(part)) for part in parts)
    assert whole_chunks(stream + rest) == (b"".join(parts) if not rest else None)


@given(st.binary(max_size=60))
def test_whole_chunks_agrees_with_the_decoder(data: bytes) -> None:
    payload = whole_chunks(data)
    if payload is not None:
        decoder = ChunkedDecoder()
        assert b"".join(decoder.feed(data[at : at + 1]) for at in range(len(data))) == payload
        assert decoder.is_between_chunks


@given(
    st.lists(
        st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", b"\r\n", b" x\r\n", b"\x00", b":", b"9"]),
        max_size=8,
    )
)
def test_head_is_whole_incomplete_or_refused(parts: list[bytes]) -> None:
    data = b"".join(parts)
    try:
        head = parse_response_head(data)
    except UpstreamProtocol:
        return
    if head is not None:
        assert data[: head.consumed].endswith((b"\r\n\r\n", b"\n\n"))


@pytest.mark.parametrize("cut", range(1, 60))
def test_head_cut_at_any_byte_is_incomplete(cut: int) -> None:
    data = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nA: b\r\n\r\n"
    if cut < len(data):
        assert parse_response_head(data[:cut]) is None
    else:
        assert parse_response_head(data) is not None
