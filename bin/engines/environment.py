"""A virtual environment per engine below `.cache/engines/`, installed once.

Rules:
    - A stamp in the environment holds the requirements it was installed from; other requirements mean a new
      installation, the same ones mean none.
    - Two programs that install at the same time wait for each other (a file lock, which dies with its owner).
    - What fails is an `EngineError` whose text says what to do.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "engines"
MODELS = CACHE / "models"


class EngineError(Exception):
    """An engine cannot be installed or started; the text is a sentence for the person at the terminal."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[engines] {text}", flush=True)


@contextmanager
def installing(name: str) -> Iterator[None]:
    """Hold the lock of everything that writes below `.cache/engines/`, and tell how long it took."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another program is installing engines; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        started = time.monotonic()
        yield
        say(f"{name}: ready ({time.monotonic() - started:.1f} s)")


class Environment:
    """The virtual environment `.cache/engines/<name>`.

    Attributes:
        folder: of the environment.
        python: its interpreter; exists once something was installed.
    """

    def __init__(self, name: str) -> None:
        self.folder = CACHE / name
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / "installed.txt"

    def has(self, requirements: Sequence[str]) -> bool:
        """Tell whether exactly `requirements` were installed here."""
        return self._stamp.exists() and self._stamp.read_text().split("\n") == list(requirements)

    def create(self) -> None:
        """Make the environment unless there is one.

        Raises:
            EngineError: Python's `venv` is missing.
        """
        if self.python.exists():
            return
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(self.folder)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise EngineError(
                f"cannot make a virtual environment in {self.folder}: "
                f"{_last_line(made.stdout + made.stderr)} (on Debian: apt-get install python3-venv)."
            )

    def pip(self, *arguments: str) -> None:
        """Run pip of the environment.

        Raises:
            EngineError: it failed; the text has pip's last error.
        """
        done = subprocess.run(
            [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
            raise EngineError(
                f"pip could not install into {self.folder}: {errors[-1] if errors else 'no message'} "
                f"Check that a package index can be reached from here, then run the same command again."
            )

    def finish(self, requirements: Sequence[str]) -> None:
        """Note that `requirements` are installed."""
        self._stamp.write_text("\n".join(requirements))


def run_tool(argv: Sequence[str]) -> str:
    """Run a short helper program and return its output, without the white space around it.

    Raises:
        EngineError: it failed; the text has its last line.
    """
    done = subprocess.run(list(argv), capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"`{' '.join(argv)}` failed: {_last_line(done.stdout + done.stderr)}")
    return done.stdout.strip()


def _last_line(text: str, *, containing: str = "") -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and containing in line]
    return lines[-1] if lines else "no message"
