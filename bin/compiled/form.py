"""Which folder programs run from: the checkout, or the compiled copy of exactly these sources.

Layout of `.cache/compiled` (written by `python -m bin.compiled` alone):
    <digest>/          the rooms and `bin`, with extension modules beside the sources
    <digest>/in-use    locked (flock, shared) by every process that runs from the folder
    lock               held while one is built
    building-*         unfinished

Rules:
    - The folder's name is the digest of all that went into it, so that a copy can be missing, never stale.
    - A folder in use is not removed: a child that starts again finds what its parent runs.
    - Only the standard library is imported here: every program asks at its start, in a few milliseconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOMS = ("agent", "conf", "coordinator", "gateway", "shm")
# The parts of bin/ that a program needs; bin/engines serves tests and demonstrations.
PARTS = ("bin/__init__.py", "bin/boot.py", "bin/compiled")
# Set to 0: run as Python whatever has been compiled.
VARIABLE = "LLMGW_COMPILED"
IN_USE = "in-use"

# What every request runs through; what runs now and then (launcher, coordinator, reload) gains nothing.
# What mypyc cannot: a `msgspec.Struct` keeps neither types nor keywords (`conf.lines`, `gateway.core.shapes`,
# `gateway.core.admission_wire`, `shm.endpoints`), an exception's attributes get no defaults
# (`gateway.core.errors`), a subclass of a class without types does not start (`gateway.unreader`).
# `gateway.workers` has to patch the standard library before anything else. And a class that is compiled has
# only compiled subclasses.
MODULES = (
    "conf/log.py",
    "gateway/access.py",
    "gateway/admission_link.py",
    "gateway/attempt.py",
    "gateway/channel.py",
    "gateway/connection.py",
    "gateway/core/body.py",
    "gateway/core/admission.py",
    "gateway/core/framing.py",
    "gateway/core/headers.py",
    "gateway/core/retry.py",
    "gateway/core/schedule/filters/draining.py",
    "gateway/core/schedule/filters/excluded.py",
    "gateway/core/schedule/filters/health.py",
    "gateway/core/schedule/pickers/max_score.py",
    "gateway/core/schedule/pipeline.py",
    "gateway/core/schedule/scorers/inflight.py",
    "gateway/core/sse.py",
    "gateway/core/usage.py",
    "gateway/dispatch.py",
    "gateway/exchange.py",
    "gateway/lease.py",
    "gateway/plain.py",
    "gateway/progress.py",
    "gateway/relay.py",
    "gateway/routing.py",
    "gateway/server.py",
    "gateway/upstream.py",
    "shm/bands.py",
    "shm/inflight.py",
    "shm/marks.py",
    "shm/metrics.py",
    "shm/progress.py",
)

_held: list[int] = []  # locks of this process, for its life


def home_of(root: Path) -> Path:
    """Return the folder of the compiled forms of the checkout `root`."""
    return root / ".cache" / "compiled"


def choose(root: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder to run from, and keep it for as long as this process and its forks live.

    Args:
        root: the checkout, or a compiled copy, whose children stay in it.
    """
    if (root / IN_USE).exists():
        _hold(root)
        return root
    if environ.get(VARIABLE) == "0" or not home_of(root).is_dir():
        return root
    folder = home_of(root) / digest(root)
    return folder if _hold(folder) else root


def digest(root: Path) -> str:
    """Return the name of the compiled form of the sources below `root` for this interpreter."""
    hasher = hashlib.blake2b(f"{sys.version} {os.uname().machine}".encode(), digest_size=12)
    for path in sources(root):
        with open(os.path.join(root, path), "rb", buffering=0) as file:
            content = file.read()
        hasher.update(b"%s\0%d\0" % (os.fsencode(path), len(content)))
        hasher.update(content)
    return hasher.hexdigest()


def sources(root: Path) -> Iterator[str]:
    """Yield the path below `root` of every file that a program may read, always in the same order."""
    for part in (*ROOMS, *PARTS):
        yield from _files_below(os.fspath(root), part)


def _files_below(root: str, part: str) -> Iterator[str]:
    whole = os.path.join(root, part)
    if not os.path.isdir(whole):
        if os.path.exists(whole):
            yield part
        return
    with os.scandir(whole) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, is_folder in found:
        if name == "__pycache__" or name.startswith("."):
            continue
        if is_folder:
            yield from _files_below(root, f"{part}/{name}")
        elif not name.endswith((".pyc", ".so")):
            yield f"{part}/{name}"


def _hold(folder: Path) -> bool:
    """Lock the compiled form `folder` against removal; False if it is not there (any more)."""
    try:
        fd = os.open(folder / IN_USE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if (folder / IN_USE).exists():  # it may have gone between the two lines above
            _held.append(fd)
            return True
    except OSError:
        pass
    os.close(fd)
    return False


if __name__ == "__main__":
    print(choose(Path(__file__).resolve().parents[2], os.environ))
