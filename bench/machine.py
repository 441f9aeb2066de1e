"""What processes cost, read from /proc, and what else the machine does meanwhile."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Positions in /proc/PID/stat, counted from behind the command's name.
_PARENT, _SESSION, _FIRST_TIME, _LAST_TIME, _RSS = 1, 3, 11, 15, 21


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used.

    Attributes:
        cpu_s: user and system time, that of children it has waited for included; 10 ms steps.
        rss_bytes: resident now.
    """

    parent: int
    session: int
    cpu_s: float
    rss_bytes: int


def usage_of(pid: int) -> Usage | None:
    """Return what `pid` used; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    ticks = sum(map(int, fields[_FIRST_TIME:_LAST_TIME]))
    return Usage(
        int(fields[_PARENT]), int(fields[_SESSION]), ticks / _TICKS_PER_S, int(fields[_RSS]) * _PAGE_BYTES
    )


def usage_of_tree(root: int) -> dict[int, Usage]:
    """Return every live process of the session that `root` leads, and every descendant of one."""
    everyone = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (usage := usage_of(int(entry.name))):
            everyone[int(entry.name)] = usage
    members = {pid for pid, usage in everyone.items() if root in (pid, usage.session)}
    while True:
        more = {pid for pid, usage in everyone.items() if usage.parent in members} - members
        if not more:
            return {pid: everyone[pid] for pid in members}
        members |= more


def cpu_s(root: int | None) -> float:
    """Return the CPU seconds of the tree of `root`; 0 for None."""
    return sum(usage.cpu_s for usage in usage_of_tree(root).values()) if root else 0.0


def pss_bytes(root: int | None) -> int:
    """Return the memory of the tree of `root`, shared pages counted once; 0 for None."""
    total = 0
    for pid in usage_of_tree(root) if root else ():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def busy_s() -> float:
    """Return the CPU seconds all cores were busy or taken away since boot."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / _TICKS_PER_S


def wait_until_quiet(longest_s: float) -> None:
    """Wait until other work leaves the machine nearly idle for a second, at most `longest_s`."""
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(1)
        if busy_s() - before < 0.2:
            return


def describe() -> str:
    """Return a line about this machine."""
    model = "unknown processor"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = " ".join(line.partition(":")[2].split())
                break
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES / 2**30
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


class PeakMemory:
    """Watches the resident memory of a process tree while it is entered.

    Attributes:
        peak_bytes: of all its processes together; shared pages count in each.
    """

    def __init__(self, root: int | None) -> None:
        self.peak_bytes = 0
        self._root = root
        self._stop = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._root and not self._stop.wait(0.5):
            now = sum(usage.rss_bytes for usage in usage_of_tree(self._root).values())
            self.peak_bytes = max(self.peak_bytes, now)
