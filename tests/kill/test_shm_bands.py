"""Admission's cells of killed processes: owners live short lives, are killed anywhere, others reap."""

from __future__ import annotations

import mmap
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.bands import BandCells, LeaseRow, barrier
from shm.layout import BANDS, Sizes
from shm.rows import WorkerSlot, reap_dead, slots_in_use
from shm.segment import Segment
from tests.support.segments import Forked, made_segment
from tests.support.wait import wait_until

WORKERS = 6
POOLS = LANES = 3
KILLS = 120
CAP = 3


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with made_segment(tmp_path / "segment", Sizes(worker_slots=8, endpoint_slots=8)) as made:
        yield made


def admit_for_ever(segment: Segment, seed: int) -> None:
    """Take, dispatch, try again elsewhere, give back, wait; as a worker does, only more often."""
    rng = random.Random(seed)
    row = LeaseRow(segment, WorkerSlot.claim(segment))
    while True:
        pool, band = rng.randrange(POOLS), rng.randrange(BANDS)
        row.add_waiter(pool, band, 1)
        row.take(pool, pool)
        row.add_waiter(pool, band, -1)
        row.dispatched(pool)
        if rng.random() < 0.5:
            row.undispatched(pool)
            row.take_back(pool, pool)
        else:
            row.give_back(pool)


def reap_for_ever(segment: Segment) -> None:
    while True:
        reap_dead(segment)
        time.sleep(0.001)


def test_counts_return_to_zero_whenever_workers_are_killed(segment: Segment) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cells = BandCells(segment)
    workers = {n: Forked(lambda n=n: admit_for_ever(segment, seed + n)) for n in range(WORKERS)}
    reapers = [Forked(lambda: reap_for_ever(segment)) for _ in range(2)]
    most = 0
    try:
        for number in range(KILLS):
            until = time.monotonic() + rng.random() * 0.03
            while time.monotonic() < until:
                counts = [cells.leases(pool) for pool in range(POOLS)]
                most = max(most, *counts)
                assert 0 <= min(counts) <= max(counts) <= WORKERS + 1
            victim = rng.randrange(WORKERS)
            workers[victim].kill()
            workers[victim] = Forked(lambda n=number: admit_for_ever(segment, seed + WORKERS + n))
        assert most > 1
    finally:
        for process in (*workers.values(), *reapers):
            process.kill()
    wait_until(lambda: reap_dead(segment) is not None and not slots_in_use(segment), 1.0)
    assert [cells.leases(pool) for pool in range(POOLS)] == [0] * POOLS
    assert [cells.pending(lane) for lane in range(LANES)] == [0] * LANES
    assert [cells.local_waiters(lane) for lane in range(LANES)] == [[0] * BANDS] * LANES


def test_the_cap_holds_at_every_moment_for_those_who_take_look_and_step_back(segment: Segment) -> None:
    """Each holder raises a flag of its own while it is inside; never are more flags up than the cap."""
    flags = mmap.mmap(-1, 8 * WORKERS)
    violations = mmap.mmap(-1, 8 * WORKERS)
    entries = mmap.mmap(-1, 8 * WORKERS)

    def enter_for_ever(me: int) -> None:
        row, cells = LeaseRow(segment, WorkerSlot.claim(segment)), BandCells(segment)
        up, seen, count = (memoryview(each).cast("q") for each in (flags, violations, entries))
        while True:
            row.take(0, 0)
            barrier()
            if cells.leases(0) - 1 < CAP:
                up[me] = 1
                barrier()
                seen[me] += sum(up) > CAP
                count[me] += 1
                up[me] = 0
                barrier()
            row.take_back(0, 0)

    processes = [Forked(lambda n=n: enter_for_ever(n)) for n in range(WORKERS)]
    try:
        wait_until(lambda: min(struct.unpack(f"{WORKERS}q", entries[:])) > 500, 20)
    finally:
        for process in processes:
            process.kill()
    assert struct.unpack(f"{WORKERS}q", violations[:]) == (0,) * WORKERS
