"""Faults of the simulated engine: what can go wrong, for how many requests, and how it is asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from conf.errors import LlmgwError


class FaultError(LlmgwError):
    """A fault was asked for that does not exist; says what does."""


class FaultKind(Enum):
    """What goes wrong; the comment says what the argument is."""

    REFUSE = "refuse"  # the port refuses connections, until the fault is cleared
    RESET_ACCEPT = "reset_accept"  # reset as soon as a connection is accepted
    CLOSE_ON_REUSE = "close_on_reuse"  # reset when a second request comes on a connection
    RESET = "reset"  # reset when the request has been read
    GARBAGE = "garbage"  # answer with bytes that are not HTTP
    STATUS = "status"  # CODE[,openai|html|empty|detail[,RETRY_AFTER]]
    HANG_HEADERS = "hang_headers"  # read the request, never answer
    EARLY_CLOSE = "early_close"  # no length, no chunks: the body ends where the connection does
    BOTH_FRAMINGS = "both_framings"  # Content-Length and Transfer-Encoding in one answer
    SLOW = "slow"  # FACTOR: every time of the request multiplied
    HANG_STREAM = "hang_stream"  # EVENTS: go silent after so many; slots and blocks stay taken
    DROP_STREAM = "drop_stream"  # EVENTS[,rst]: close (or reset) in the middle of the event behind them
    ERROR_EVENT = "error_event"  # EVENTS: then an error event and [DONE]
    BAD_CHUNK = "bad_chunk"  # EVENTS: then a chunk whose size is no number
    NO_DONE = "no_done"  # the stream ends well, without [DONE]
    HUGE_EVENT = "huge_event"  # BYTES: an event with so much text, behind the first token
    BYTE_BY_BYTE = "byte_by_byte"  # every byte in a segment of its own
    CRLF = "crlf"  # events end their lines with CR LF
    HEALTH_LIES = "health_lies"  # /health says 200; no model is listed and every request fails
    STUCK = "stuck"  # accepts and queues, but makes no progress, until the fault is cleared


# Strike while the answer is being sent.
REPLY_FAULTS = (
    FaultKind.SLOW,
    FaultKind.EARLY_CLOSE,
    FaultKind.BOTH_FRAMINGS,
    FaultKind.HANG_STREAM,
    FaultKind.DROP_STREAM,
    FaultKind.ERROR_EVENT,
    FaultKind.BAD_CHUNK,
    FaultKind.NO_DONE,
    FaultKind.HUGE_EVENT,
    FaultKind.BYTE_BY_BYTE,
    FaultKind.CRLF,
)
_DEFAULT_ARGUMENTS = {
    FaultKind.STATUS: "503",
    FaultKind.SLOW: "10",
    FaultKind.HANG_STREAM: "3",
    FaultKind.DROP_STREAM: "3",
    FaultKind.ERROR_EVENT: "3",
    FaultKind.BAD_CHUNK: "3",
    FaultKind.HUGE_EVENT: "1000000",
}
_BODIES = ("openai", "html", "empty", "detail")


@dataclass(slots=True)
class Fault:
    """A fault that is set.

    Attributes:
        kind: see `FaultKind`.
        arg: see `FaultKind`; checked.
        left: requests (or connections) it will still hit; None: all.
        path: hits only requests whose path begins so; empty: every POST but the control path's.
        hits: how many it has hit.
    """

    kind: FaultKind
    arg: str
    left: int | None = None
    path: str = ""
    hits: int = 0

    def number(self) -> float:
        """Return the argument's first part as a number."""
        return float(self.arg.partition(",")[0])

    def parts(self) -> list[str]:
        """Return the argument's parts."""
        return self.arg.split(",")


def make_fault(kind: str, arg: str | None = None, count: int | None = None, path: str = "") -> Fault:
    """Return a checked fault.

    Raises:
        FaultError: there is no such kind, or the argument is none of its.
    """
    try:
        known = FaultKind(kind)
    except ValueError:
        names = ", ".join(one.value for one in FaultKind)
        raise FaultError(f"no fault {kind!r}; there are {names}") from None
    fault = Fault(known, arg or _DEFAULT_ARGUMENTS.get(known, ""), count, path)
    if count is not None and count < 1:
        raise FaultError(f"{kind}: count must be at least 1, got {count}")
    if known in _DEFAULT_ARGUMENTS:
        try:
            fault.number()
        except ValueError:
            raise FaultError(f"{kind}: {fault.arg!r} does not begin with a number") from None
    parts = fault.parts()
    if known is FaultKind.STATUS and len(parts) > 1 and parts[1] not in _BODIES:
        raise FaultError(f"{kind}: no body {parts[1]!r}; there are {', '.join(_BODIES)}")
    return fault


def parse_fault(text: str) -> Fault:
    """Return the fault of a flag, `KIND[:ARG][@COUNT]`.

    Raises:
        FaultError: see `make_fault`.
    """
    rest, at, count = text.partition("@")
    kind, _, arg = rest.partition(":")
    if at and not count.isdigit():
        raise FaultError(f"{text!r}: {count!r} is no count")
    return make_fault(kind, arg or None, int(count) if at else None)


class Faults:
    """The faults that are set, in the order they were."""

    def __init__(self) -> None:
        self._set: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self._set)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._set)

    def add(self, fault: Fault) -> None:
        """Set a fault; one of the same kind and path is replaced."""
        self._set = [one for one in self._set if (one.kind, one.path) != (fault.kind, fault.path)]
        self._set.append(fault)

    def clear(self, kind: FaultKind | None = None) -> None:
        """Take one kind back, or all."""
        self._set = [one for one in self._set if kind is not None and one.kind is not kind]

    def is_set(self, kind: FaultKind) -> bool:
        """Whether a fault of this kind is in force."""
        return any(fault.kind is kind for fault in self._set)

    def take(self, kind: FaultKind, method: str = "POST", path: str = "") -> Fault | None:
        """Return the fault of this kind if it hits such a request, and count the hit."""
        for fault in self._set:
            if fault.kind is not kind:
                continue
            if not (path.startswith(fault.path) if fault.path else method == "POST"):
                continue
            fault.hits += 1
            if fault.left is not None:
                fault.left -= 1
                if not fault.left:
                    self._set.remove(fault)
            return fault
        return None
