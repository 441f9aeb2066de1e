"""Whatever an engine sends, however it is cut: the client gets the same bytes, and no event late.

The engine sends a piece and waits until the client has every event in it; a relay that held an event back
would stop this test, not slow it down. No time is measured.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.accounts import wait_idle
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.raw_engine import LAST_CHUNK, RawEngine

DONE = b"data: [DONE]\n\n"
BODY = chat(stream_options={"include_usage": True})
CHUNKED, LENGTH, CLOSE = "chunked", "length", "close"


@dataclass(frozen=True)
class Stand:
    """A gateway and the engine behind it."""

    gateway: Gateway
    engine: RawEngine


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One gateway for all examples."""
    folder: Path = tmp_path_factory.mktemp("relay")
    programs = Programs(folder)
    gateways = Gateways(programs, folder)
    engine = RawEngine()
    try:
        yield Stand(gateways([endpoint("e", engine.url)], log={"level": "warning"}), engine)
    finally:
        engine.close()
        gateways.close()
        programs.close()


# What engines send.

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
texts = st.one_of(
    st.text(alphabet='aé北🙂\u2028\x00 :"\\', max_size=12).map(str.encode),
    st.binary(max_size=12).map(lambda data: data.translate(None, b"\r\n")),
    st.sampled_from([b"[DONE]", b'{"usage":null}', b'{"model":"x","usage":{}}', b"{", b"error"]),
    st.sampled_from([10_000, 70_000, 1_200_000]).map(lambda size: b"x" * size),
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line without its end, not empty."""
    name = draw(
        st.sampled_from([b"data: ", b"data:", b"data: {", b": ", b"event: ", b"id:", b"retry", b"", b"x"])
    )
    return (name + draw(texts)) or b":"


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """An event stream; its last event is `[DONE]`, so that it is whole."""
    out = [draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\n", b"\r\n"]))]
    for _ in range(draw(st.integers(0, 6))):
        ends = st.just(draw(line_ends)) if draw(st.booleans()) else line_ends
        out += [draw(lines()) + draw(ends) for _ in range(draw(st.integers(1, 3)))]
        out.append(draw(ends))
    return b"".join(out) + DONE


def cuts_of(draw: st.DrawFn, data: bytes, most: int = 8) -> list[bytes]:
    """Cut `data` at arbitrary places, likely ones among them."""
    likely = [match.start() + shift for match in re.finditer(rb"[\r\n]", data[:5000]) for shift in (0, 1)]
    place = st.integers(0, len(data))
    if likely:
        place = st.one_of(place, st.sampled_from(likely))
    places = sorted({0, len(data), *draw(st.lists(place, max_size=most))})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def whole_events(stream: bytes) -> int:
    """Return how many bytes of `stream` are whole events: as the standard says it, line by line."""
    at = end = 0
    while match := re.compile(rb"\r\n|\n|\r").search(stream, at):
        if match.start() == at or (at == 0 and stream[:3] == b"\xef\xbb\xbf" and match.start() == 3):
            end = match.end()
        at = match.end()
    return end


@st.composite
def chunked(draw: st.DrawFn, pieces: list[bytes]) -> list[bytes]:
    """Put pieces into chunks: cut finer, with extensions, odd sizes, trailers."""
    out = []
    for piece in pieces:
        framed = b""
        for part in cuts_of(draw, piece, 2):
            size = draw(st.sampled_from([b"%x", b"%X", b"000%x"])) % len(part)
            extension = draw(st.sampled_from([b"", b"", b"", b";a=b", b' ;q="1"']))
            framed += size + extension + b"\r\n" + part + b"\r\n"
        out.append(framed)
    return out


last_chunks = st.sampled_from([LAST_CHUNK, b"000\r\n\r\n", b"0;end\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n"])


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), framing=st.sampled_from([CHUNKED, CHUNKED, LENGTH, CLOSE]), http10=st.booleans())
def test_events_reach_the_client_whole_unchanged_and_before_the_next_byte(
    stand: Stand, data: st.DataObject, framing: str, http10: bool
) -> None:
    stream = data.draw(streams())
    pieces = cuts_of(data.draw, stream)
    wire = data.draw(chunked(pieces)) if framing == CHUNKED else pieces
    fields = {CHUNKED: b"transfer-encoding: chunked\r\n", LENGTH: b"content-length: %d\r\n" % len(stream)}
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + fields.get(framing, b"") + b"\r\n"
    is_head_apart = data.draw(st.booleans())
    with RawClient(stand.gateway.url, timeout=20) as client:
        client.post(BODY, http10=http10)
        request = stand.engine.next_request()
        if is_head_apart:
            request.send(head)
            assert client.status == 200
            head = b""
        sent = b""
        for piece, framed in zip(pieces, wire, strict=True):
            request.send(head + framed)
            head = b""
            sent += piece
            assert client.read_until(whole_events(sent)) == stream[: len(client.payload)]
        if framing == CHUNKED:
            request.send(data.draw(last_chunks))
        request.close() if framing == CLOSE else request.finish()
        assert client.read_all() == stream


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), framing=st.sampled_from([CHUNKED, LENGTH, CLOSE]), http10=st.booleans())
def test_other_bodies_reach_the_client_unchanged_each_byte_before_the_next(
    stand: Stand, data: st.DataObject, framing: str, http10: bool
) -> None:
    body = data.draw(st.one_of(st.binary(max_size=300), st.sampled_from([70_000, 1_100_000]).map(bytes)))
    pieces = cuts_of(data.draw, body)
    wire = data.draw(chunked(pieces)) if framing == CHUNKED else pieces
    fields = {CHUNKED: b"transfer-encoding: chunked\r\n", LENGTH: b"content-length: %d\r\n" % len(body)}
    kind = data.draw(st.sampled_from([b"application/octet-stream", b"application/json", b"audio/mpeg"]))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n" % (kind, fields.get(framing, b""))
    with RawClient(stand.gateway.url, timeout=20) as client:
        client.post(chat(stream=False), http10=http10, path="/v1/audio/speech")
        request = stand.engine.next_request()
        request.send(head)
        assert client.status == 200
        sent = 0
        for piece, framed in zip(pieces, wire, strict=True):
            request.send(framed)
            sent += len(piece)
            assert client.read_until(sent) == body[:sent]
        if framing == CHUNKED:
            request.send(data.draw(last_chunks))
        request.close() if framing == CLOSE else request.finish()
        assert client.read_all() == body


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), framing=st.sampled_from([CHUNKED, LENGTH]))
def test_a_stream_cut_anywhere_goes_out_up_to_its_last_whole_event_and_ends_with_an_error(
    stand: Stand, data: st.DataObject, framing: str
) -> None:
    stream = data.draw(streams())
    cut = data.draw(st.integers(0, len(stream) - 1))
    pieces = cuts_of(data.draw, stream[:cut])
    wire = data.draw(chunked(pieces)) if framing == CHUNKED else pieces
    fields = {CHUNKED: b"transfer-encoding: chunked\r\n", LENGTH: b"content-length: %d\r\n" % len(stream)}
    with RawClient(stand.gateway.url, timeout=20) as client:
        client.post(BODY)
        request = stand.engine.next_request()
        request.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + fields[framing] + b"\r\n")
        assert client.status == 200
        for framed in wire:
            request.send(framed)
        request.close()
        received = client.read_all()
        assert client.is_closed()
    before, _, error = received.rpartition(b'data: {"error":')
    assert b'"upstream_interrupted"' in error
    assert error.endswith(b"}\n\n")
    # A line end between two events may go out or not: it is part of none.
    assert stream.startswith(before)
    whole = whole_events(stream[:cut])
    assert len(before) >= whole
    assert not stream[whole : len(before)].strip(b"\r\n")


def test_connections_are_reused_and_nothing_is_left_in_flight(stand: Stand) -> None:
    wait_idle(stand.gateway)
    seen = len(stand.engine.requests)
    for _ in range(3):
        with RawClient(stand.gateway.url) as client:
            client.post(BODY)
            request = stand.engine.next_request()
            request.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 14\r\n\r\n" + DONE
            )
            assert client.read_all() == DONE
            request.finish()
    last = stand.engine.requests[seen:]
    assert last[-1].connection == last[0].connection
    assert last[-1].nth == last[0].nth + 2
