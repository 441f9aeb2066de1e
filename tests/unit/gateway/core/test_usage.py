from __future__ import annotations

import json

import pytest

from gateway.core.usage import WHOLE_BODY_BYTES, Usage, UsageTap, usage_of


def tapped(body: bytes, size: int = 1000) -> Usage | None:
    tap = UsageTap()
    for at in range(0, len(body), size):
        tap.feed(body[at : at + size])
    return tap.usage()


def test_b59_zero_is_a_value_and_not_missing() -> None:
    assert usage_of(b'{"usage":{"prompt_tokens":0,"completion_tokens":0}}') == Usage(0, 0, None)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"usage":null}',
        b"[]",
        b"",
        b"{",
        b'{"usage":7}',
        b'{"usage":{"prompt_tokens":"7"}}',
        b'{"usage":[]}',
    ],
)
def test_usage_that_is_missing_or_odd_is_none(body: bytes) -> None:
    assert usage_of(body) is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}, Usage(5, 2, None)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}, Usage(5, None, 3)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, Usage(5, None, None)),
        (
            {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}},
            Usage(5, 2, 0),
        ),
        ({"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 4}, Usage(5, 2, 4)),
    ],
)
def test_usage_is_understood_in_all_spellings(usage: dict[str, object], expected: Usage) -> None:
    assert usage_of(json.dumps({"usage": usage}).encode()) == expected


def test_response_or_message_that_is_no_wrapper_does_not_hide_the_usage() -> None:
    assert usage_of(b'{"message":"hi","response":[1],"usage":{"prompt_tokens":1}}') == Usage(1, None, None)


def test_later_report_replaces_count_by_count() -> None:
    assert Usage(5, 1, 2).updated(Usage(None, 9, None)) == Usage(5, 9, 2)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_tap_reads_a_short_body_in_any_pieces(size: int) -> None:
    assert tapped(b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}', size) == Usage(
        5, 2, None
    )


def test_tap_does_not_take_the_usage_of_something_nested() -> None:
    assert tapped(b'{"choices":[{"usage":{"prompt_tokens":5}}]}') is None


def test_tap_reads_the_end_of_a_long_body_and_forgets_its_beginning() -> None:
    text = "x" * (3 * WHOLE_BODY_BYTES)
    body = json.dumps(
        {"data": text, "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}}
    )
    tap = UsageTap()
    for at in range(0, len(body), 4096):
        tap.feed(body[at : at + 4096].encode())
    assert sum(map(len, tap._parts)) <= WHOLE_BODY_BYTES + 4096
    assert tap.usage() == Usage(5, None, 1)


def test_tap_of_a_long_body_finds_no_usage_in_text() -> None:
    body = json.dumps({"text": "x" * (3 * WHOLE_BODY_BYTES) + '"usage":{"prompt_tokens":5}'})
    assert tapped(body.encode()) is None


def test_tap_of_nothing_is_none() -> None:
    assert UsageTap().usage() is None
