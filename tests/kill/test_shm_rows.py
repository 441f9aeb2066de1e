"""Rows of killed processes: workers live short lives and are killed anywhere, while others read and reap."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.definitions import CONNECTIONS, REQUESTS, TTFT
from shm.inflight import InflightRow, InflightSums
from shm.layout import Sizes
from shm.marks import CooldownMarks
from shm.metrics import MetricsReader, MetricsRow
from shm.rows import NoFreeSlot, WorkerSlot, reap_dead, slots_in_use
from shm.segment import Segment
from tests.support.segments import Forked, made_segment
from tests.support.wait import wait_until

ENDPOINTS = 16
WORKERS = 6
KILLS = 150


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with made_segment(tmp_path / "segment", Sizes(worker_slots=8, endpoint_slots=ENDPOINTS)) as made:
        yield made


def work(segment: Segment, seed: int) -> None:
    """Serve as a worker does: take, count, mark, give back, with new series now and then; never ends."""
    rng = random.Random(seed)
    slot = WorkerSlot.claim(segment)
    row, marks, metrics = InflightRow(segment, slot), CooldownMarks(segment, slot), MetricsRow(segment, slot)
    metrics.gauge(CONNECTIONS).set(1)
    while True:
        held = [rng.randrange(ENDPOINTS) for _ in range(rng.randrange(1, 20))]
        for endpoint in held:
            row.add(endpoint)
            marks.set(endpoint, 1e12)
        labels = (f"model-{rng.randrange(40)}", "p", "200")
        for endpoint in held:
            metrics.counter(REQUESTS, labels).inc()
            metrics.histogram(TTFT, labels[:2]).observe(rng.random())
            row.sub(endpoint)


def reap_for_ever(segment: Segment) -> None:
    """Reap as the coordinator does, only more often."""
    while True:
        reap_dead(segment)
        time.sleep(0.001)


class Watch:
    """Reads all series again and again, and remembers the highest value of each."""

    def __init__(self, segment: Segment) -> None:
        self._reader = MetricsReader(segment)
        self._highest: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}

    def look(self) -> None:
        for sample in self._reader.read():
            if sample.definition is CONNECTIONS:
                continue
            key = (sample.definition.name, sample.labels)
            now = (sample.value, *sample.buckets)
            before = self._highest.get(key, (0.0,) * len(now))
            assert all(new >= old for new, old in zip(now, before, strict=True)), (key, before, now)
            self._highest[key] = now

    @property
    def requests(self) -> float:
        return sum(value for (name, _), (value, *_) in self._highest.items() if name == REQUESTS.name)


def test_counts_return_to_zero_and_counters_never_go_back_whenever_workers_are_killed(segment: Segment):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    watch, sums = Watch(segment), InflightSums(segment)
    workers = {n: Forked(lambda n=n: work(segment, seed + n)) for n in range(WORKERS)}
    reapers = [Forked(lambda: reap_for_ever(segment)) for _ in range(2)]
    try:
        for number in range(KILLS):
            until = time.monotonic() + rng.random() * 0.03
            while time.monotonic() < until:
                watch.look()
                assert min(sums.many(range(ENDPOINTS))) >= 0
            victim = rng.randrange(WORKERS)
            workers[victim].kill()
            if rng.random() < 0.1:  # a reaper dies as well, perhaps within a slot
                reapers.pop().kill()
                reapers.append(Forked(lambda: reap_for_ever(segment)))
            workers[victim] = Forked(lambda n=number: work(segment, seed + WORKERS + n))
        assert watch.requests > 0
    finally:
        for process in (*workers.values(), *reapers):
            process.kill()
    began = time.monotonic()
    wait_until(lambda: reap_dead(segment) is not None and not slots_in_use(segment), 1.0)
    assert time.monotonic() - began < 1.0
    assert sums.many(range(ENDPOINTS)) == [0] * ENDPOINTS
    assert CooldownMarks(segment).many(range(ENDPOINTS)) == [0.0] * ENDPOINTS
    watch.look()
    gauges = [s.value for s in MetricsReader(segment).read() if s.definition is CONNECTIONS]
    assert gauges == [0.0]


def test_no_slot_ever_has_two_owners(segment: Segment, tmp_path: Path):
    """Every owner creates a file named after its slot and generation; a second one would find it there."""

    def own_shortly() -> None:
        while True:
            try:
                slot = WorkerSlot.claim(segment)
            except NoFreeSlot:
                continue
            mine = segment.layout.inflight.start + slot.index
            segment.cells_i64[mine] = os.getpid()
            for _ in range(50):
                assert segment.cells_i64[mine] == os.getpid()
            (tmp_path / f"{slot.index}-{slot.generation}").touch(exist_ok=False)
            slot.release()

    processes = [Forked(own_shortly) for _ in range(10)]
    reaper = Forked(lambda: reap_for_ever(segment))
    try:
        for _ in range(40):
            time.sleep(0.01)
            victim = processes.pop(0)
            victim.kill()
            processes.append(Forked(own_shortly))
    finally:
        ended = [os.waitpid(process.pid, os.WNOHANG) for process in processes]
        for process, (pid, _) in zip(processes, ended, strict=True):
            if pid == 0:
                process.kill()
        reaper.kill()
    assert [status for pid, status in ended if pid] == []


def test_a_stopped_worker_is_not_taken_for_a_dead_one(segment: Segment):
    def own() -> None:
        slot = WorkerSlot.claim(segment)
        InflightRow(segment, slot).add(3)
        while True:
            signal.pause()

    worker = Forked(own)
    try:
        wait_until(lambda: InflightSums(segment).of(3) == 1)
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
        assert reap_dead(segment) == []
        assert InflightSums(segment).of(3) == 1
    finally:
        worker.kill()
    assert [slot.inflight_returned for slot in reap_dead(segment)] == [1]
