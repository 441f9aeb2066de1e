"""What a child process of the launcher knows of its parent: arguments, exit code, the parent's death."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# "I cannot start, and trying again will not help." gunicorn's arbiter uses the same number for it.
EXIT_CANNOT_BOOT = 3

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ChildArguments:
    """Arguments the launcher gives its children.

    Attributes:
        segment: directory of the shared segment.
        fds: listening sockets, inherited open: the client listener's for the workers, the admin listener's
            for the coordinator. One per address; a name may stand for several.
    """

    segment: Path
    fds: tuple[int, ...] = ()


def parse_arguments(program: str, argv: Sequence[str]) -> ChildArguments:
    """Read `--segment DIR --fds N,N`, as the launcher writes it.

    Raises:
        SystemExit: something else was given.
    """
    parser = argparse.ArgumentParser(program, description="Started by llmgw-gateway, not by hand.")
    parser.add_argument("--segment", type=Path, required=True, metavar="DIR")
    parser.add_argument("--fds", default="", metavar="N,N")
    given = parser.parse_args(argv)
    return ChildArguments(given.segment, tuple(int(each) for each in given.fds.split(",") if each))


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent dies, however it dies.

    Survives exec, not fork: each child calls it for itself, first thing. The parent is the thread that
    started the process, so threads that start children must outlive them.

    Args:
        parent_pid: who the parent must be; if it died before this call, nobody would tell.
        number: signal to get.

    Raises:
        SystemExit: the parent is not `parent_pid` any more.
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process {parent_pid} is gone")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, instead of init.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
