"""A real Redis for tests: on a free port, with nothing kept, to be killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from bin.engines.process import free_port
from conf.schema import Redis
from tests.support.processes import Program, Programs
from tests.support.wait import wait_until

SERVER = "redis-server"


class RedisServer:
    """A server that answers.

    Attributes:
        port: the same after a restart.
    """

    def __init__(self, programs: Programs, directory: Path) -> None:
        """Start it; without the program the test is skipped, on CI it fails."""
        if shutil.which(SERVER) is None:
            if os.environ.get("CI"):
                raise AssertionError(f"no {SERVER} on this machine; bin/setup installs it")
            pytest.skip(f"no {SERVER} on this machine")
        self._programs = programs
        self._directory = directory
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        """Address of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def settings(self, **keys: object) -> Redis:
        """Return the part of a configuration that leads here."""
        return Redis(url=self.url, **keys)  # type: ignore[arg-type]

    def start(self) -> None:
        """Start it, also again after `kill`, and wait until it answers."""
        command = [SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        self.program: Program = self._programs.start_command([*command, "--save", "", "--appendonly", "no"])
        wait_until(self._answers, 10, lambda: f"Redis on {self.port}:\n{self.program.output()[-2000:]}")

    def kill(self) -> None:
        """Kill it (SIGKILL); it loses all it knew."""
        self.program.signal(signal.SIGKILL)
        self.program.wait()

    def hang(self) -> None:
        """Have it answer nobody, with all connections open."""
        self.program.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End `hang`."""
        self.program.signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as sock:
                sock.sendall(b"PING\r\n")
                return sock.recv(16).startswith(b"+PONG")
        except OSError:
            return False
