"""Any stream, cut anywhere: the same bytes come out, each event as soon as it is whole."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.sse import SseRelay, split_events
from tests.support.sse_reference import data_of_events, read_stream

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
fragments = st.one_of(
    line_ends,
    line_ends,
    st.sampled_from(
        [b"data: ", b"data:", b": ping", b"event: x", b"[DONE]", b'{"usage":{', b"\xef\xbb\xbf", b'"error"']
    ),
    st.sampled_from(["北京🙂".encode(), b"\xff\x00", b" ", b'{"model":"m"}', b'"model":']),
    st.binary(max_size=6),
)
raw_streams = st.lists(fragments, max_size=40).map(b"".join)


@st.composite
def event_streams(draw: st.DrawFn) -> bytes:
    """Streams of whole events with JSON in them, with line ends of all kinds."""
    out = b""
    for _ in range(draw(st.integers(0, 8))):
        end = draw(line_ends)
        kind = draw(st.sampled_from(["chunk", "usage", "null", "comment", "text", "done"]))
        if kind == "comment":
            out += b": ping" + end + end
            continue
        chunk: object = {
            "id": "c",
            "model": draw(st.sampled_from(["m", "other", 'quo"te'])),
            "choices": [{"delta": {"content": draw(st.text(max_size=5)), "model": "m"}}],
        }
        if kind == "usage":
            chunk = {"choices": [], "model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        elif kind == "null":
            chunk = {"model": "m", "choices": [{"text": "x"}], "usage": None}
        text = b"[DONE]" if kind == "done" else json.dumps(chunk).encode()
        if kind == "text":
            text = draw(st.sampled_from([b"hello", b"model", b'"model":"m"', b"{", b"[]"]))
        out += b"data: " + text + end + end
    return out


@st.composite
def cut_up(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> list[bytes]:
    """A stream in pieces, some of them empty."""
    stream = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def relayed(relay: SseRelay, pieces: list[bytes]) -> bytes:
    return b"".join(relay.feed(piece) for piece in pieces) + relay.finish()


@given(cut_up(raw_streams))
@example([b"data: x\r\n\r", b"\n", b"data: y\n\n"])
@example([b"data: x\n", b"\n"])
@example([b"data: x\r", b"\r", b"\n"])
@example([b"data: x\r", b"\n\r\n"])
@example([b"\n", b"data: x\n\n"])
def test_whole_events_go_out_at_once_and_bytes_stay_as_they_are(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    reading = read_stream(stream)
    relay = SseRelay()
    out = b""
    read = 0
    for piece in pieces:
        out += relay.feed(piece)
        read += len(piece)
        assert out == stream[: len(out)]
        assert len(out) >= max((end for end in reading.ends if end <= read), default=0), (
            "an event was held back"
        )
        assert len(out) in reading.rests, "half an event went out"
        assert relay.has_partial is (len(out) < read)
    assert out + relay.finish() == stream


@given(cut_up(raw_streams))
def test_what_follows_a_broken_stream_is_an_event_of_its_own(pieces: list[bytes]) -> None:
    relay = SseRelay()
    out = b"".join(relay.feed(piece) for piece in pieces)
    relay.discard()
    mark = b"data: the error\n\n"
    assert data_of_events(out + mark) == [*data_of_events(out), b"the error"]


@given(st.lists(event_streams(), min_size=1, max_size=3))
def test_read_of_whole_events_goes_out_as_the_same_object(streams: list[bytes]) -> None:
    relay = SseRelay()
    for stream in streams:
        if not stream.endswith((b"\n\n", b"\r\n\r\n")):
            continue  # the last event ends with CR CR: one more look, one copy
        assert relay.feed(stream) is stream


@given(event_streams(), st.data())
def test_cuts_make_no_difference_to_what_is_changed(stream: bytes, data: st.DataObject) -> None:
    pieces = data.draw(cut_up(st.just(stream)))
    options = {"withhold_usage": True, "rename": ("m", "shown")}
    whole, cut = SseRelay(**options), SseRelay(**options)  # type: ignore[arg-type]
    assert relayed(cut, pieces) == relayed(whole, [stream])
    assert cut.usage == whole.usage
    assert cut.first_data is whole.first_data


@given(cut_up(event_streams()))
def test_withheld_and_renamed_stream_differs_in_nothing_else(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    out = relayed(SseRelay(withhold_usage=True, rename=("m", "shown")), pieces)
    expected = []
    for event in data_of_events(stream):
        try:
            chunk = json.loads(event)
        except ValueError:
            expected.append(event)
            continue
        if isinstance(chunk, dict):
            if chunk.get("usage") and chunk.get("choices") == []:
                continue
            chunk["model"] = "shown"
            event = json.dumps(chunk).encode()
        expected.append(event)
    assert data_of_events(out) == expected


@given(raw_streams)
def test_split_events_loses_no_byte(stream: bytes) -> None:
    assert b"".join(split_events(stream)) == stream
