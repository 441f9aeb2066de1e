"""Start our programs in tests, and prove that none is left.

Every program runs in a session of its own. What it starts stays in that session, so that a leftover is
found even after its parent died; `Programs.close()` ends what is left and fails for it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
BOOT = ROOT / "bin" / "boot.py"


def session_processes(session: int) -> list[psutil.Process]:
    """Return the live processes (no zombies) of the session `session`."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


class Program:
    """A running program whose output goes to a file.

    Attributes:
        pid: also the id of its session.
        log: file with standard output and standard error, interleaved.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str],
        cwd: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.argv = tuple(argv)
        self.log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self.pid = self._popen.pid

    def __repr__(self) -> str:
        return f"Program({' '.join(self.argv)!r}, pid={self.pid}, returncode={self._popen.poll()})"

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def output(self) -> str:
        """Return everything written so far."""
        return self.log.read_text(errors="replace")

    def wait_for_output(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        """Wait until `pattern` (a regular expression, multi-line) occurs in the output."""

        def look() -> re.Match[str] | None:
            match = re.search(pattern, self.output(), re.MULTILINE)
            if match is None and self.returncode is not None:
                raise AssertionError(f"{self!r} ended without {pattern!r}:\n{self.output()}")
            return match

        match = wait_until(look, timeout, lambda: f"{pattern!r} in the output:\n{self.output()}")
        assert match is not None
        return match

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program alone, not to its children."""
        self._popen.send_signal(number)

    def wait(self, timeout: float = 20.0) -> int:
        """Wait for its end and return the exit code."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self!r} still runs after {timeout:g} s:\n{self.output()}") from None

    def stop(self, timeout: float = 20.0) -> int:
        """Ask it to end (SIGTERM) and return the exit code."""
        if self.returncode is None:
            self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of its session, itself included."""
        return session_processes(self.pid)

    def kill_session(self) -> None:
        """End whatever is left of it, at once."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._popen.wait(10)


class Programs:
    """Start programs and answer for their end; the fixture `programs` makes one per test.

    Args:
        directory: for the logs; also the programs' working directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Program] = []

    def start(
        self,
        program: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Program:
        """Start `program` (gateway, coordinator, sim, ...) of this checkout with the tests' interpreter.

        Args:
            env: added to the tests' own environment.
            pass_fds: file descriptors that it inherits.
        """
        argv = [sys.executable, str(BOOT), program, *arguments]
        return self.start_command(argv, env=env, cwd=cwd, pass_fds=pass_fds)

    def start_command(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Program:
        """Start any command under the same care."""
        log = self._directory / f"program-{len(self._started)}.log"
        whole_env = {**os.environ, **(env or {})}
        started = Program(argv, log, env=whole_env, cwd=cwd or self._directory, pass_fds=pass_fds)
        self._started.append(started)
        return started

    def close(self, timeout: float = 20.0, children_timeout: float = 5.0) -> None:
        """Stop every program, and assert that no process of any of them is left.

        Args:
            timeout: seconds for each program's own end.
            children_timeout: seconds for what it started, after that.

        Raises:
            AssertionError: one had to be killed or left a child; everything has been ended all the same.
        """
        complaints = []
        for program in reversed(self._started):
            try:
                program.stop(timeout)
                wait_until(
                    lambda p=program: not p.processes(), children_timeout, f"no process left of {program!r}"
                )
            except AssertionError as error:
                complaints.append(f"{error}; left: {program.processes()}")
            finally:
                program.kill_session()
        assert not complaints, "\n".join(complaints)
