"""Slots: which process owns which row, and what happens to the rows of a dead one.

A slot is owned by whoever holds the lock on byte `slot` of the file `segment`, taken through a file
description of its own (F_OFD_SETLK). The kernel drops the lock when the process dies, however it dies;
nothing is left to clean up but numbers. A forked child would share the description and keep the lock of its
dead parent, so each child closes what it inherits, at the fork.

    owner     writes the cells of its slot, its inflight and marks columns and its metrics row
    reaper    takes the lock of a slot whose PID is not 0; success proves that the owner is dead and makes the
              reaper the one writer until it lets go. It zeroes inflight, marks and gauges and clears PID.
    claimer   does the same to a slot that nobody has reaped yet, then signs it

Counters and histograms of the metrics row are kept: the next owner goes on from there, so sums never go back.
Reaping twice, or by several processes at once, changes nothing more.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass

from conf.errors import LlmgwError
from shm.layout import FixedSlot, Region, SlotField, SlotState
from shm.metrics import zero_gauges
from shm.segment import SEGMENT_FILE, Segment

# struct flock of x86-64 Linux: type, whence, start, len, pid (0 with OFD locks).
_FLOCK = struct.Struct("hhqqi4x")
_CLAIM_DEADLINE_S = 2.0


class NoFreeSlot(LlmgwError):
    """Every slot of the wanted kind has a living owner: more processes run than the segment was made for."""


@dataclass(frozen=True, slots=True)
class ReapedSlot:
    """A dead process's slot that was given back.

    Attributes:
        slot: its number.
        pid: process id of the dead owner.
        inflight_returned: requests it had in flight, over all endpoints.
    """

    slot: int
    pid: int
    inflight_returned: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a slot says about its owner; `pid` 0 means free. Times are monotonic seconds."""

    slot: int
    pid: int
    generation: int
    started_s: float
    heartbeat_s: float
    state: SlotState


class WorkerSlot:
    """A slot this process owns, until `release` or death. In a forked child the object is as after `release`.

    Attributes:
        index: slot number; the worker's column in inflight and marks, and its metrics row.
        generation: how many owners the slot has had, with this one.
    """

    __slots__ = (
        "_cells",
        "_heartbeat",
        "_lock_fd",
        "_segment",
        "_state",
        "generation",
        "index",
    )

    def __init__(self, segment: Segment, index: int, lock_fd: int) -> None:
        """Sign a slot whose lock is held; use `claim` or `claim_fixed` instead."""
        layout = segment.layout
        self.index = index
        self._segment = segment
        self._lock_fd = lock_fd
        self._cells = cells = segment.cells_i64
        self._heartbeat = layout.slot_cell(index, SlotField.HEARTBEAT_NS)
        self._state = layout.slot_cell(index, SlotField.STATE)
        _zero(segment, index)
        now_ns = time.monotonic_ns()
        self.generation = cells[layout.slot_cell(index, SlotField.GENERATION)] + 1
        cells[layout.slot_cell(index, SlotField.GENERATION)] = self.generation
        cells[layout.slot_cell(index, SlotField.STARTED_NS)] = now_ns
        cells[self._heartbeat] = now_ns
        cells[self._state] = SlotState.STARTING
        cells[layout.slot_cell(index, SlotField.PID)] = os.getpid()
        os.register_at_fork(after_in_child=self._forget)

    @classmethod
    def claim(cls, segment: Segment) -> WorkerSlot:
        """Take the first worker slot without a living owner. Call it after the fork.

        Tries for up to two seconds, since a reaper may hold a lock for some microseconds.

        Raises:
            NoFreeSlot: all worker slots have living owners.
        """
        return cls._claim(segment, range(segment.layout.sizes.worker_slots))

    @classmethod
    def claim_fixed(cls, segment: Segment, process: FixedSlot) -> WorkerSlot:
        """Take the slot of the coordinator, the launcher or the arbiter.

        Raises:
            NoFreeSlot: another such process is alive, and still is after two seconds.
        """
        slot = segment.layout.fixed_slot(process)
        return cls._claim(segment, range(slot, slot + 1))

    @classmethod
    def _claim(cls, segment: Segment, slots: range) -> WorkerSlot:
        fd = _open_locks(segment)
        try:
            deadline = time.monotonic() + _CLAIM_DEADLINE_S
            while True:
                for slot in slots:
                    if _try_lock(fd, slot):
                        return cls(segment, slot, fd)
                if time.monotonic() > deadline:
                    raise NoFreeSlot(
                        f"no free slot among {slots.start}..{slots.stop - 1} in {segment.directory}"
                    )
                time.sleep(0.005)
        except BaseException:
            os.close(fd)
            raise

    def heartbeat(self, now: float) -> None:
        """Record that the process is alive.

        Args:
            now: monotonic seconds.
        """
        self._cells[self._heartbeat] = int(now * 1e9)

    def set_state(self, state: SlotState) -> None:
        """Record what the process is doing."""
        self._cells[self._state] = state

    def release(self) -> None:
        """Give the slot back: zero inflight, marks and gauges, clear the pid, drop the lock. Idempotent."""
        if self._lock_fd < 0:
            return
        _zero(self._segment, self.index)
        self._cells[self._segment.layout.slot_cell(self.index, SlotField.PID)] = 0
        self._forget()

    def _forget(self) -> None:
        """Let go of an inherited slot, in a child that was just forked; its parent keeps it."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def reap_dead(segment: Segment) -> list[ReapedSlot]:
    """Give back the slots of processes that died. Never waits; any process may call it at any time.

    Costs one open and one fcntl per slot in use (about 20 us); meant to run every 250 ms and when a child
    exits.
    """
    cells, layout = segment.cells_i64, segment.layout
    used = [
        slot for slot in range(layout.sizes.total_slots) if cells[layout.slot_cell(slot, SlotField.PID)] != 0
    ]
    if not used:
        return []
    reaped = []
    fd = _open_locks(segment)
    try:
        for slot in used:
            if not _try_lock(fd, slot):
                continue
            pid_cell = layout.slot_cell(slot, SlotField.PID)
            if pid := cells[pid_cell]:  # a quicker reaper may have been here since
                reaped.append(ReapedSlot(slot, pid, _zero(segment, slot)))
                cells[pid_cell] = 0
            _unlock(fd, slot)
    finally:
        os.close(fd)
    return reaped


def slots_in_use(segment: Segment) -> list[SlotView]:
    """Return every signed slot, dead owners that nobody reaped yet included."""
    cells, layout = segment.cells_i64, segment.layout
    views = []
    for slot in range(layout.sizes.total_slots):
        at = layout.slot_cell(slot, SlotField.PID)
        if pid := cells[at]:
            views.append(
                SlotView(
                    slot=slot,
                    pid=pid,
                    generation=cells[at + SlotField.GENERATION],
                    started_s=cells[at + SlotField.STARTED_NS] / 1e9,
                    heartbeat_s=cells[at + SlotField.HEARTBEAT_NS] / 1e9,
                    state=SlotState(cells[at + SlotField.STATE]),
                )
            )
    return views


def _zero(segment: Segment, slot: int) -> int:
    """Zero a slot's inflight, marks and gauges; return the inflight sum. The caller holds the slot's lock."""
    cells, layout = segment.cells_i64, segment.layout
    returned = 0
    if slot < layout.sizes.worker_slots:
        stride = layout.sizes.worker_slots
        for cell in range(layout.inflight.start + slot, layout.inflight.end, stride):
            if count := cells[cell]:
                returned += count
                cells[cell] = 0
        for cell in range(layout.marks.start + slot, layout.marks.end, stride):
            if cells[cell]:
                cells[cell] = 0
        _zero_column(cells, layout.silent, slot, stride)
        _zero_column(cells, layout.moved, slot, stride)
        _zero_column(cells, layout.waiters, slot, stride)
    _zero_column(cells, layout.leases, slot, layout.sizes.total_slots)
    _zero_column(cells, layout.pending, slot, layout.sizes.total_slots)
    zero_gauges(segment, slot)
    return returned


def _zero_column(cells: memoryview[int], region: Region, slot: int, stride: int) -> None:
    for cell in range(region.start + slot, region.end, stride):
        if cells[cell]:
            cells[cell] = 0


def _open_locks(segment: Segment) -> int:
    return os.open(segment.directory / SEGMENT_FILE, os.O_RDWR | os.O_CLOEXEC)


def _try_lock(fd: int, slot: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0))
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int, slot: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, slot, 1, 0))
