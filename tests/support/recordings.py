"""Reads recorded exchanges with engines (tests/corpus/engines)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENGINES = Path(__file__).parent.parent / "corpus" / "engines"


@dataclass(frozen=True)
class Recording:
    """One exchange.

    Attributes:
        name: `engine/file`.
        status: of the response.
        headers: of the response, as on the wire.
        body: of the response, without framing.
    """

    name: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def content_type(self) -> bytes:
        return dict((name.lower(), value) for name, value in self.headers).get(b"content-type", b"")

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith(b"text/event-stream")


def read_recording(path: Path) -> Recording:
    """Read a `.http` file: `> ` request, `< ` response head, an empty line, the body."""
    raw = path.read_bytes()
    at = raw.index(b"\n< HTTP/1.1 ") + 1
    head, _, body = raw[at:].partition(b"\n\n")
    lines = [line[2:] for line in head.split(b"\n")]
    headers = []
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        headers.append((name, value.strip()))
    length = dict((name.lower(), value) for name, value in headers).get(b"content-length")
    return Recording(
        name=f"{path.parent.name}/{path.stem}",
        status=int(lines[0].split()[1]),
        headers=tuple(headers),
        body=body[: int(length)] if length is not None else body,
    )


def recordings() -> list[Recording]:
    """Return all recordings, in the order of their names."""
    return [read_recording(path) for path in sorted(ENGINES.glob("*/*.http"))]
