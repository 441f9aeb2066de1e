from __future__ import annotations

import base64
import json

import pytest

from gateway.core.body import find_member, read_request, rename_model, set_model, with_include_usage
from gateway.core.errors import BadField, BadJson


@pytest.mark.parametrize("body", [b'{"model":', b"[]", b'"x"', b'{"model":5}', b"", b'{"model":"\xff"}'])
def test_b17_malformed_body_is_a_400_that_says_what_is_wrong(body: bytes) -> None:
    with pytest.raises((BadJson, BadField)) as caught:
        read_request(body)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"


def test_b17_message_says_where_the_json_broke() -> None:
    with pytest.raises(BadJson, match="at byte 15"):
        read_request(b'{"model": "a", , "n": 1}')


def test_b21_image_counts_flat_and_not_as_text() -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(2_000_000)).decode()
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": "a", "messages": [{"role": "user", "content": parts}]}).encode()
    assert 500 < read_request(body).prompt_token_estimate() < 5000


def test_b21_image_counts_flat_in_the_input_of_responses() -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(2_000_000)).decode()
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    assert (
        500
        < read_request(json.dumps({"model": "a", "input": [item]}).encode()).prompt_token_estimate()
        < 5000
    )


def test_b21_linked_image_and_audio_count_flat() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}}
    image = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    body = json.dumps({"model": "a", "messages": [{"role": "user", "content": [audio, image]}]}).encode()
    assert 2000 < read_request(body).prompt_token_estimate() < 2200


def test_b21_text_that_talks_about_data_urls_counts_as_text() -> None:
    text = "see data:image/png;base64," + "A" * 40_000
    body = json.dumps(
        {"model": "a", "messages": [{"role": "user", "content": text}], "x": {"type": 1}}
    ).encode()
    assert read_request(body).prompt_token_estimate() > 10_000


@pytest.mark.parametrize(
    ("member", "estimate"),
    [
        (b'"input":[[1,2,3],[4]]', 4),
        (b'"input":[1,2,3]', 3),
        (b'"prompt":[[1, 2], [3]]', 3),
        (b'"prompt":[]', 1),
        (b'"input":"x"', 1),
        (b'"input":"' + b"x" * 400 + b'"', 100),
    ],
)
def test_b87_token_ids_count_as_they_are(member: bytes, estimate: int) -> None:
    assert read_request(b'{"model":"a",' + member + b"}").prompt_token_estimate() == estimate


def test_b87_token_ids_reach_the_engine_as_they_are() -> None:
    body = b'{"model":"a","input":[[1,2, 3],[4]]}'
    assert set_model(body, "b") == b'{"model":"b","input":[[1,2, 3],[4]]}'


def test_tools_and_instructions_belong_to_the_prompt() -> None:
    bare = read_request(b'{"model":"a","input":"hi"}').prompt_token_estimate()
    full = read_request(b'{"model":"a","input":"hi","tools":[{"name":"lookup"}],"instructions":"be kind"}')
    assert full.prompt_token_estimate() > bare + 5


def test_user_and_cache_key_are_text_or_nothing() -> None:
    request = read_request(b'{"model":"a","user":"u\\u0041\\ud800","prompt_cache_key":7}')
    assert request.user is not None
    assert request.user.startswith("uA")
    assert request.prompt_cache_key is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"messages":[{"model":"x"}],"model":"a"}', b'{"messages":[{"model":"x"}],"model":"new"}'),
        (b'{"model":"a","t":"\\"model\\":\\"a\\""}', b'{"model":"new","t":"\\"model\\":\\"a\\""}'),
        (b'{"model":"a","model" : "b"}', b'{"model":"a","model" : "new"}'),
        (b'{"\\u006dodel":"a","x":{"model":"b"}}', b'{"\\u006dodel":"new","x":{"model":"b"}}'),
        (b'{"x":["model",":"],"model"\n:\t"a" }', b'{"x":["model",":"],"model"\n:\t"new" }'),
        (b'{"model":"a","model":1,"model":"b"}', None),
    ],
)
def test_b91_only_the_top_level_model_of_a_request_changes(body: bytes, expected: bytes | None) -> None:
    if expected is None:
        with pytest.raises(BadField):
            read_request(body)
    else:
        assert set_model(body, "new") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{"choices":[{"model":"m-int"}],"model":"m-int"}',
            b'{"choices":[{"model":"m-int"}],"model":"chat"}',
        ),
        (b'{"model":"/models/some-file.gguf"}', b'{"model":"chat"}'),
        (b'{"model":"chat"}', b'{"model":"chat"}'),
        (b'{"model":null}', b'{"model":null}'),
        (b'{"choices":[{"model":"m-int"}]}', b'{"choices":[{"model":"m-int"}]}'),
        (b'[{"model":"m-int"}]', b'[{"model":"m-int"}]'),
        (b'{"model":"m-int"', b'{"model":"m-int"'),
        (b"model", b"model"),
        (b"", b""),
    ],
)
def test_b91_only_the_top_level_model_of_a_response_changes(body: bytes, expected: bytes) -> None:
    assert rename_model(body, "m-int", "chat") == expected


def test_edit_that_changes_nothing_returns_the_body_itself() -> None:
    body = b'{"model":"a"}'
    assert rename_model(body, "a", "a") is body


def test_b09_other_stream_options_stay_when_usage_is_asked_for() -> None:
    body = b'{"model":"a","stream":true,"stream_options":{"continuous_usage_stats":true}}'
    edited = json.loads(with_include_usage(body, read_request(body)))
    assert edited["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_stream_options_of_a_wrong_type_are_left_to_the_engine() -> None:
    body = b'{"model":"a","stream":true,"stream_options":[1]}'
    assert with_include_usage(body, read_request(body)) == body


def test_find_member_goes_down_a_path() -> None:
    body = b'{"a":{"b":[1], "b" : {"c":"x"}},"d":1}'
    span = find_member(body, ("a", "b", "c"))
    assert span is not None
    assert body[slice(*span)] == b'"x"'
    assert find_member(body, ("d", "b")) is None
    assert find_member(body, ("a", "x")) is None
