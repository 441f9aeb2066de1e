"""Reads what routing needs of a JSON body, and edits single members of it in place.

Rules:
    - Only `model` is required and has a type. What else is in a request is the engine's to judge; a field of
      an unexpected type reads as absent here and reaches the engine as it is.
    - An edit changes the bytes of one value, or adds one member, and nothing else. Nothing is re-encoded.
    - Of duplicate members the last one counts, as it does in Python's parser, msgspec and nlohmann
      (llama.cpp); it is the one that is read and the one that is edited.
    - Keys may be spelled with escapes ("\\u006dodel"). Values may hold lone surrogates, which Python clients
      send for text cut inside an emoji.

How a member is found. msgspec decodes an object into undecoded pieces (`Raw`); walking the keys and skipping
each value by the length of its piece gives positions without a scan in Python. Before that, `set_model` tries
a shortcut that is explained there.

Source: SPIKE section 5 for the costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import orjson
from msgspec import Raw

from gateway.core.errors import BadField, BadJson
from gateway.core.shapes import RequestShape, decode_members, decode_request, decode_stream_options

BYTES_PER_TOKEN: Final = 4
IMAGE_TOKENS: Final = 1000
"""Flat estimate of an image, audio or file part: what OpenAI charges for a larger image, rounded."""
MEDIA_BYTES_PER_TOKEN: Final = 4096
"""Added per so many bytes of encoded media; keeps 2 MB of it far below its length as text."""

_WS = rb"[ \t\r\n]*"
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'

_match_open = re.compile(_WS + rb"\{").match
_match_close = re.compile(_WS + rb"\}").match
_match_key = re.compile(_WS + rb"(" + _STRING + rb")" + _WS + rb":" + _WS, re.DOTALL).match
_match_separator = re.compile(_WS + rb"([,}])").match
_match_string = re.compile(_STRING, re.DOTALL).match
_match_scalar = re.compile(rb"[^ \t\r\n,\]}]+").match
_match_colon = re.compile(_WS + rb":" + _WS).match
_find_structure = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL).finditer

_surrogates = re.compile(
    rb"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}|\\u[dD][89a-fA-F][0-9A-Fa-f]{2}"
)
_byte_in_message = re.compile(r"\(byte (\d+)\)").search
_LOWER_LETTER_ESCAPE: Final = b"\\u006"
"""Start of the only escapes that can spell the letters of `model`."""
_SHORTCUT_MAX_BYTES: Final = 8 * 1024
"""Above this the three searches of the shortcut cost more than msgspec's one pass (bench/micro_core.py)."""


_TRUE: Final = frozenset(
    (
        b"true",
        b"1",
        b"1.0",
        *(b'"%b"' % text for text in (b"true", b"True", b"TRUE", b"1", b"yes", b"on", b"t", b"y")),
    )
)
"""What pydantic, and so vLLM and SGLang, take for true."""


class RequestBody:
    """What routing knows of a request's body.

    Attributes:
        model: the name the client asks for; never empty.
        stream: the client asks for an event stream.
        include_usage: the client asks for the usage chunk of a stream.
        has_stream_options: there is a member `stream_options`, whatever its value.
    """

    __slots__ = ("_wire", "has_stream_options", "include_usage", "model", "stream")

    def __init__(self, wire: RequestShape) -> None:
        self.model = wire.model
        self.stream = bytes(wire.stream) in _TRUE
        self.include_usage = False
        options = bytes(wire.stream_options)
        self.has_stream_options = bool(options)
        if options[:1] == b"{":
            with suppress(msgspec.MsgspecError):
                self.include_usage = bytes(decode_stream_options(options).include_usage) in _TRUE
        self._wire = wire

    def __repr__(self) -> str:
        return f"RequestBody(model={self.model!r}, stream={self.stream}, include_usage={self.include_usage})"

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate, under whichever name the client gave it."""
        wire = self._wire
        for raw in (wire.max_completion_tokens, wire.max_tokens, wire.max_output_tokens):
            count = _positive_int(raw)
            if count is not None:
                return count
        return None

    @property
    def n(self) -> int:
        """How many answers are asked for."""
        return _positive_int(self._wire.n) or 1

    @property
    def user(self) -> str | None:
        """OpenAI's `user`, if it is a string."""
        return _text(self._wire.user)

    @property
    def prompt_cache_key(self) -> str | None:
        """OpenAI's `prompt_cache_key`, if it is a string."""
        return _text(self._wire.prompt_cache_key)

    def prompt_token_estimate(self) -> int:
        """Estimate the tokens of the prompt; at least 1.

        Text counts a token for 4 bytes, a list of token ids its length, encoded media a flat sum.

        Source: plan §7.9.
        """
        wire = self._wire
        total = 0
        for raw in (wire.messages, wire.prompt, wire.input, wire.tools, wire.system, wire.instructions):
            total += _estimate(bytes(raw))
        return max(1, total + _estimate(bytes(wire.query)) + _estimate(bytes(wire.documents)))


def read_request(body: bytes) -> RequestBody:
    """Read the body of a request.

    The cost is one pass over the body in C; a body of megabytes holds up the worker for about 1 ms.

    Raises:
        BadJson: not JSON, or not UTF-8.
        BadField: not an object, or `model` is missing or not a string with something in it.
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as exc:
            raise BadJson(exc.start, "it is not UTF-8") from None
    try:
        try:
            wire = decode_request(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            wire = decode_request(_without_lone_surrogates(body))
    except msgspec.ValidationError as exc:
        raise _bad_field(str(exc)) from None
    except msgspec.DecodeError as exc:
        raise _bad_json(str(exc), body) from None
    except RecursionError:
        raise BadJson(0, "it is nested too deeply") from None
    if not wire.model:
        raise BadField("model", "'model' is empty; name the model to use.")
    return RequestBody(wire)


def unnamed(stream: bytes = b"") -> RequestBody:
    """Return what is known of a body that names no model, for who relays it all the same.

    Args:
        stream: its member `stream` as it is written.
    """
    return RequestBody(RequestShape(model="", stream=Raw(stream)))


def _bad_field(problem: str) -> BadField:
    if problem.endswith("`$.model`"):
        return BadField("model", "'model' must be a string.")
    if "missing required field" in problem:
        return BadField("model", "'model' is missing; name the model to use.", is_missing=True)
    return BadField(None, "The request body must be a JSON object.")


def _bad_json(problem: str, body: bytes) -> BadJson:
    found = _byte_in_message(problem)
    if found is not None:
        return BadJson(int(found[1]))
    return BadJson(len(body), "it is empty" if not body.strip() else "it ends too early")


def _without_lone_surrogates(data: bytes) -> bytes:
    """Return a copy of the same length that msgspec can read: it takes half a surrogate pair for the end."""
    if b"\\u" not in data:
        return data
    return _surrogates.sub(lambda match: match[0] if len(match[0]) == 12 else b"\\ufffd", data)


def _positive_int(raw: Raw) -> int | None:
    digits = bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < 19 else None


def _text(raw: Raw) -> str | None:
    value = bytes(raw)
    if value[:1] != b'"':
        return None
    try:
        return msgspec.json.decode(_without_lone_surrogates(value), type=str)
    except msgspec.MsgspecError:
        return None


# The estimate.

_find_url_key = re.compile(rb'"(?:image|video|audio)_url"[ \t\r\n]*:').findall
_find_audio_data = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*"').finditer


def _estimate(value: bytes) -> int:
    """Estimate the tokens of one member's undecoded value."""
    if not value or value == b"null":
        return 0
    if value[:1] == b"[" and b'"' not in value:
        # Lists of token ids, possibly a list of such lists: as many ids as commas and one.
        return value.count(b",") + 1 if value.strip(b"[] \t\r\n") else 0
    media_bytes = parts = 0
    if b'"type"' in value:  # as every part of a content list has
        media_bytes, parts = _data_urls(value)
        if b'_url"' in value:
            parts = max(parts, len(_find_url_key(value)))
        if b'"input_audio"' in value:
            for match in _find_audio_data(value):
                media_bytes += _end_of_string(value, match.end()) - match.end()
                parts += 1
    text = len(value) - media_bytes
    if value[:1] == b'"':
        text -= 2
    return -(-text // BYTES_PER_TOKEN) + parts * IMAGE_TOKENS + media_bytes // MEDIA_BYTES_PER_TOKEN


def _data_urls(value: bytes) -> tuple[int, int]:
    """Return how many bytes base64 data URLs take, and how many there are."""
    total = count = 0
    at = value.find(b'"data:')
    while at >= 0:
        comma = value.find(b";base64,", at, at + 256)
        end = _end_of_string(value, at + 1)
        if 0 <= comma < end:
            total += end - comma
            count += 1
        at = value.find(b'"data:', end)
    return total, count


def _end_of_string(value: bytes, start: int) -> int:
    """Find the quote that ends base64 text; escapes do not occur in it, so any quote does."""
    end = value.find(b'"', start)
    return len(value) if end < 0 else end


# Finding members.


def find_member(buffer: bytes, path: Sequence[str]) -> tuple[int, int] | None:
    """Find the value of a member of a JSON object without decoding it.

    Args:
        buffer: one JSON object, white space around it.
        path: keys from the top down.

    Returns:
        Start and end of the value's bytes; None when the path does not exist or leads through something that
        is not an object.

    Raises:
        msgspec.DecodeError: the buffer is not JSON.
        RecursionError: it is nested too deeply.
    """
    start, end = 0, len(buffer)
    for key in path:
        found = None
        for name, value_start, value_end in _members(buffer[start:end]):
            if name == key:
                found = start + value_start, start + value_end
        if found is None:
            return None
        start, end = found
    return start, end


def _members(buffer: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield key, start and end of value of each member, in order; nothing for what is not an object."""
    opened = _match_open(buffer)
    if opened is None:
        return
    readable = buffer
    try:
        values = decode_members(buffer)
    except msgspec.DecodeError:
        readable = _without_lone_surrogates(buffer)
        values = decode_members(readable)
    at = opened.end()
    while True:
        key = _match_key(readable, at)
        if key is None:
            return  # an empty object, since this is JSON
        name = _key_name(key[1])
        start = key.end()
        # The piece is that of the last member of this name. For another one of the same name it either
        # differs here or, if it is the beginning of a longer number, is not followed by a separator.
        value = bytes(values[name])
        end = start + len(value)
        separator = _match_separator(readable, end) if readable.startswith(value, start) else None
        if separator is None:
            end = _skip_value(readable, start)
            separator = _match_separator(readable, end)
        yield name, start, end
        if separator is None or separator[1] == b"}":
            return
        at = separator.end()


def _key_name(quoted: bytes) -> str:
    if b"\\" not in quoted:
        return quoted[1:-1].decode()
    return msgspec.json.decode(quoted, type=str)


def _skip_value(buffer: bytes, start: int) -> int:
    """Find the end of a value by scanning it; for duplicate members only."""
    first = buffer[start : start + 1]
    if first == b'"':
        match = _match_string(buffer, start)
        return len(buffer) if match is None else match.end()
    if first not in (b"{", b"["):
        match = _match_scalar(buffer, start)
        return len(buffer) if match is None else match.end()
    depth = 0
    for token in _find_structure(buffer, start):
        mark = buffer[token.start()]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return len(buffer)


# Edits.


def set_model(body: bytes, model: str) -> bytes:
    """Give a request another model name; only that value changes.

    Args:
        body: what `read_request` accepted.
        model: the name for the engine.
    """
    # NOTE: the shortcut. The body has a top-level member `model`. Without an escaped letter its key is
    # spelled `"model"` literally. So if these seven bytes occur once, that is the member, whatever else there
    # is: another key or a string with them in it would be a second occurrence.
    at = body.find(b'"model"') if len(body) <= _SHORTCUT_MAX_BYTES else -1
    if at >= 0 and body.find(b'"model"', at + 7) < 0 and _LOWER_LETTER_ESCAPE not in body:
        colon = _match_colon(body, at + 7)
        value = None if colon is None else _match_string(body, colon.end())
        if value is not None:
            return body[: value.start()] + orjson.dumps(model) + body[value.end() :]
    found = find_member(body, ("model",))
    if found is None:
        return body
    return body[: found[0]] + orjson.dumps(model) + body[found[1] :]


def rename_model(body: bytes, served: str, requested: str) -> bytes:
    """Put the name the client asked for into the top-level `model` of a response.

    Whatever name is there gives way: some engines answer with a file name instead of the served name.

    Args:
        body: a whole response body; what is not a JSON object is returned as it is.
        served: the name the engine was asked for.
        requested: the name the client asked for.
    """
    if served == requested or (b"model" not in body and _LOWER_LETTER_ESCAPE not in body):
        return body
    try:
        found = find_member(body, ("model",))
    except (msgspec.DecodeError, RecursionError):
        return body
    if found is None or body[found[0]] != 0x22:
        return body
    return body[: found[0]] + orjson.dumps(requested) + body[found[1] :]


def with_include_usage(body: bytes, request: RequestBody) -> bytes:
    """Ask the engine for the usage chunk; other stream options stay.

    A value of `stream_options` that is neither an object nor null is left to the engine to refuse.

    Args:
        body: as `read_request` read it, or with another model name since.
        request: what it made of it.
    """
    if not request.has_stream_options:
        return _with_first_member(body, 0, b'"stream_options":{"include_usage":true}')
    found = find_member(body, ("stream_options",))
    if found is None:
        return body
    start, end = found
    options = body[start:end]
    if options == b"null":
        return body[:start] + b'{"include_usage":true}' + body[end:]
    if options[:1] != b"{":
        return body
    flag = find_member(options, ("include_usage",))
    if flag is None:
        return _with_first_member(body, start, b'"include_usage":true')
    return body[: start + flag[0]] + b"true" + body[start + flag[1] :]


def _with_first_member(body: bytes, start: int, member: bytes) -> bytes:
    """Insert a member at the beginning of the object at `start`."""
    opened = _match_open(body, start)
    if opened is None:
        return body
    at = opened.end()
    return b"".join((body[:at], member, b"" if _match_close(body, at) else b",", body[at:]))
