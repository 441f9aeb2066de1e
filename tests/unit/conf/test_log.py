"""Lines of the log."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from conf.lines import AccessLine
from conf.log import AccessLog, HumanFormatter, JsonFormatter, Timestamps, milliseconds, setup
from conf.schema import Log

NOW = 1796022725.0424  # 2026-11-30T07:12:05.042Z
LINE = AccessLine(
    request_id="req-1", method="POST", path="/v1/chat/completions", status=200, outcome="ok", duration_ms=12.5
)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            continue


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "gateway.launcher", "levelname": "WARNING", "msg": message, **extra}
    )
    made.created = NOW
    return made


def written(pipe: tuple[int, int], line: AccessLine, config: Log) -> bytes:
    log = AccessLog(config, "worker", "host-a", fd=pipe[1], wall_clock=lambda: NOW)
    log.write(line)
    return os.read(pipe[0], 100_000)


def test_a_time_is_utc_with_milliseconds_rounded_down() -> None:
    timestamps = Timestamps()
    assert timestamps.format(NOW) == "2026-11-30T07:12:05.042Z"
    assert timestamps.format(NOW + 0.9573) == "2026-11-30T07:12:05.999Z"
    assert timestamps.format(NOW + 0.9577) == "2026-11-30T07:12:06.000Z"


def test_a_record_is_one_json_object_with_the_fields_of_its_extra() -> None:
    text = JsonFormatter("launcher", "host-a").format(record("child_exited", status=3, why={"a": (1, 2)}))
    assert "\n" not in text
    assert json.loads(text) == {
        "ts": "2026-11-30T07:12:05.042Z",
        "level": "warning",
        "logger": "gateway.launcher",
        "event": "child_exited",
        "process": "launcher",
        "pid": os.getpid(),
        "instance": "host-a",
        "status": 3,
        "why": {"a": [1, 2]},
    }


def test_a_value_that_json_does_not_know_is_written_as_text() -> None:
    text = JsonFormatter("launcher", "").format(record("x", path=io.BytesIO))
    assert json.loads(text)["path"] == str(io.BytesIO)


def test_an_exception_stays_on_the_line() -> None:
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        made = record("crashed", exc_info=sys.exc_info())
    text = JsonFormatter("launcher", "").format(made)
    assert "\n" not in text
    assert "ValueError: broken" in json.loads(text)["traceback"]


def test_a_line_for_people_cannot_be_forged_by_a_value() -> None:
    text = HumanFormatter("worker", is_coloured=False).format(record("odd", user="a\n\x1b[2Jb"))
    assert text.endswith(r" warning worker: odd user=a\n\x1b[2Jb")


def test_a_warning_is_coloured_on_a_terminal() -> None:
    text = HumanFormatter("worker", is_coloured=True).format(record("odd"))
    assert text.startswith("\x1b[33m")
    assert text.endswith("\x1b[0m")


def test_setup_writes_the_configured_level_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        setup("launcher", Log(level="warning"), "host-a")
        logging.getLogger("x").info("quiet")
        logging.getLogger("x").warning("loud", extra={"n": 1})
    finally:
        root.handlers[:], _ = before
        root.setLevel(before[1])
    out, err = capfd.readouterr()
    assert out == ""
    lines = [json.loads(line) for line in err.splitlines()]
    assert [(entry["event"], entry["n"], entry["instance"]) for entry in lines] == [("loud", 1, "host-a")]


def test_a_request_is_one_json_line_with_every_field(pipe: tuple[int, int]) -> None:
    data = written(pipe, LINE, Log(format="json"))
    assert data.count(b"\n") == 1
    entry = json.loads(data)
    assert list(entry)[:7] == ["ts", "level", "logger", "event", "process", "pid", "instance"]
    assert set(entry) >= set(AccessLine.__struct_fields__)
    assert (entry["ts"], entry["logger"], entry["pid"]) == (
        "2026-11-30T07:12:05.042Z",
        "llmgw.access",
        os.getpid(),
    )
    assert (entry["status"], entry["duration_ms"], entry["ttft_ms"]) == (200, 12.5, None)


def test_texts_of_clients_are_cut(pipe: tuple[int, int]) -> None:
    line = AccessLine(
        request_id="r", method="GET", path="/" * 9000, status=404, outcome="x", duration_ms=0, user="u" * 9000
    )
    data = written(pipe, line, Log(format="json"))
    assert len(json.loads(data)["path"]) == len(json.loads(data)["user"]) == 256
    assert len(data) < 4096


def test_half_a_character_does_not_stop_a_line(pipe: tuple[int, int]) -> None:
    line = AccessLine(
        request_id="r", method="GET", path="/", status=200, outcome="ok", duration_ms=0, model="a\ud800"
    )
    assert json.loads(written(pipe, line, Log(format="json")))["model"] == "a?"
    assert b"model=a\\ud800 " in written(pipe, line, Log(format="human"))


def test_a_request_line_for_people_cannot_be_forged(pipe: tuple[int, int]) -> None:
    line = AccessLine(
        request_id="r", method="GET", path="/a\x1b[2J\nb", status=404, outcome="rejected", duration_ms=1.0
    )
    assert written(pipe, line, Log(format="human")) == (
        b"07:12:05 404 GET /a\\x1b[2J\\nb rejected took=1.0ms id=r\n"
    )


def test_a_pipe_is_no_terminal(pipe: tuple[int, int]) -> None:
    assert written(pipe, LINE, Log(format="auto")).startswith(b'{"ts":')


def test_a_line_that_cannot_be_written_is_counted_and_raises_nothing(pipe: tuple[int, int]) -> None:
    log = AccessLog(Log(format="json"), "worker", "host-a", fd=pipe[1])
    os.close(pipe[0])
    log.write(LINE)
    assert log.dropped_lines == 1


def test_milliseconds_are_short() -> None:
    assert milliseconds(0.0123456789) == 12.346
