"""Reads the requests of tests/corpus/requests; the format is described there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "corpus" / "requests"

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_REPEAT = re.compile(rb"<<(.+?)\*(\d+)>>", re.DOTALL)
_PLAIN = {"r": "\r", "n": "\n", "t": "\t", "\\": "\\"}


@dataclass(slots=True)
class RecordedRequest:
    """One file: what is sent, and what must come of it.

    Attributes:
        statuses: of the answers, in order.
        code: of the last answer's error object; "" where it is none.
        stays_open: whether the connection carries another request.
        targets, bodies: of what must reach the engine, in order.
        is_head: the answers have no body.
    """

    name: str
    data: bytes
    statuses: list[int] = field(default_factory=list)
    code: str = ""
    stays_open: bool = True
    targets: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    is_head: bool = False


def names(folder: str) -> list[str]:
    """Return the names of the files below `valid` or `invalid`."""
    found = sorted(path.stem for path in (FOLDER / folder).glob("*.txt"))
    assert found, FOLDER / folder
    return found


def load(folder: str, name: str) -> RecordedRequest:
    """Read one file."""
    text = (FOLDER / folder / f"{name}.txt").read_text("utf-8")
    top, _, bottom = text.partition("\n--\n")
    data = _unescape(bottom.replace("\n", ""))
    body_bytes = len(data.partition(b"\r\n\r\n")[2])
    recorded = RecordedRequest(name, data.replace(b"{{length}}", b"%d" % body_bytes))
    for line in top.splitlines():
        if line.startswith("#"):
            continue
        key, _, value = line.partition(": ")
        if key == "status":
            recorded.statuses = [int(each) for each in value.split()]
        elif key == "code":
            recorded.code = value
        elif key == "after":
            recorded.stays_open = {"open": True, "closed": False}[value]
        elif key == "target":
            recorded.targets.append(value)
        elif key == "body":
            recorded.bodies.append(_unescape(value))
        elif key == "method":
            recorded.is_head = {"HEAD": True}[value]
        else:
            raise ValueError(f"{name}: unknown key {key!r}")
    return recorded


def _unescape(text: str) -> bytes:
    def replace(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else _PLAIN[match[2]]

    data = _ESCAPE.sub(replace, text).encode("latin-1")
    return _REPEAT.sub(lambda match: match[1] * int(match[2]), data)
