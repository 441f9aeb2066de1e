"""A second, slow reading of event streams, one byte at a time, to compare `gateway.core.sse` with.

Written from WHATWG HTML 9.2.6 and sharing no code or idea with the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CR, LF = 13, 10


@dataclass
class Reading:
    """Where events end.

    Attributes:
        ends: offsets behind the byte that completed an event: an empty line after at least one other line.
        rests: offsets at which the stream is between two events; an error event may be put there.
    """

    ends: list[int] = field(default_factory=list)
    rests: set[int] = field(default_factory=lambda: {0})


def read_stream(stream: bytes) -> Reading:
    """Read a stream from its beginning."""
    reading = Reading()
    line_length = 0
    lines_in_event = 0
    after_cr = False
    for offset, byte in enumerate(stream, start=1):
        if byte == LF and after_cr:
            after_cr = False  # the second half of CRLF; the CR has ended the line
        elif byte in (CR, LF):
            after_cr = byte == CR
            if line_length:
                lines_in_event += 1
            elif lines_in_event:
                reading.ends.append(offset)
                lines_in_event = 0
            line_length = 0
        else:
            after_cr = False
            line_length += 1
        if not line_length and not lines_in_event:
            reading.rests.add(offset)
    return reading


def data_of_events(stream: bytes) -> list[bytes]:
    """Return the data of every event that a browser would dispatch."""
    events: list[bytes] = []
    lines: list[bytes] = []
    text = stream.removeprefix(b"\xef\xbb\xbf")
    start = 0
    at = 0
    while at < len(text):
        if text[at] not in (CR, LF):
            at += 1
            continue
        line = text[start:at]
        at += 2 if text[at : at + 2] == b"\r\n" else 1
        start = at
        if not line:
            if lines:
                events.append(b"\n".join(lines))
            lines = []
        elif line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            lines.append(b"")
    return events
