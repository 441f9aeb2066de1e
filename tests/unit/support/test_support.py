"""What tests stand on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.clock import FakeClock
from tests.support.processes import Programs, session_processes
from tests.support.wait import wait_until


def test_a_wait_returns_what_the_condition_returned() -> None:
    answers = iter([0, "", "there"])
    assert wait_until(lambda: next(answers), 5.0, interval=0.0) == "there"


def test_a_wait_that_fails_says_for_what_and_what_was_seen() -> None:
    with pytest.raises(AssertionError, match=r"waited 0 s for: three workers; last seen: \[\]"):
        wait_until(lambda: [], 0.0, "three workers")


def test_a_fake_clock_never_goes_back(clock: FakeClock) -> None:
    assert clock.advance(2.5) == clock() == 1002.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_a_child_that_outlives_its_program_is_found_and_ended(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('started', flush=True)"
    program = programs.start_command([sys.executable, "-W", "ignore", "-c", code])
    assert program.wait_for_output("started")
    assert program.wait() == 0
    with pytest.raises(AssertionError, match="no process left of"):
        programs.close(children_timeout=0.1)
    wait_until(lambda: not session_processes(program.pid), 5, "its child to be dead")


def test_a_program_that_ignores_its_end_is_killed_and_reported(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    program = programs.start_command([sys.executable, "-c", code])
    program.wait_for_output("up")
    with pytest.raises(AssertionError, match="still runs after"):
        programs.close(timeout=0.2)
    assert program.returncode == -9


def test_a_program_that_ends_early_shows_its_output(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    program = programs.start_command([sys.executable, "-c", "print('broken'); raise SystemExit(3)"])
    with pytest.raises(AssertionError, match="broken"):
        program.wait_for_output("listening")
    programs.close()
