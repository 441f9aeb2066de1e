"""Logs: set-up of a process, the line formats, and the line of a request.

Rules:
    - One JSON object per line: `ts` (UTC, ms), `level`, `logger`, `event`, `process`, `pid`, `instance`, then
      the fields of `extra={...}`. For reading by people, the same in one line of text.
    - `event` is constant snake_case text; values go into `extra`. Never a prompt, a completion or a key.
    - Requests are written to standard output by `AccessLog`, everything else to standard error.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from conf.lines import AccessLine, PlainLine
from conf.schema import Log

# Attributes of every record; all others came in by `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS = {"warning": "\033[33m", "error": "\033[31m", "critical": "\033[31m"}
# Longest text that a client may put into a line: with it a line stays below PIPE_BUF (4096) unless most of it
# has to be escaped, and so is not mixed up with those of other processes.
_CLIENT_TEXT_CHARS = 256


class Timestamps:
    """Formats UTC times with ms; the part down to the second is kept, since most lines share it."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def format(self, now_s: float) -> str:
        """Return `2026-11-30T07:12:05.042Z` for Unix seconds."""
        second, ms = divmod(int(now_s * 1000), 1000)
        if second != self._second:
            self._text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._text}.{ms:03d}Z"


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, process: str, instance: str) -> None:
        super().__init__()
        self._process = process
        self._instance = instance
        self._timestamps = Timestamps()

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, Any] = {
            "ts": self._timestamps.format(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "process": self._process,
            # The process may have been forked after the set-up.
            "pid": os.getpid(),
            "instance": self._instance,
        }
        fields |= _extra(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class HumanFormatter(logging.Formatter):
    """One line of text per record, with colour on a terminal."""

    def __init__(self, process: str, *, is_coloured: bool) -> None:
        super().__init__()
        self._process = process
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end; a traceback follows on lines of its own."""
        level = record.levelname.lower()
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_printable(str(value))}" for name, value in _extra(record).items())
        line = f"{clock} {level:<7} {self._process}: {record.getMessage()}{fields}"
        if self._is_coloured and level in _COLOURS:
            line = f"{_COLOURS[level]}{line}\033[0m"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _printable(text: str) -> str:
    """Escape what could play tricks on a terminal or begin a new line."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def instance_name(configured: str) -> str:
    """Return the instance's name: as configured, else the host's."""
    return configured or socket.gethostname()


def is_human(config: Log, fd: int) -> bool:
    """Whether lines to the file `fd` are for people."""
    return config.format == "human" or (config.format == "auto" and os.isatty(fd))


def setup(process: str, config: Log, instance: str = "") -> None:
    """Send this process's log records to standard error; call it once, in `main()`.

    Args:
        process: `launcher`, `worker`, `coordinator`, ...
        instance: as configured; empty for the host's name.
    """
    handler = logging.StreamHandler(sys.stderr)
    fd = sys.stderr.fileno()
    if is_human(config, fd):
        handler.setFormatter(HumanFormatter(process, is_coloured=os.isatty(fd)))
    else:
        handler.setFormatter(JsonFormatter(process, instance_name(instance)))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    # urllib3 tells every connection and retry; we tell what follows from them.
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def milliseconds(seconds: float) -> float:
    """Turn seconds into milliseconds that are short to write (3 decimals)."""
    return round(seconds * 1000, 3)


class AccessLog:
    """Writes one line per request with one system call, without the `logging` module.

    Make it in the process that uses it (it holds the pid). A line that cannot be written is dropped and
    counted: requests do not wait for a log. It blocks only while the reader of a pipe does not read.

    Args:
        fd: where lines go; 1 is standard output.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        config: Log,
        process: str,
        instance: str = "",
        *,
        fd: int = 1,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.dropped_lines = 0
        self._fd = fd
        self._wall_clock = wall_clock
        self._timestamps = Timestamps()
        self._encode = msgspec.json.Encoder().encode
        self._is_human = is_human(config, fd)
        constant = {
            "level": "info",
            "logger": "llmgw.access",
            "event": "request",
            "process": process,
            "pid": os.getpid(),
            "instance": instance_name(instance),
        }
        self._constant = orjson.dumps(constant)[1:-1] + b","

    def write(self, line: PlainLine) -> None:
        """Write the line of a finished request; an `AccessLine`."""
        texts = (line.path, line.user, line.tenant, line.surface, line.model, line.priority)
        if any(text is not None and len(text) > _CLIENT_TEXT_CHARS for text in texts):
            line = _clip(line)
        now = self._timestamps.format(self._wall_clock())
        try:
            data = self._data(line, now)
        except UnicodeEncodeError:  # half a surrogate pair
            data = self._data(_clip(line), now)
        try:
            os.write(self._fd, data)
        except OSError:
            self.dropped_lines += 1

    def _data(self, line: PlainLine, now: str) -> bytes:
        if self._is_human:
            assert isinstance(line, AccessLine)
            return _printable(_readable(line, now)).encode() + b"\n"
        return b'{"ts":"%b",%b%b\n' % (now.encode(), self._constant, self._encode(line)[1:])


class PlainLog(AccessLog):
    """Writes the lines of plain proxy mode: JSON, also on a terminal, and nothing but the line's fields."""

    def _data(self, line: PlainLine, now: str) -> bytes:
        return b'{"ts":"%b",%b\n' % (now.encode(), self._encode(line)[1:])


def _clip(line: PlainLine) -> PlainLine:
    texts = {
        name: value[:_CLIENT_TEXT_CHARS].encode(errors="replace").decode()
        for name in ("path", "user", "tenant", "surface", "model", "priority")
        if (value := getattr(line, name)) is not None
    }
    return msgspec.structs.replace(line, **texts)


def _readable(line: AccessLine, now: str) -> str:
    parts = [
        now[11:19],
        f"{line.status} {line.method} {line.path}",
        f"model={line.model}" if line.model else "",
        f"endpoint={line.replica}" if line.replica else "",
        f"{line.outcome}" if line.outcome != "ok" else "",
        f"reason={line.reason}" if line.reason else "",
        f"ttft={line.ttft_ms:.1f}ms" if line.ttft_ms is not None else "",
        f"took={line.duration_ms:.1f}ms",
        f"tokens={line.prompt_tokens}+{line.completion_tokens}" if line.prompt_tokens is not None else "",
        f"retries={line.retries}" if line.retries else "",
        f"id={line.request_id}",
    ]
    return " ".join(filter(None, parts))
