"""The launcher's files in `state_dir`: its lock, what it left, where it can be found.

    launcher.lock    flock held as long as the launcher lives: there are never two of one state_dir
    launcher.pid     process id, for scripts (`kill -HUP`)
    addresses.json   {"listen": ["host:port", ...], "admin": "host:port"}: what was bound, for port 0
    segment          path of the segment's directory; written before that is made, so that none is forgotten

One writer: the launcher that holds the lock. Crash recovery: all but the lock's holder may be out of date
after a kill; the next launcher removes the directory that `segment` names and writes everything anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from conf.errors import LlmgwError
from shm import segment as shm_segment

SEGMENTS_ROOT = Path("/dev/shm")
_PREFIX = "llmgw-"


class StateDirInUse(LlmgwError):
    """Another launcher runs with this state_dir, or it cannot be written to."""


class StateDir:
    """A locked state_dir.

    Attributes:
        path: absolute.
    """

    __slots__ = ("_lock_fd", "path")

    def __init__(self, path: Path) -> None:
        """Make the folder if it is not there, and lock it. Does not wait.

        Raises:
            StateDirInUse: with a sentence for people.
        """
        self.path = path.absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise StateDirInUse(f"state_dir: cannot write to {self.path}: {exc.strerror}") from exc
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._lock_fd)
            pid = self._read("launcher.pid", "?")
            raise StateDirInUse(
                f"state_dir: {self.path} is in use by the gateway with process id {pid}; "
                "stop that one, or give this one a state_dir of its own"
            ) from exc

    def write_pid(self) -> None:
        """Write `launcher.pid`."""
        self._write("launcher.pid", f"{os.getpid()}\n")

    def write_addresses(self, listen: Sequence[str], admin: str) -> None:
        """Write `addresses.json`."""
        self._write("addresses.json", json.dumps({"listen": list(listen), "admin": admin}) + "\n")

    def next_segment(self) -> Path:
        """Remove the segment directory a killed launcher left; return where to make the new one."""
        left = self._read("segment", "")
        if left:
            _remove_leftover(Path(left))
        directory = SEGMENTS_ROOT / f"{_PREFIX}{secrets.token_hex(6)}"
        self._write("segment", f"{directory}\n")
        return directory

    def close(self) -> None:
        """Remove what tells of a running launcher, and unlock."""
        for name in ("launcher.pid", "addresses.json", "segment"):
            (self.path / name).unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _read(self, name: str, default: str) -> str:
        try:
            return (self.path / name).read_text().strip()
        except OSError:
            return default

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f"{name}.new"
        unfinished.write_text(text)
        unfinished.rename(self.path / name)


def _remove_leftover(directory: Path) -> None:
    # A damaged state file must not make us delete anything else.
    if directory.parent == SEGMENTS_ROOT and directory.name.startswith(_PREFIX):
        shm_segment.remove(directory)
