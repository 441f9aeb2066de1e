"""Slots: one living owner each, given back whole at death."""

from __future__ import annotations

import os
import signal

import pytest

import shm.rows
from shm.definitions import CONNECTIONS, REQUESTS
from shm.inflight import InflightRow, InflightSums
from shm.layout import FixedSlot, SlotState
from shm.marks import CooldownMarks
from shm.metrics import MetricsRow, read_all
from shm.rows import NoFreeSlot, WorkerSlot, reap_dead, slots_in_use
from shm.segment import Segment
from tests.support.segments import Forked, await_report, report


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm.rows, "_CLAIM_DEADLINE_S", 0.05)


def die_owning(segment: Segment, *, endpoint: int = 0, requests: int = 0) -> int:
    """Fork a process that takes a slot, gets requests, sets a mark, counts, and is killed; return its pid."""
    read_fd, write_fd = os.pipe()

    def live() -> None:
        slot = WorkerSlot.claim(segment)
        row = InflightRow(segment, slot)
        for _ in range(requests):
            row.add(endpoint)
        CooldownMarks(segment, slot).set(endpoint, 1e12)
        metrics = MetricsRow(segment, slot)
        metrics.counter(REQUESTS, ("m", "p", "200")).inc(5)
        metrics.gauge(CONNECTIONS).set(3)
        report(write_fd)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it

    child = Forked(live)
    await_report(read_fd)
    child.kill()
    os.close(read_fd)
    os.close(write_fd)
    return child.pid


def value(segment: Segment, name: str) -> float:
    return sum(sample.value for sample in read_all(segment) if sample.definition.name == name)


def test_claims_take_different_slots_and_the_next_one_is_refused(segment: Segment):
    slots = [WorkerSlot.claim(segment) for _ in range(4)]
    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    with pytest.raises(NoFreeSlot):
        WorkerSlot.claim(segment)
    slots[2].release()
    again = WorkerSlot.claim(segment)
    assert (again.index, again.generation) == (2, 2)
    for slot in (*slots, again):
        slot.release()


def test_there_is_one_of_each_fixed_process(segment: Segment):
    slots = [WorkerSlot.claim_fixed(segment, process) for process in FixedSlot]
    assert [slot.index for slot in slots] == [4, 5, 6]
    with pytest.raises(NoFreeSlot):
        WorkerSlot.claim_fixed(segment, FixedSlot.COORDINATOR)
    for slot in slots:
        slot.release()


def test_a_dead_owners_requests_marks_and_gauges_are_given_back_and_its_counters_kept(segment: Segment):
    pid = die_owning(segment, endpoint=3, requests=2)
    sums, marks = InflightSums(segment), CooldownMarks(segment)
    assert (sums.of(3), marks.until(3), value(segment, "llmgw_client_connections")) == (2, 1e12, 3)
    (reaped,) = reap_dead(segment)
    assert (reaped.slot, reaped.pid, reaped.inflight_returned) == (0, pid, 2)
    assert (sums.of(3), marks.until(3), value(segment, "llmgw_client_connections")) == (0, 0, 0)
    assert value(segment, "llmgw_requests_total") == 5
    assert slots_in_use(segment) == []


def test_reaping_twice_changes_nothing_more(segment: Segment):
    die_owning(segment, requests=1)
    assert len(reap_dead(segment)) == 1
    assert reap_dead(segment) == []


def test_living_owners_are_not_reaped(segment: Segment):
    slot = WorkerSlot.claim(segment)
    InflightRow(segment, slot).add(0)
    coordinator = WorkerSlot.claim_fixed(segment, FixedSlot.COORDINATOR)
    assert reap_dead(segment) == []
    assert InflightSums(segment).of(0) == 1
    slot.release()
    coordinator.release()


def test_a_claim_cleans_a_slot_that_nobody_reaped_and_goes_on_with_its_counters(segment: Segment):
    die_owning(segment, endpoint=1, requests=4)
    slot = WorkerSlot.claim(segment)
    assert (slot.index, slot.generation) == (0, 2)
    assert InflightSums(segment).of(1) == 0
    MetricsRow(segment, slot).counter(REQUESTS, ("m", "p", "200")).inc()
    assert value(segment, "llmgw_requests_total") == 6
    slot.release()


def test_a_slot_being_claimed_is_not_reaped(segment: Segment, monkeypatch: pytest.MonkeyPatch):
    die_owning(segment, requests=1)
    reaped_meanwhile = []
    real = shm.rows._zero

    def slow_zero(*args: object) -> int:
        monkeypatch.setattr(shm.rows, "_zero", real)
        reaped_meanwhile.extend(reap_dead(segment))
        return real(*args)

    monkeypatch.setattr(shm.rows, "_zero", slow_zero)
    slot = WorkerSlot.claim(segment)
    assert reaped_meanwhile == []
    slot.release()


def test_release_gives_everything_back_and_may_be_repeated(segment: Segment):
    slot = WorkerSlot.claim(segment)
    InflightRow(segment, slot).add(0)
    slot.release()
    slot.release()
    assert InflightSums(segment).of(0) == 0
    assert slots_in_use(segment) == []


def test_a_forked_child_does_not_keep_the_slot_of_its_dead_parent(segment: Segment):
    """Gunicorn's workers are forked by the arbiter, and live on when it is killed."""
    read_fd, write_fd = os.pipe()
    hold_read, hold_write = os.pipe()

    def arbiter() -> None:
        WorkerSlot.claim_fixed(segment, FixedSlot.ARBITER)
        worker = os.fork()
        if worker == 0:
            os.close(hold_write)
            report(write_fd)
            os.read(hold_read, 1)  # until the test lets go
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    child = Forked(arbiter)
    await_report(read_fd)
    child.kill()
    assert [reaped.slot for reaped in reap_dead(segment)] == [6]
    WorkerSlot.claim_fixed(segment, FixedSlot.ARBITER).release()
    for fd in (hold_write, hold_read, read_fd, write_fd):
        os.close(fd)


def test_a_forked_child_cannot_release_its_parents_slot(segment: Segment):
    slot = WorkerSlot.claim(segment)
    InflightRow(segment, slot).add(0)
    assert Forked(slot.release).wait() == 0
    assert InflightSums(segment).of(0) == 1
    assert [view.slot for view in slots_in_use(segment)] == [0]
    slot.release()


def test_a_slot_tells_who_owns_it_since_when_and_what_it_does(segment: Segment):
    slot = WorkerSlot.claim(segment)
    slot.set_state(SlotState.SERVING)
    slot.heartbeat(12.5)
    (view,) = slots_in_use(segment)
    assert (view.pid, view.generation) == (os.getpid(), 1)
    assert (view.heartbeat_s, view.state) == (12.5, SlotState.SERVING)
    assert view.started_s > 0
    slot.release()
