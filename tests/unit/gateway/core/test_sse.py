from __future__ import annotations

import json

import pytest

from gateway.core import errors
from gateway.core.sse import EventTooLarge, SseRelay, empty_chunk_event
from gateway.core.usage import Usage
from tests.support.sse_reference import data_of_events

DONE = b"data: [DONE]\n\n"


def chunk(**members: object) -> bytes:
    return b"data: " + json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str, **members: object) -> bytes:
    return chunk(id="c", model="m-int", choices=[{"index": 0, "delta": {"content": text}}], **members)


USAGE = chunk(id="c", model="m-int", choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})


def test_b01_character_cut_between_reads_comes_out_whole() -> None:
    stream = delta("北京🙂") + USAGE + DONE
    relay = SseRelay()
    out = b"".join(relay.feed(stream[at : at + 1]) for at in range(len(stream)))
    assert out == stream
    assert "北京🙂" in out.decode()
    assert relay.usage == Usage(7, 2, None)
    assert relay.first_data


def test_b03_event_of_megabytes_goes_out_intact_and_the_next_one_too() -> None:
    big, relay = delta("x" * (4 << 20)), SseRelay()
    stream = big + DONE
    out = [relay.feed(stream[at : at + 65536]) for at in range(0, len(stream), 65536)]
    assert b"".join(out) == stream
    assert relay.saw_done


def test_b03_event_above_the_limit_is_an_error_and_not_silence() -> None:
    relay = SseRelay(max_event_bytes=1000)
    relay.feed(delta("a") + b"data: " + b"x" * 900)
    with pytest.raises(EventTooLarge):
        relay.feed(b"x" * 200)
    relay.discard()
    assert relay.finish() == b""


def test_b03_many_small_events_are_no_large_one() -> None:
    relay = SseRelay(max_event_bytes=1000)
    stream = delta("a") * 100
    assert relay.feed(stream[:-1]) + relay.feed(stream[-1:]) == stream


def test_b05_error_event_is_not_glued_to_half_an_event() -> None:
    relay = SseRelay()
    out = relay.feed(delta("a") + b'data: {"choices":[{"del')
    assert relay.has_partial
    relay.discard()
    out += errors.sse_event(errors.StreamBroken())
    events = [json.loads(data) for data in data_of_events(out)]
    assert events[-1]["error"]["code"] == "upstream_interrupted"
    assert len(events) == 2


def test_b09_usage_is_recorded_and_its_chunk_withheld_from_who_did_not_ask() -> None:
    stream = delta("a") + USAGE + DONE
    asked, not_asked = SseRelay(), SseRelay(withhold_usage=True)
    assert asked.feed(stream) == stream
    assert not_asked.feed(stream) == delta("a") + DONE
    assert asked.usage == not_asked.usage == Usage(7, 2, None)


def test_b09_chunk_with_choices_is_never_withheld() -> None:
    last = delta("end", usage={"prompt_tokens": 7, "completion_tokens": 2})
    relay = SseRelay(withhold_usage=True)
    assert relay.feed(last) == last
    assert relay.usage == Usage(7, 2, None)


def test_b09_chunk_without_choices_and_without_usage_is_not_withheld() -> None:
    first = chunk(choices=[], usage=None, prompt_filter_results=[])
    assert SseRelay(withhold_usage=True).feed(first) == first


def test_b11_half_an_event_waits_for_the_rest_and_nothing_else_does() -> None:
    three, fourth = delta("a") + delta("b") + delta("c"), delta("d")
    relay = SseRelay()
    assert relay.feed(three + fourth[:20]) == three
    assert relay.feed(fourth[20:]) == fourth


def test_b13_members_this_gateway_does_not_know_keep_their_names() -> None:
    event = chunk(
        model="m-int", choices=[{"delta": {"reasoning_content": "hm", "reasoning": None}}], usage=None
    )
    assert SseRelay(withhold_usage=True).feed(event) is event
    renamed = SseRelay(rename=("m-int", "chat")).feed(event)
    assert renamed == event.replace(b"m-int", b"chat")


def test_b59_explicit_zero_is_recorded() -> None:
    relay = SseRelay()
    relay.feed(chunk(choices=[], usage={"prompt_tokens": 0, "completion_tokens": 0}))
    assert relay.usage == Usage(0, 0, None)


def test_b63_null_usage_is_tolerated_and_the_last_report_counts() -> None:
    relay = SseRelay()
    relay.feed(delta("a", usage=None) + delta("b", usage=None))
    assert relay.usage is None
    relay.feed(delta("c", usage={"prompt_tokens": 7, "completion_tokens": 3}) + delta("d", usage=None) + DONE)
    assert relay.usage == Usage(7, 3, None)


@pytest.mark.parametrize("at_once", [True, False])
def test_b63_continuous_usage_is_not_added_up(at_once: bool) -> None:
    events = [delta("x", usage={"prompt_tokens": 7, "completion_tokens": n}) for n in range(1, 21)]
    relay = SseRelay()
    for piece in [b"".join(events)] if at_once else events:
        relay.feed(piece)
    assert relay.usage == Usage(7, 20, None)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'data: {"model":"m-int","choices":[]}\n\n', b'data: {"model":"chat","choices":[]}\n\n'),
        (
            b'data: {"choices":[{"a":1}],"model":"m-int"}\n\n',
            b'data: {"choices":[{"a":1}],"model":"chat"}\n\n',
        ),
        (b'data: {"model" : "m-int"}\r\n\r\n', b'data: {"model" : "chat"}\r\n\r\n'),
        (b'data: {"a":{"model":"m-int"}}\n\n', b'data: {"a":{"model":"m-int"}}\n\n'),
        (
            b'data: {"a":{"model":"m-int"},"model":"m-int"}\n\n',
            b'data: {"a":{"model":"m-int"},"model":"chat"}\n\n',
        ),
        (
            b'data: {"model":"m-int","a":{"model":"m-int"}}\n\n',
            b'data: {"model":"chat","a":{"model":"m-int"}}\n\n',
        ),
        (b'data: {"model":"/models/x.gguf"}\n\n', b'data: {"model":"chat"}\n\n'),
        (b'data: {"x\\"model":"m-int"}\n\n', b'data: {"x\\"model":"m-int"}\n\n'),
        (b'data: {"t":"\\"model\\":\\"m-int\\""}\n\n', b'data: {"t":"\\"model\\":\\"m-int\\""}\n\n'),
        (b': {"model":"m-int"}\n\n', b': {"model":"m-int"}\n\n'),
        (b': ,"model":"m-int"}\n\n', b': ,"model":"m-int"}\n\n'),
        (b'event: e\ndata: {"model":"m-int"}\n\n', b'event: e\ndata: {"model":"chat"}\n\n'),
        (b'data: {\ndata: "model":"m-int"}\n\n', b'data: {\ndata: "model":"chat"}\n\n'),
        (b'data: {"model":null}\n\n', b'data: {"model":null}\n\n'),
        (b'data: {"response":{"model":"m-int"}}\n\n', b'data: {"response":{"model":"chat"}}\n\n'),
        (b"data: model\n\n", b"data: model\n\n"),
    ],
)
@pytest.mark.parametrize(
    "before", [b"", b'data: {"id":"1","model":"m-int"}\n\n', b'data: {"model":"other"}\n\n']
)
def test_b91_model_is_renamed_in_the_top_level_of_an_event_only(
    event: bytes, expected: bytes, before: bytes
) -> None:
    relay = SseRelay(rename=("m-int", "chat"))
    relay.feed(before)
    assert relay.feed(event) == expected


@pytest.mark.parametrize(
    "event", [b'data: {"model":\n\n', b'data: ["model"\n\n', b"data: " + b"[" * 9999 + b'"model"\n\n']
)
def test_b91_event_that_is_not_json_passes(event: bytes) -> None:
    assert SseRelay(rename=("m-int", "chat")).feed(event) == event


def test_b91_names_with_quotes_are_escaped() -> None:
    out = SseRelay(rename=("m-int", 'my "model"')).feed(delta("a"))
    assert json.loads(out[6:])["model"] == 'my "model"'


def test_b91_every_event_of_a_burst_is_renamed() -> None:
    burst = b"".join(delta(str(n)) for n in range(20)) + DONE
    assert SseRelay(rename=("m-int", "chat")).feed(burst) == burst.replace(b"m-int", b"chat")


def test_engine_that_uses_the_requested_name_itself_costs_no_copy() -> None:
    relay, event = SseRelay(rename=("m-int", "chat")), chunk(id="1", model="chat", choices=[])
    relay.feed(event)
    assert relay.feed(event) is event


def test_comment_alone_is_not_the_first_data() -> None:
    relay = SseRelay()
    relay.feed(b": ping\n\n")
    assert not relay.first_data
    relay.feed(delta("a"))
    assert relay.first_data


def test_error_event_and_end_mark_are_noticed_though_reads_come_between() -> None:
    relay = SseRelay()
    relay.feed(delta("a"))
    relay.feed(b'data: {"error":{"message":"x"}}\n\n')
    relay.feed(DONE)
    assert relay.saw_error
    assert relay.saw_done


def test_sign_of_life_is_a_chunk_without_choices() -> None:
    event = empty_chunk_event("req-1", 'a "b"')
    assert event.endswith(b"\n\n")
    data = json.loads(event[6:])
    assert data["choices"] == []
    assert data["model"] == 'a "b"'
