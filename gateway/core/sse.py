"""Event streams on their way to a client: whole events out, bytes unchanged, usage read in passing.

Rules:
    - What goes out is what came in, byte for byte, except for an event that is withheld and a model name that
      is renamed. An event goes out as soon as its last byte is in; the beginning of one is held.
    - So what has gone out always ends between two events, and an error event can follow.
    - Lines end with LF, CRLF or CR, in any mixture. An event ends with an empty line: with two line ends in a
      row, which as bytes is one of LF LF, LF CR, CR CR (an LF behind such a CR belongs to it).
    - Nothing is decoded as text: a read may end inside a character. JSON is parsed only in whole events in
      which a substring says that it is worth it.

The cheap case is a read that holds whole events and nothing of interest: `feed` returns the object it was
given, and the relay can pass on the bytes it has read.

Source: WHATWG HTML 9.2.6 for the stream format; SPIKE section 5 for the costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec
import orjson

from conf.errors import LlmgwError
from gateway.core.body import find_member
from gateway.core.shapes import decode_event
from gateway.core.usage import Usage, usage_of

MAX_EVENT_BYTES: Final = 64 * 2**20

_REMEMBERED_BYTES: Final = 16 * 1024
_BOM: Final = b"\xef\xbb\xbf"
_WHOLE_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_NAME_PATHS: Final = (("model",), ("response", "model"), ("message", "model"))
"""Where events carry the model's name: chunks of chat and completions, responses, messages."""

# A line starts at the beginning or behind a line end; a BOM may precede the first one of a stream.
_has_data = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n])data[:\r\n]").search
_has_done = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n])data: ?\[DONE\]").search
_has_error_line = re.compile(rb"(?:\A|[\r\n])(?:event: ?error[\r\n]|error:)").search
_find_boundary = re.compile(rb"(?:\r\n|\n)(?:\r\n?|\n)|\r\r\n?").finditer
_usage_object = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*\{').search
_flat_beginning = re.compile(rb"data: ?\{[^{}\[\]\\\r\n]*").fullmatch
_flat_ending = re.compile(rb"[^{}\[\]\\\r\n]*\}(?:\r\n|\n|\r){2}").fullmatch
_one_line_before = re.compile(rb"data:[^\r\n]*[{,]").fullmatch
_key_before = re.compile(rb'"model"[ \t]*:[ \t]*\Z').search


class EventTooLarge(LlmgwError):
    """An event is longer than the limit; the stream has to be broken off."""


class SseRelay:
    """One event stream.

    Attributes:
        usage: what the engine reported so far, the last report of each count; None: nothing yet.
        first_data: an event with data went out, a comment alone does not count.
    """

    __slots__ = (
        "_before",
        "_held",
        "_held_bytes",
        "_latest",
        "_looks_closer",
        "_max_event_bytes",
        "_needle",
        "_replacement",
        "_requested",
        "_withhold_usage",
        "first_data",
        "usage",
    )

    def __init__(
        self,
        *,
        withhold_usage: bool = False,
        rename: tuple[str, str] | None = None,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        """Begin a stream.

        Args:
            withhold_usage: keep the usage chunk (no choices) from the client; it did not ask for it.
            rename: (name the engine knows the model by, name the client asked for). The second one stands
                in every event that names a model, whatever the engine calls it.
            max_event_bytes: most bytes of an unfinished event that are held.
        """
        self.usage: Usage | None = None
        self.first_data = False
        self._withhold_usage = withhold_usage
        self._max_event_bytes = max_event_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        # What went out last, in two pieces: nothing comes behind an error event but `[DONE]`, and looking for
        # the two in every event would cost as much as all the rest.
        self._before = self._latest = b""
        self._looks_closer = True
        self._requested = b""
        self._needle = self._replacement = b""
        if rename is not None:
            self._requested = orjson.dumps(rename[1])
            self._set_needle(b'"model":', orjson.dumps(rename[0]))

    @property
    def saw_done(self) -> bool:
        """Whether `[DONE]` is in what went out last."""
        return _has_done(self._latest) is not None or _has_done(self._before) is not None

    @property
    def saw_error(self) -> bool:
        """Whether an error event is in what went out last: the engine ended the stream by itself."""
        return _has_error(self._latest) or _has_error(self._before)

    @property
    def has_partial(self) -> bool:
        """Whether the beginning of an event is held."""
        return self._held_bytes > 0

    def feed(self, payload: bytes) -> bytes:
        """Take what was read and return what goes out now, b"" for nothing.

        Args:
            payload: any piece of the stream, without framing.

        Returns:
            Whole events. `payload` itself, the same object, when it holds whole events and nothing changes.

        Raises:
            EventTooLarge: the event under way is too long; only `discard` may follow.
        """
        if self._held_bytes or not payload.endswith(_WHOLE_ENDS):
            payload = self._split(payload)
            if not payload:
                return payload
        if self._looks_closer or b'"usage"' in payload:
            return self._pass(payload)
        self._before = self._latest
        self._latest = payload[-_REMEMBERED_BYTES:]
        return payload

    def finish(self) -> bytes:
        """End a stream that ended as it should: return what was held, though no empty line ended it."""
        if not self._held_bytes:
            return b""
        rest = b"".join(self._held)
        self.discard()
        return self._pass(rest)

    def discard(self) -> None:
        """Drop the beginning of an event: the stream broke off, and an error event is to follow."""
        self._held = []
        self._held_bytes = 0

    # Cutting.

    def _split(self, payload: bytes) -> bytes:
        """Return all up to the end of the last whole event; hold the rest."""
        end = _last_boundary(payload)
        if end < 0 and self._held_bytes:
            end = self._boundary_across(payload)
        if end < 0:
            if self._held_bytes:
                self._hold(payload)
                return b""
            # Line ends between two events, such as the LF of a boundary whose CR has gone out already.
            rest = payload.lstrip(b"\r\n")
            self._hold(rest)
            return payload[: len(payload) - len(rest)]
        whole = payload[:end]
        if self._held_bytes:
            self._held.append(whole)
            whole = b"".join(self._held)
            self.discard()
        self._hold(payload[end:])
        return whole

    def _boundary_across(self, payload: bytes) -> int:
        """Find a boundary that was cut between its two line ends; -1 for none."""
        pair = self._held[-1][-1:] + payload[:1]
        if pair == b"\n\n":
            return 1
        if pair in (b"\n\r", b"\r\r"):
            return 2 if payload[1:2] == b"\n" else 1
        return -1

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._held_bytes += len(piece)
            if self._held_bytes > self._max_event_bytes:
                raise EventTooLarge
            self._held.append(piece)

    # Looking.

    def _pass(self, events: bytes) -> bytes:
        """Look at whole events on their way out; return them, changed where they have to be."""
        if not self.first_data:
            self.first_data = _has_data(events) is not None
            self._looks_closer = not self.first_data or bool(self._requested)
        if b'"usage"' in events and _usage_object(events) is not None:
            events = self._take_usage(events)
        self._before = self._latest
        self._latest = events[-_REMEMBERED_BYTES:]
        if self._requested:
            events = self._rename(events)
        return events

    def _take_usage(self, events: bytes) -> bytes:
        """Read the usage, and take out the chunk that holds nothing else if it is to be withheld."""
        latest: Usage | None = None
        # From the end: the last report counts, and with continuous usage each event of a burst holds one.
        for event in _from_the_end(events):
            if b'"usage"' in event:
                usage = usage_of(_data_in_place(event))
                if usage is not None:
                    latest = usage if latest is None else usage.updated(latest)
                    if latest.prompt_tokens is not None and latest.completion_tokens is not None:
                        break
        if latest is not None:
            self.usage = latest if self.usage is None else self.usage.updated(latest)
        if not self._withhold_usage:
            return events
        pieces = list(split_events(events))
        kept = [piece for piece in pieces if b'"usage"' not in piece or not _is_usage_chunk(piece)]
        return events if len(kept) == len(pieces) else b"".join(kept)

    # Renaming.

    def _rename(self, events: bytes) -> bytes:
        renamed = self._rename_first(events)
        if renamed is not None:
            return renamed
        return b"".join([self._rename_event(event) for event in split_events(events)])

    def _rename_first(self, events: bytes) -> bytes | None:
        """Rename in the first line, if the only `model` stands there in the known spelling; else None.

        It stands in the top-level object if the text before it opens one brace and nothing else (vLLM,
        SGLang), or if the text behind it closes one brace and nothing else (llama.cpp, whose chunks begin
        with choices).
        """
        needle = self._needle
        at = events.find(needle)
        if at < 0 or events.find(b'"model"', at + 7) >= 0:
            return None
        behind = at + len(needle)
        if _flat_beginning(events, 0, at) is None and (
            _flat_ending(events, behind) is None or _one_line_before(events, 0, at) is None
        ):
            return None
        if needle == self._replacement:
            return events
        return events[:at] + self._replacement + events[behind:]

    def _rename_event(self, event: bytes) -> bytes:
        if b"model" not in event and b"\\u006" not in event:
            return event
        renamed = self._rename_first(event)
        if renamed is not None:
            return renamed
        data = _data_in_place(event)
        for path in _NAME_PATHS:
            try:
                found = find_member(data, path)
            except (msgspec.DecodeError, RecursionError):
                return event
            if found is None:
                continue
            start, end = found
            name = event[start:end]
            if name[:1] != b'"':
                return event
            key = _key_before(event, max(0, start - 16), start)
            if key is not None and len(path) == 1:
                self._set_needle(key[0], name)
            return event if name == self._requested else event[:start] + self._requested + event[end:]
        return event

    def _set_needle(self, key: bytes, name: bytes) -> None:
        """Remember how this engine spells the member, so that the next event is one search."""
        self._needle = key + name
        self._replacement = key + self._requested


def split_events(data: bytes) -> Iterator[bytes]:
    """Cut bytes behind each event's end; line ends between events are pieces too, and so is a rest."""
    start = 0
    if b"\r" not in data:
        end = data.find(b"\n\n")
        while end >= 0:
            yield data[start : end + 2]
            start = end + 2
            end = data.find(b"\n\n", start)
    else:
        for boundary in _find_boundary(data):
            yield data[start : boundary.end()]
            start = boundary.end()
    if start < len(data):
        yield data[start:]


def empty_chunk_event(request_id: str, model: str) -> bytes:
    """Make a chunk without choices: a sign of life for clients that take no comments."""
    chunk = {
        "id": request_id,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": [],
    }
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _last_boundary(payload: bytes) -> int:
    """Find where the last whole event ends; -1 when none does."""
    end = payload.rfind(b"\n\n") + 2
    if b"\r" in payload:
        for pair in (b"\n\r", b"\r\r"):
            at = payload.rfind(pair) + 2
            if at >= 2:
                end = max(end, at + 1 if payload[at : at + 1] == b"\n" else at)
    return end if end >= 2 else -1


def _data_in_place(event: bytes) -> bytes:
    """Blank everything but the data of an event; positions stay.

    A line end between two data lines is white space to JSON, so several of them can be parsed as they stand.
    """
    if event.startswith(b"data:"):
        line = event.rstrip(b"\r\n")
        if b"\n" not in line and b"\r" not in line:
            return b"     " + line[5:]
    lines = event.removeprefix(_BOM).splitlines(keepends=True)
    masked = [b"     " + line[5:] if line.startswith(b"data:") else b" " * len(line) for line in lines]
    return (b"   " if event.startswith(_BOM) else b"") + b"".join(masked)


def _from_the_end(events: bytes) -> Iterator[bytes]:
    """Yield what `split_events` yields, the last piece first."""
    if b"\r" in events:
        yield from reversed(list(split_events(events)))
        return
    end = len(events)
    while end > 0:
        start = events.rfind(b"\n\n", 0, end - 2) + 2
        if start < 2:
            start = 0
        yield events[start:end]
        end = start


def _is_usage_chunk(event: bytes) -> bool:
    try:
        chunk = decode_event(_data_in_place(event))
    except (msgspec.MsgspecError, RecursionError):
        return False
    return chunk.choices == [] and bytes(chunk.usage)[:1] == b"{"


def _has_error(events: bytes) -> bool:
    if b"error" not in events:
        return False
    return _has_error_line(events) is not None or any(map(_is_error, split_events(events)))


def _is_error(event: bytes) -> bool:
    if b'"error"' not in event:
        return False
    try:
        error = bytes(decode_event(_data_in_place(event)).error)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return error not in (b"", b"null")
