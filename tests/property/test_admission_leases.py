"""However grants, cancellations, time-outs, deaths and restarts interleave: no lease is lost or given twice.

The queue and the ledger as the coordinator drives them, beside workers made of a few lines. Messages lie in
channels and arrive one by one whenever the state machine says so.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.core.leases import Grant, GrantLedger, LeaseEvent, LeaseState
from coordinator.core.queue import BandQueue, QueueSettings, Waiter

LANE, POOL, BANDS, WORKERS = 0, 0, 2, 3
TTL_S = 10.0


@dataclass
class Worker:
    """A worker: its cell in the segment, its requests, and its connection."""

    leases: int = 0
    waiting: dict[int, Waiter] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    to_coordinator: deque[tuple[str, int]] = field(default_factory=deque)
    to_worker: deque[tuple[str, int]] = field(default_factory=deque)
    is_alive: bool = True


workers_ = st.integers(0, WORKERS - 1)


class HandOverMachine(RuleBasedStateMachine):
    """Several workers, one coordinator, a hard cap."""

    @initialize(cap=st.integers(1, 3))
    def begin(self, cap: int) -> None:
        self.cap = cap
        self.now = 1000.0
        self.workers = [Worker() for _ in range(WORKERS)]
        self.next_id = 0
        self.waiters: dict[int, Waiter] = {}
        self.owner: dict[int, int] = {}
        self.granted: list[int] = []
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.queue = BandQueue(QueueSettings(bands=BANDS), self.now)
        self.ledger = GrantLedger()

    def leases(self) -> int:
        """Return what anyone reads in the segment."""
        return sum(worker.leases for worker in self.workers) + self.ledger.leases(POOL)

    # Workers

    @rule(slot=workers_, band=st.integers(0, BANDS - 1))
    def request_comes(self, slot: int, band: int) -> None:
        worker = self.workers[slot]
        if not worker.is_alive:
            return
        self.next_id += 1
        worker.leases += 1
        if self.leases() <= self.cap and not any(each.waiting for each in self.workers):
            worker.running.add(self.next_id)
            return
        worker.leases -= 1
        waiter = Waiter(self.next_id, band, f"tenant-{slot}", self.now, self.now + TTL_S)
        self.waiters[waiter.id], self.owner[waiter.id] = waiter, slot
        worker.waiting[waiter.id] = waiter
        worker.to_coordinator.append(("enqueue", waiter.id))

    @rule(slot=workers_, pick=st.integers(0, 9))
    def client_leaves_the_queue(self, slot: int, pick: int) -> None:
        worker = self.workers[slot]
        if worker.waiting:
            waiter_id = sorted(worker.waiting)[pick % len(worker.waiting)]
            del worker.waiting[waiter_id]
            worker.to_coordinator.append(("cancel", waiter_id))

    @rule(slot=workers_)
    def request_ends(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker.running and worker.is_alive:
            worker.running.remove(min(worker.running))
            worker.leases -= 1
            if any(each.waiting for each in self.workers):
                worker.to_coordinator.append(("released", LANE))

    @rule(slot=workers_)
    def worker_reads(self, slot: int) -> None:
        worker = self.workers[slot]
        if not worker.to_worker or not worker.is_alive:
            return
        kind, waiter_id = worker.to_worker.popleft()
        if worker.waiting.pop(waiter_id, None) is None or kind == "refuse":
            return
        worker.leases += 1
        worker.running.add(waiter_id)
        worker.to_coordinator.append(("ack", waiter_id))

    @rule(slot=workers_)
    def worker_dies(self, slot: int) -> None:
        """Its cells stay until the coordinator finds it dead; what it sent can still be read."""
        worker = self.workers[slot]
        worker.is_alive = False
        worker.running.clear()
        worker.waiting.clear()
        worker.to_worker.clear()

    # Coordinator

    @rule(slot=workers_)
    def coordinator_reads(self, slot: int) -> None:
        worker = self.workers[slot]
        if not worker.to_coordinator:
            return
        kind, about = worker.to_coordinator.popleft()
        if kind == "enqueue":
            self.queue.enqueue(self.waiters[about], self.now)
        elif kind == "cancel":
            if self.queue.cancel(about, self.now) is None:
                self.ledger.take(about, LeaseEvent.CANCEL)
        elif kind == "ack":
            ended = self.ledger.take(about, LeaseEvent.ACK)
            assert ended is None or ended.state is LeaseState.HELD
        self.coordinator_grants()

    @rule(slot=workers_)
    def coordinator_finds_a_dead_worker(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker.is_alive:
            return
        self.ledger.lose_worker(slot)
        for waiter in self.queue:
            if self.owner[waiter.id] == slot:
                self.queue.cancel(waiter.id, self.now)
        self.workers[slot] = Worker()
        self.coordinator_grants()

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for waiter in self.queue.expire(self.now):
            self.workers[self.owner[waiter.id]].to_worker.append(("refuse", waiter.id))

    @rule()
    def coordinator_restarts(self) -> None:
        """Its own cells are zeroed. Workers drop what the old one sent, and tell the new one who waits."""
        self.start_coordinator()
        for worker in self.workers:
            worker.to_coordinator.clear()
            worker.to_worker.clear()
            worker.to_coordinator.extend(("enqueue", waiter_id) for waiter_id in worker.waiting)
        self.coordinator_grants()

    def coordinator_grants(self) -> None:
        def may_start(_: int) -> bool:
            return self.leases() < self.cap

        for waiter in self.queue.expire(self.now):
            self.workers[self.owner[waiter.id]].to_worker.append(("refuse", waiter.id))
        while (waiter := self.queue.grant_next(may_start, self.now)) is not None:
            slot = self.owner[waiter.id]
            self.ledger.give(Grant(waiter.id, slot, LANE, POOL))
            self.workers[slot].to_worker.append(("grant", waiter.id))

    # What must hold

    @invariant()
    def engines_never_see_more_than_the_cap(self) -> None:
        if hasattr(self, "workers"):
            assert sum(len(worker.running) for worker in self.workers) <= self.cap
            assert all(worker.leases >= len(worker.running) for worker in self.workers)

    @invariant()
    def counts_are_those_of_what_is_under_way(self) -> None:
        if hasattr(self, "workers"):
            self.ledger.check()
            self.queue.check()

    def teardown(self) -> None:
        """Let everything arrive and end: nobody is left waiting, and every slot is free."""
        if not hasattr(self, "workers"):
            return
        for slot in range(WORKERS):
            self.coordinator_finds_a_dead_worker(slot)
        for _ in range(self.next_id + 1):
            while any(worker.to_coordinator or worker.to_worker for worker in self.workers):
                for slot in range(WORKERS):
                    self.coordinator_reads(slot)
                    self.worker_reads(slot)
                self.engines_never_see_more_than_the_cap()
            for slot in range(WORKERS):
                self.request_ends(slot)
        assert [worker for worker in self.workers if worker != Worker()] == []
        assert (len(self.queue), len(self.ledger), self.leases()) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_after_a_storm_of_everything_all_slots_are_free(seed: int) -> None:
    """The same machine, driven for longer and with crowds, which hypothesis seldom builds."""
    rng = random.Random(seed)
    for _ in range(20):
        machine = HandOverMachine()
        machine.begin(cap=rng.randint(1, 4))
        often = [machine.worker_reads, machine.coordinator_reads, machine.request_ends]
        rare = [machine.worker_dies, machine.coordinator_finds_a_dead_worker]
        for _ in range(150):
            slot = rng.randrange(WORKERS)
            match rng.randrange(12):
                case 0 | 1:
                    for _ in range(rng.randint(1, 6)):
                        machine.request_comes(slot, rng.randrange(BANDS))
                case 2:
                    machine.client_leaves_the_queue(slot, rng.randrange(10))
                case 3 if rng.random() < 0.5:
                    rng.choice(rare)(slot)
                case 4 if rng.random() < 0.2:
                    machine.coordinator_restarts()
                case 4 if rng.random() < 0.2:
                    machine.time_passes(TTL_S / 2)
                case _:
                    for _ in range(rng.randint(1, 4)):
                        rng.choice(often)(slot)
            machine.engines_never_see_more_than_the_cap()
        machine.counts_are_those_of_what_is_under_way()
        machine.teardown()


TestHandOver = HandOverMachine.TestCase
TestHandOver.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
