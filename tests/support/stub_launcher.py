"""A launcher whose children are this file: they record their lives and what they got, and serve nothing.

Run as a program: `stub_launcher.py FOLDER --config FILE` is the launcher, `stub_launcher.py child NAME FOLDER
--segment DIR --fds N,N` a child. A child appends a line of JSON per event to FOLDER/NAME.events, and behaves
as FOLDER/NAME.mode says: `run` (default; ends on SIGTERM), `stubborn` (ends on SIGINT only), `deaf` (on
SIGKILL only), `cannot_boot` (exit code 3), `crash` (exit code 1), `worker` (forks a process that holds a
worker slot with one request in flight and ends 0.3 s after its SIGTERM), `deaf_worker` (`deaf`,
with such a worker).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from conf import child  # noqa: E402
from gateway import launcher  # noqa: E402
from shm.inflight import InflightRow  # noqa: E402
from shm.rows import WorkerSlot  # noqa: E402
from shm.segment import Segment  # noqa: E402

Record = Callable[..., None]


def main(argv: list[str]) -> int:
    """Be the launcher or one of its children."""
    if argv[0] == "child":
        return run_child(argv[1], Path(argv[2]), argv[3:])
    folder = argv[0]
    launcher._DRAIN_SLACK_S = 0.5  # tests wait for what happens behind it
    here = (sys.executable, __file__, "child")
    programs = launcher.Programs((*here, "workers", folder), (*here, "coordinator", folder))
    return launcher.main(argv[1:], programs)


def run_child(name: str, folder: Path, argv: list[str]) -> int:
    """Live as the mode of `name` says."""

    def record(event: str, **facts: object) -> None:
        with (folder / f"{name}.events").open("a") as file:
            file.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")

    mode_file = folder / f"{name}.mode"
    mode = mode_file.read_text() if mode_file.exists() else "run"
    if mode in ("cannot_boot", "crash"):
        record(mode)
        return child.EXIT_CANNOT_BOOT if mode == "cannot_boot" else 1
    given = child.parse_arguments(name, argv)
    segment = Segment.attach(given.segment)
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child.die_with_parent(segment.launcher_pid)
    if mode in ("worker", "deaf_worker"):
        run_worker(record, segment, folder)
    ports = [socket.socket(fileno=os.dup(fd)).getsockname()[1] for fd in given.fds]
    record(
        "started",
        segment=str(given.segment),
        ports=ports,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    wanted = {"stubborn": {signal.SIGINT}, "deaf": set(), "deaf_worker": set()}.get(mode, numbers)
    while True:
        number = signal.sigwait(numbers)
        record("signal", number=number, phase=int(segment.phase), generation=segment.config_generation)
        if number in wanted:
            return 0


def run_worker(record: Record, segment: Segment, folder: Path) -> None:
    """Fork a process with a slot and a request in flight that drains for a moment, or hangs if told so."""
    arbiter = os.getpid()
    if os.fork():
        return
    child.die_with_parent(arbiter)
    slot = WorkerSlot.claim(segment)
    InflightRow(segment, slot).add(0)
    record("worker_started", slot=slot.index)
    if (folder / "worker.hangs").exists():
        signal.pause()
    signal.sigwait({signal.SIGTERM})
    record("worker_drains")
    time.sleep(0.3)
    record("worker_ends")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
