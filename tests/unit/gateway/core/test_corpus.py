"""Recorded and written cases: one file of bytes, one expectation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core import errors
from gateway.core.body import read_request
from gateway.core.sse import SseRelay
from gateway.core.usage import Usage, UsageTap
from tests.support.recordings import Recording, recordings
from tests.support.sse_reference import data_of_events, read_stream

CORPUS = Path(__file__).parents[3] / "corpus"
STREAMS = sorted((CORPUS / "sse").glob("*.sse"))
BODIES = sorted((CORPUS / "requests").glob("*.body"))
RECORDINGS = recordings()


def expectation(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text())  # type: ignore[no-any-return]


def named(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in paths]


@pytest.mark.parametrize("path", named(STREAMS))
def test_stream_cut_at_any_byte_goes_out_unchanged_and_on_time(path: Path) -> None:
    stream, expected = path.read_bytes(), expectation(path)
    reading = read_stream(stream)
    assert len(reading.ends) == expected["events"]
    for cut in range(len(stream) + 1):
        relay = SseRelay()
        out = relay.feed(stream[:cut])
        assert out == stream[: len(out)]
        assert len(out) >= max((end for end in reading.ends if end <= cut), default=0)
        assert len(out) in reading.rests
        out += relay.feed(stream[cut:])
        assert relay.has_partial is expected["partial"]
        assert out + relay.finish() == stream
        assert relay.usage == (Usage(**expected["usage"]) if expected["usage"] else None)
        assert relay.saw_done is expected["done"]
        assert relay.saw_error is expected["error"]


@pytest.mark.parametrize("path", named(STREAMS))
def test_withholding_takes_out_the_usage_chunk_and_nothing_else(path: Path) -> None:
    stream, expected = path.read_bytes(), expectation(path)
    events = data_of_events(stream)
    if expected["withheld"] is not None:
        del events[expected["withheld"]]
    for cut in range(len(stream) + 1):
        relay = SseRelay(withhold_usage=True)
        out = relay.feed(stream[:cut]) + relay.feed(stream[cut:]) + relay.finish()
        assert data_of_events(out) == events
        assert relay.usage == (Usage(**expected["usage"]) if expected["usage"] else None)


@pytest.mark.parametrize("path", named(STREAMS))
def test_renaming_changes_names_of_the_model_and_nothing_else(path: Path) -> None:
    stream = path.read_bytes()
    for cut in range(len(stream) + 1):
        relay = SseRelay(rename=("m-int", "chat"))
        out = relay.feed(stream[:cut]) + relay.feed(stream[cut:]) + relay.finish()
        assert out == stream.replace(b'"model":"m-int"', b'"model":"chat"')


@pytest.mark.parametrize("path", named(BODIES))
def test_request_body_is_read_or_refused_as_expected(path: Path) -> None:
    body, expected = path.read_bytes(), expectation(path)
    if "status" in expected:
        with pytest.raises(errors.ApiError) as caught:
            read_request(body)
        error = caught.value
        assert (error.status, error.code, error.param) == (400, expected["code"], expected["param"])
        assert getattr(error, "position", None) == expected["position"]
        return
    request = read_request(body)
    found = {name: getattr(request, name) for name in ("model", "stream", "include_usage", "max_tokens", "n")}
    assert found == {name: expected[name] for name in found}
    if expected["estimate"] is not None:
        assert request.prompt_token_estimate() == expected["estimate"]


def selected(*, stream: bool, failed: bool) -> list[Any]:
    return [
        pytest.param(each, id=each.name)
        for each in RECORDINGS
        if each.is_stream is stream and (each.status >= 400) is failed
    ]


@pytest.mark.parametrize("recording", selected(stream=True, failed=False))
def test_recorded_stream_goes_out_unchanged_for_every_cut(recording: Recording) -> None:
    stream = recording.body
    for cut in range(0, len(stream) + 1, 7):
        relay = SseRelay()
        assert relay.feed(stream[:cut]) + relay.feed(stream[cut:]) == stream.removesuffix(relay.finish())
        assert relay.saw_done
        assert not relay.saw_error
    if "usage" in recording.name:
        assert relay.usage is not None
        assert relay.usage.prompt_tokens
        assert relay.usage.completion_tokens


@pytest.mark.parametrize("recording", selected(stream=True, failed=False))
def test_recorded_stream_is_renamed_in_every_event(recording: Recording) -> None:
    relay = SseRelay(rename=("whatever", "chat"))
    out = b"".join(relay.feed(event + b"\n\n") for event in recording.body.rstrip(b"\n").split(b"\n\n"))
    for before, after in zip(data_of_events(recording.body), data_of_events(out), strict=True):
        if before != b"[DONE]":
            assert json.loads(after) == {**json.loads(before), "model": "chat"}


@pytest.mark.parametrize(
    "recording", [each for each in selected(stream=False, failed=False) if "v1_models" not in each.id]
)
def test_recorded_body_tells_its_usage(recording: Recording) -> None:
    tap = UsageTap()
    for at in range(0, len(recording.body), 100):
        tap.feed(recording.body[at : at + 100])
    reported = json.loads(recording.body)["usage"]
    usage = tap.usage()
    assert usage is not None
    assert usage.prompt_tokens == reported["prompt_tokens"]
    assert usage.completion_tokens == reported["completion_tokens"]


@pytest.mark.parametrize("recording", selected(stream=False, failed=True))
def test_recorded_error_reaches_the_client_in_openai_shape(recording: Recording) -> None:
    error = errors.from_upstream(recording.status, recording.content_type, recording.body, recording.headers)
    assert error.status == recording.status
    body = json.loads(error.body())
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    original = json.loads(recording.body)
    if "error" in original:
        assert error.body() == recording.body
    else:
        said = original.get("message") or original.get("detail")
        assert body["error"]["message"] == said
