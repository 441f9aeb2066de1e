"""Edits of a body change the bytes of one value, whatever stands around it."""

from __future__ import annotations

import json

from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.core.body import find_member, read_request, rename_model, set_model, with_include_usage

white = st.sampled_from([b"", b"", b" ", b"\n\t", b" \r\n"])
characters = st.sampled_from(
    [
        b"a",
        b"model",
        b'\\"model\\"',
        b'\\"',
        b"\\\\",
        b"\\u006d",
        b"\\ud83d\\ude00",
        b"\\ud800",
        "é🙂".encode(),
        b"{",
        b"]",
        b",",
        b":",
        b" ",
    ]
)
strings = st.lists(characters, max_size=5).map(lambda parts: b'"' + b"".join(parts) + b'"')
scalars = st.one_of(
    strings,
    st.sampled_from(
        [b"null", b"true", b"false", b"0", b"1", b"12", b"12.5", b"-1e3", b"1e999", b'""', b"[]", b"{}"]
    ),
)
model_keys = st.sampled_from([b'"model"', b'"model"', b'"\\u006dodel"', b'"mo\\u0064el"'])
keys = st.one_of(
    strings,
    model_keys,
    st.sampled_from(
        [b'"messages"', b'"stream_options"', b'"stream"', b'"Model"', b'"models"', b'"x\\"model"']
    ),
)


@st.composite
def containers(draw: st.DrawFn, inner: st.SearchStrategy[bytes]) -> bytes:
    items = draw(st.lists(inner, max_size=4))
    space = draw(white)
    if draw(st.booleans()):
        return b"[" + space + (space + b"," + space).join(items) + space + b"]"
    members = [draw(keys) + space + b":" + space + item for item in items]
    return b"{" + space + (b"," + space).join(members) + space + b"}"


values = st.recursive(scalars, lambda inner: containers(inner), max_leaves=8)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, int, int]]]:
    """An object with a string `model`, and key, start and end of value of its members."""
    members = [(draw(keys), draw(values)) for _ in range(draw(st.integers(0, 5)))]
    members = [(key, value) for key, value in members if json.loads(key) != "model"]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        at = draw(st.integers(0, len(members)))
        members.insert(at, (draw(model_keys), draw(strings)))
    assume(json.loads([value for key, value in members if json.loads(key) == "model"][-1]))
    out = draw(white) + b"{"
    spans = []
    for index, (key, value) in enumerate(members):
        out += (b"," if index else b"") + draw(white) + key + draw(white) + b":" + draw(white)
        spans.append((json.loads(key), len(out), len(out) + len(value)))
        out += value + draw(white)
    return out + b"}" + draw(white), spans


def last(spans: list[tuple[str, int, int]], name: str) -> tuple[int, int] | None:
    found = [(start, end) for key, start, end in spans if key == name]
    return found[-1] if found else None


@given(bodies(), st.sampled_from(["m-int", 'with "quotes"', "ünï", ""]))
def test_set_model_changes_the_last_top_level_model_only(
    body: tuple[bytes, list[tuple[str, int, int]]], name: str
) -> None:
    text, spans = body
    span = last(spans, "model")
    assert span is not None
    edited = set_model(text, name)
    assert edited[: span[0]] == text[: span[0]]
    assert edited[len(edited) - len(text) + span[1] :] == text[span[1] :]
    assert json.loads(edited[span[0] : len(edited) - len(text) + span[1]]) == name
    assert rename_model(text, "anything", "m-int") == set_model(text, "m-int")


@given(bodies())
def test_long_bodies_are_edited_like_short_ones(body: tuple[bytes, list[tuple[str, int, int]]]) -> None:
    text, _ = body
    # Too long for the shortcut of `set_model`.
    padded = text + b" " * 9000
    assert set_model(padded, "m-int") == set_model(text, "m-int") + b" " * 9000


@given(bodies())
def test_every_member_is_found_where_it_stands(body: tuple[bytes, list[tuple[str, int, int]]]) -> None:
    text, spans = body
    for name, _, _ in spans:
        if "\ud800" not in name:
            assert find_member(text, (name,)) == last(spans, name)
    assert find_member(text, ("no such member",)) is None


@given(bodies())
def test_request_is_read_as_python_reads_it(body: tuple[bytes, list[tuple[str, int, int]]]) -> None:
    text, _ = body
    model = json.loads(text)["model"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert read_request(text).model.replace("\ufffd", "?") == model.replace("\ufffd", "?")


def with_options(options: bytes | None) -> bytes:
    member = b"" if options is None else b', "stream_options" :' + options
    return b' { "model":"a" , "x":{"stream_options":{"include_usage":false}}' + member + b', "y":[1]}'


@given(
    st.one_of(
        st.none(),
        st.sampled_from(
            [
                b"null",
                b"{}",
                b"{ }",
                b'{"include_usage":false}',
                b'{ "a":1 , "include_usage" : null }',
                b'{"include_usage":false,"include_usage":false}',
                b'{"continuous_usage_stats":true}',
                b'{"\\u0069nclude_usage":false}',
                b'{"x":{"include_usage":false}}',
            ]
        ),
    )
)
@example(b'{"include_usage":true}')
def test_include_usage_is_added_and_other_options_stay(options: bytes | None) -> None:
    body = with_options(options)
    edited = with_include_usage(body, read_request(body))
    before, after = json.loads(body), json.loads(edited)
    assert after.pop("stream_options") == {
        **(before.pop("stream_options", None) or {}),
        "include_usage": True,
    }
    assert after == before
    assert b'"x":{"stream_options":{"include_usage":false}}' in edited


@given(bodies())
def test_include_usage_leaves_every_other_byte(body: tuple[bytes, list[tuple[str, int, int]]]) -> None:
    text, spans = body
    edited = with_include_usage(text, read_request(text))
    span = last(spans, "stream_options")
    if span is None:
        assert edited.replace(b'"stream_options":{"include_usage":true},', b"", 1) == text
        return
    assert edited[: span[0]] == text[: span[0]]
    assert edited[len(edited) - len(text) + span[1] :] == text[span[1] :]
