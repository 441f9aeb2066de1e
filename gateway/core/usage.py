"""Token counts as engines report them.

Rules:
    - 0 is a value. Absent and null are "not reported" and leave what was known as it is.
    - Of several reports the last counts, field by field; reports are never added up. vLLM's continuous usage
      repeats the running total in every event.
    - A report of an unexpected shape is ignored: accounting never breaks a response.

Names differ: chat and completions say prompt and completion tokens, responses and messages input and output
tokens, inside `response` or `message` where an event wraps the object.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

import msgspec

from gateway.core.shapes import UsageShape, decode_response, decode_usage

WHOLE_BODY_BYTES = 64 * 1024
"""Up to this size a body is parsed as it is; of a longer one only the last so many bytes are looked at."""

USAGE_MAX_BYTES = 4096

_usage_object = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*\{').match
_braces = re.compile(rb"[{}]").finditer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; None: not reported.

    Attributes:
        prompt_tokens: of the prompt, cached ones included.
        completion_tokens: generated, reasoning included.
        cached_tokens: of the prompt, found in the engine's cache.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def updated(self, newer: Usage) -> Usage:
        """Return these counts with those of a later report in their place."""
        return Usage(
            self.prompt_tokens if newer.prompt_tokens is None else newer.prompt_tokens,
            self.completion_tokens if newer.completion_tokens is None else newer.completion_tokens,
            self.cached_tokens if newer.cached_tokens is None else newer.cached_tokens,
        )


def usage_of(data: bytes) -> Usage | None:
    """Read the usage of a response object or of an event's data.

    Args:
        data: one JSON object; anything else has no usage.

    Returns:
        None when there is none, it is null, or it cannot be understood.
    """
    try:
        body = decode_response(data)
        usage = body.usage
        if usage is None:
            inner = bytes(body.response) or bytes(body.message)
            if b'"usage"' in inner:
                usage = decode_response(inner).usage
    except (msgspec.MsgspecError, RecursionError):
        return None
    return None if usage is None else _counts(usage)


class UsageTap:
    """Reads the usage of a body that is not an event stream while it passes.

    Holds references to what was fed, at most about `WHOLE_BODY_BYTES` plus one piece.
    """

    __slots__ = ("_is_whole", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._is_whole = True

    def feed(self, data: bytes) -> None:
        """Take the next piece; the body's beginning is forgotten when it gets long."""
        parts = self._parts
        parts.append(data)
        self._size += len(data)
        while self._size - len(parts[0]) >= WHOLE_BODY_BYTES:
            self._size -= len(parts.popleft())
            self._is_whole = False

    def usage(self) -> Usage | None:
        """Read the usage of what was fed; for the end of the body."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if b'"usage"' not in data:
            return None
        if self._is_whole and len(data) <= 2 * WHOLE_BODY_BYTES:
            return usage_of(data)
        return _last_usage_in(data)


def usage_in(body: bytes) -> Usage | None:
    """Read the usage of a whole body that is not an event stream."""
    tap = UsageTap()
    tap.feed(body)
    return tap.usage()


def _last_usage_in(tail: bytes) -> Usage | None:
    """Read the last object named `usage` of a body whose beginning is not at hand.

    Quotes inside of strings are escaped, so `"usage":{` cannot stand in the text of an answer.
    """
    at = tail.rfind(b'"usage"')
    while at >= 0:
        found = _usage_object(tail, at)
        if found is not None:
            return _usage_at(tail, found.end() - 1)
        at = tail.rfind(b'"usage"', 0, at)
    return None


def _usage_at(data: bytes, start: int) -> Usage | None:
    """Read the usage object at `start`; no string in one holds a brace."""
    depth = 0
    for brace in _braces(data, start, start + USAGE_MAX_BYTES):
        depth += 1 if brace[0] == b"{" else -1
        if depth == 0:
            try:
                return _counts(decode_usage(data[start : brace.end()]))
            except msgspec.MsgspecError:
                return None
    return None


def _counts(usage: UsageShape) -> Usage:
    """Return the counts under their common names."""
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return Usage(
        usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
        usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens,
        usage.cache_read_input_tokens if details is None else details.cached_tokens,
    )
