"""The shared segment: a directory in /dev/shm with one mapped file and two files of snapshots.

    segment     the cells of shm.layout, mapped by every process of the instance
    config      the configuration, as conf.load.encode made it; replaced by rename, then
                CONFIG_GENERATION grows
    admission   the coordinator's socket, for workers whose requests have to wait
    endpoints   the endpoint table (shm.endpoints); replaced by rename, then ENDPOINTS_GENERATION grows

Writers: the launcher makes the directory and removes it, writes the header and `config`; the coordinator
writes `endpoints`. Directory 0700 and files 0600, since both snapshots hold keys of engines.

Crash recovery: a directory that no process has attached any more (`is_in_use` is false) is a leftover.
`segment` gets its name only when its header is complete, so whoever finds the name finds a whole file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import time
from pathlib import Path

from conf.errors import LlmgwError
from shm.layout import LAYOUT_VERSION, MAGIC, Header, Layout, Phase, Sizes

SEGMENT_FILE = "segment"
CONFIG_FILE = "config"
ENDPOINTS_FILE = "endpoints"
ADMISSION_FILE = "admission"

_HEAD = struct.Struct("<6q")


class SegmentMismatch(LlmgwError):
    """The segment was made by another version, or is damaged: re-create it by restarting the launcher."""


class Segment:
    """One process's mapping of the shared segment.

    A mapping may be used on both sides of a fork; locks on slots (shm.rows) are taken after it.

    Attributes:
        directory: the segment's directory.
        layout: where everything is.
        cells_i64: all cells as int64, shape [total_bytes / 8].
        cells_f64: the same cells as float64.
        cells_bytes: the same memory as bytes, for strings.
    """

    __slots__ = ("_fd", "_map", "cells_bytes", "cells_f64", "cells_i64", "directory", "layout")

    def __init__(self, directory: Path, fd: int, layout: Layout) -> None:
        """Map an open file; use `create` or `attach` instead. Takes over `fd`."""
        self.directory = directory
        self.layout = layout
        self._fd = fd
        self._map = mmap.mmap(fd, layout.total_bytes)
        self.cells_bytes = memoryview(self._map)
        self.cells_i64: memoryview[int] = self.cells_bytes.cast("q")
        self.cells_f64: memoryview[float] = self.cells_bytes.cast("d")

    @classmethod
    def create(cls, directory: Path, sizes: Sizes) -> Segment:
        """Make the directory and a zeroed segment in it, and attach to it.

        The pages are reserved at once, so that a full /dev/shm shows here and not as SIGBUS in a worker.

        Args:
            directory: must not exist; its parent must.
            sizes: room to make.

        Raises:
            OSError: the directory exists, or there is no room (ENOSPC).
        """
        layout = Layout.of(sizes)
        directory.mkdir(mode=0o700)
        unfinished = directory / f"{SEGMENT_FILE}.new"
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, layout.total_bytes)
            fcntl.flock(fd, fcntl.LOCK_SH)
            segment = cls(directory, fd, layout)
        except BaseException:
            os.close(fd)
            shutil.rmtree(directory, ignore_errors=True)
            raise
        cells = segment.cells_i64
        cells[Header.LAYOUT_VERSION] = LAYOUT_VERSION
        cells[Header.FINGERPRINT] = layout.fingerprint
        cells[Header.WORKER_SLOTS] = sizes.worker_slots
        cells[Header.ENDPOINT_SLOTS] = sizes.endpoint_slots
        cells[Header.METRIC_CELLS] = sizes.metric_cells
        cells[Header.CREATED_NS] = time.time_ns()
        cells[Header.LAUNCHER_PID] = os.getpid()
        cells[Header.PHASE] = Phase.RUNNING
        cells[Header.MAGIC] = MAGIC
        unfinished.rename(directory / SEGMENT_FILE)
        return segment

    @classmethod
    def attach(cls, directory: Path) -> Segment:
        """Map the segment another process made.

        Raises:
            SegmentMismatch: no segment there, or one of another version or size.
        """
        path = directory / SEGMENT_FILE
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise SegmentMismatch(f"{path}: cannot open the shared segment: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            return cls(directory, fd, _check(path, os.pread(fd, _HEAD.size, 0), os.fstat(fd).st_size))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap. Every row, table or sum made from this segment is unusable after."""
        if self._fd < 0:
            return
        self.cells_i64.release()
        self.cells_f64.release()
        self.cells_bytes.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1

    @property
    def launcher_pid(self) -> int:
        """Process id of the launcher; what `conf.child.die_with_parent` wants."""
        return self.cells_i64[Header.LAUNCHER_PID]

    @property
    def phase(self) -> Phase:
        """Return what the launcher is doing."""
        return Phase(self.cells_i64[Header.PHASE])

    def set_phase(self, phase: Phase) -> None:
        """Tell every process what the launcher is doing. Launcher only."""
        self.cells_i64[Header.PHASE] = phase

    @property
    def config_generation(self) -> int:
        """Number of configurations published so far; a reader re-reads when it changed. 0: none yet."""
        return self.cells_i64[Header.CONFIG_GENERATION]

    def publish_config(self, encoded: bytes) -> int:
        """Replace the configuration and raise its generation. Launcher only.

        Returns:
            The new generation.

        Raises:
            OSError: the file could not be written; the old one stays in force.
        """
        return self._publish(CONFIG_FILE, encoded, Header.CONFIG_GENERATION)

    def read_config(self) -> bytes:
        """Return the newest configuration as published.

        Read `config_generation` before and keep that number: if a publication comes between, the next look at
        the generation shows it.

        Raises:
            SegmentMismatch: nothing was published, or the directory is gone.
        """
        return self._read(CONFIG_FILE)

    @property
    def endpoints_generation(self) -> int:
        """Number of endpoint tables published so far. 0: none yet."""
        return self.cells_i64[Header.ENDPOINTS_GENERATION]

    def publish_endpoints(self, encoded: bytes) -> int:
        """Replace the endpoint table and raise its generation. Coordinator only; see shm.endpoints."""
        return self._publish(ENDPOINTS_FILE, encoded, Header.ENDPOINTS_GENERATION)

    def read_endpoints(self) -> bytes:
        """Return the newest endpoint table as published.

        Raises:
            SegmentMismatch: nothing was published, or the directory is gone.
        """
        return self._read(ENDPOINTS_FILE)

    def _publish(self, name: str, data: bytes, generation: Header) -> int:
        # The name changes hands before the number does: killed in between, readers still have the old
        # generation and a whole file, and the successor's first publication raises the number.
        unfinished = self.directory / f"{name}.new"
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        unfinished.rename(self.directory / name)
        new = self.cells_i64[generation] + 1
        self.cells_i64[generation] = new
        return new

    def _read(self, name: str) -> bytes:
        path = self.directory / name
        try:
            return path.read_bytes()
        except OSError as exc:
            raise SegmentMismatch(f"{path}: cannot read: {exc.strerror}") from exc


def is_in_use(directory: Path) -> bool:
    """Tell whether any process has the segment in `directory` attached. Does not wait."""
    try:
        fd = os.open(directory / SEGMENT_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove(directory: Path) -> bool:
    """Delete a segment's directory; processes that still have it mapped keep their mapping.

    Refuses (by returning False) a directory that does not look like a segment's, so that a wrong path in a
    state file costs nothing.

    Returns:
        Whether the directory is gone.
    """
    if not directory.is_dir() or directory.is_symlink():
        return not directory.exists()
    known = {SEGMENT_FILE, CONFIG_FILE, ENDPOINTS_FILE, ADMISSION_FILE}
    if any(entry.name.removesuffix(".new") not in known for entry in directory.iterdir()):
        return False
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def _check(path: Path, head: bytes, size: int) -> Layout:
    if len(head) < _HEAD.size:
        raise SegmentMismatch(f"{path}: too short to be a segment ({size} bytes)")
    magic, version, fingerprint, worker_slots, endpoint_slots, metric_cells = _HEAD.unpack(head)
    if magic != MAGIC:
        raise SegmentMismatch(f"{path}: not a segment of llmgw")
    if version != LAYOUT_VERSION:
        raise SegmentMismatch(
            f"{path}: made by another version (layout {version}, this program has {LAYOUT_VERSION})"
        )
    try:
        layout = Layout.of(Sizes(worker_slots, endpoint_slots, metric_cells))
    except ValueError as exc:
        raise SegmentMismatch(f"{path}: damaged header: {exc}") from exc
    if fingerprint != layout.fingerprint:
        raise SegmentMismatch(f"{path}: made by another build: restart the launcher")
    if size != layout.total_bytes:
        raise SegmentMismatch(f"{path}: {size} bytes instead of {layout.total_bytes}")
    return layout
