"""A program beside ours: started with a log file, waited for, stopped with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bin.engines.environment import EngineError
from conf.child import die_with_parent


class Process:
    """A program in a session of its own, so that Ctrl-C reaches only us and we decide the order of stopping.

    It gets SIGTERM from the kernel when we die, however we die.

    Attributes:
        name: for messages.
        log: file with its output.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start `argv` with `environment` instead of ours, in `folder` instead of here."""
        self.name = name
        self.log = log
        parent = os.getpid()
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

    @property
    def pid(self) -> int:
        """Its process id, which is also its session's."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Tell whether it has not ended."""
        return self._popen.poll() is None

    def wait_http(self, url: str, timeout: float) -> None:
        """Wait until `url` answers 200.

        Raises:
            EngineError: it ended, or `timeout` seconds went by; the text has its last lines.
        """
        deadline = time.monotonic() + timeout
        while not answers(url):
            if not self.is_running:
                raise EngineError(f"{self.name} ended while it started.\n{self.tail()}")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} did not answer {url} within {timeout:g} s.\n{self.tail()}")
            time.sleep(0.1)

    def tail(self, lines: int = 8) -> str:
        """Return where its log is and the last lines of it."""
        last = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"Last lines of {self.log}:", *(f"  {line}" for line in last)])

    def stop(self, timeout: float = 10.0) -> None:
        """Ask it to end; after `timeout` seconds end it. Whatever it started ends with it."""
        with suppress(ProcessLookupError):
            os.kill(self._popen.pid, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout)
        finally:
            for pid in session_members(self._popen.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._popen.wait()


def session_members(session: int) -> list[int]:
    """Return the process ids in `session`, whatever process groups they are in."""
    members = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                members.append(pid)
    return members


def answers(url: str) -> bool:
    """Tell whether `url` answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_port(preferred: int = 0) -> int:
    """Return `preferred` if nobody listens there on 127.0.0.1, else a free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise EngineError("no port is free on 127.0.0.1.")
