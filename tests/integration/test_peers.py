"""Several instances on a real Redis: what they tell each other, and a cap that holds."""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.core.peer_rows import Row, encode
from coordinator.core.shares import Statement
from coordinator.ledger import SETTLE_MS, Ledger, LedgerAway
from shm.bands import BandCells, LeaseRow, barrier
from shm.endpoints import EndpointPublisher, EndpointRecord, EndpointTable
from shm.inflight import InflightRow
from shm.layout import Sizes, StatField
from shm.metrics import read_all
from shm.rows import WorkerSlot
from tests.support.processes import ROOT, Program, Programs
from tests.support.redis import RedisServer
from tests.support.segments import made_segment
from tests.support.wait import wait_until

# As in tests.support.peer, which patches what it is imported into.
CAP = 16
WORKERS = 4
RECORD = EndpointRecord(
    id="e1", model="chat-model", url="http://e:1", engine="sim", pool="default", served_model="m"
)


class Instance:
    """A segment, its exchange as a program, and the rows of its workers, written by the test."""

    def __init__(self, stack: ExitStack, programs: Programs, redis: RedisServer, directory: Path) -> None:
        self.directory = directory
        self.segment = stack.enter_context(made_segment(directory, Sizes(worker_slots=WORKERS)))
        EndpointPublisher(self.segment).publish([RECORD], 0.0, {"default": 0})
        self.slots = [WorkerSlot.claim(self.segment) for _ in range(WORKERS)]
        for slot in self.slots:
            stack.callback(slot.release)
        self.rows = [LeaseRow(self.segment, slot) for slot in self.slots]
        self.cells = BandCells(self.segment)
        self.table = EndpointTable(self.segment)
        self._programs, self._redis = programs, redis
        # Accepts connections as long as the instance lives.
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.start()

    def start(self) -> None:
        listen = f"127.0.0.1:{self._listener.getsockname()[1]}"
        command = [sys.executable, "-m", "tests.support.peer", str(self.directory), self._redis.url]
        self.program: Program = self._programs.start_command(
            [*command, self.directory.name, listen], cwd=ROOT
        )
        self.program.wait_for_output("^started")

    def kill(self) -> None:
        """Kill the coordinator alone."""
        self.program.signal(signal.SIGKILL)
        self.program.wait()

    def die(self) -> None:
        """Kill all of it."""
        self.kill()
        self._listener.close()

    @property
    def share(self) -> int:
        return self.cells.cap(0)

    def lack(self, waiters: int, band: int = 1) -> None:
        """Have so many requests more wait for the share."""
        self.rows[0].add_waiter(0, band, waiters)
        demand = {"tenants": [1] * 4, "is_full": waiters > 0}
        (self.directory / "demand.new").write_text(json.dumps(demand))
        (self.directory / "demand.new").rename(self.directory / "demand")

    def try_take(self, worker: int) -> bool:
        """Take a lease as a worker does."""
        self.rows[worker].take(0, 0)
        barrier()
        if self.cells.leases(0) > self.cells.cap(0):
            self.rows[worker].take_back(0, 0)
            return False
        return True

    def metric(self, name: str) -> float:
        samples = [sample for sample in read_all(self.segment) if sample.definition.name == name]
        return sum(sample.value for sample in samples)

    def log_lines(self, event: str) -> list[str]:
        return [line for line in self.program.output().splitlines() if f'"{event}"' in line]


@pytest.fixture
def redis(programs: Programs, tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(programs, tmp_path)
    yield server
    if server.program.returncode is None:
        server.program.signal(signal.SIGCONT)


@pytest.fixture
def instance(programs: Programs, redis: RedisServer, tmp_path: Path) -> Iterator[Callable[[str], Instance]]:
    with ExitStack() as stack:
        yield lambda name: Instance(stack, programs, redis, tmp_path / name)


def wait_shares(*instances: Instance, timeout: float = 8.0) -> None:
    """Wait until the whole cap is dealt, with something for everybody."""
    wait_until(
        lambda: sum(each.share for each in instances) == CAP and min(each.share for each in instances) > 0,
        timeout,
        lambda: f"shares {[each.share for each in instances]}",
    )


def test_what_one_runs_and_who_waits_there_the_other_knows_within_a_second(
    instance: Callable[[str], Instance],
) -> None:
    one, other = instance("a"), instance("b")
    wait_shares(one, other)
    InflightRow(one.segment, one.slots[0]).add(0)
    one.rows[1].take(0, 0)
    one.rows[1].add_waiter(0, 2, 5)
    wait_until(lambda: other.cells.remote_leases(0) == 1, 1.0)
    wait_until(lambda: other.cells.waiters(0)[2] == 5, 1.0)
    wait_until(lambda: other.table.stat(0, StatField.REMOTE_INFLIGHT) == 1, 1.0)
    assert one.cells.remote_leases(0) == 0
    assert other.metric("llmgw_redis_up") == 1
    assert other.metric("llmgw_peers") == 1


def test_a_share_moves_to_where_requests_wait_and_back(instance: Callable[[str], Instance]) -> None:
    one, other = instance("a"), instance("b")
    wait_shares(one, other)
    one.lack(100)
    wait_until(lambda: one.share == CAP and other.share == 0, 2.0, lambda: f"{one.share} {other.share}")
    one.lack(-100)
    wait_shares(one, other, timeout=2.0)


def test_the_cap_is_exact_under_contention(instance: Callable[[str], Instance]) -> None:
    both = [instance("a"), instance("b")]
    wait_shares(*both)
    stop = threading.Event()
    tally, lock, most = [0], threading.Lock(), [0]

    def work(each: Instance, worker: int) -> None:
        rng = random.Random(worker)
        while not stop.is_set():
            if each.try_take(worker):
                with lock:
                    tally[0] += 1
                    most[0] = max(most[0], tally[0])
                stop.wait(rng.random() * 0.02)
                with lock:
                    tally[0] -= 1
                each.rows[worker].take_back(0, 0)
            else:
                stop.wait(0.001)

    threads = [
        threading.Thread(target=work, args=(each, worker)) for each in both for worker in range(WORKERS)
    ]
    # A thread stands for a worker with one request, so held leases make up the rest of the cap.
    held = [[each.try_take(0) for _ in range(6)] for each in both]
    tally[0] = sum(map(sum, held))
    for thread in threads:
        thread.start()
    try:
        seen = set()
        for turn in range(8):  # the flood goes to and fro
            giver, taker = both[turn % 2], both[1 - turn % 2]
            taker.lack(50)
            before = giver.share
            wait_until(lambda giver=giver, before=before: giver.share < before or giver.share <= 6, 3.0)
            seen.add((both[0].share, both[1].share))
            taker.lack(-50)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert most[0] <= CAP
    assert len(seen) > 1
    assert all(sum(pair) <= CAP for pair in seen)


def test_the_share_of_a_dead_instance_is_back_within_three_seconds(
    instance: Callable[[str], Instance],
) -> None:
    one, other = instance("a"), instance("b")
    wait_shares(one, other)
    one.lack(1)
    other.lack(100)
    other.rows[1].add_waiter(0, 0, 1)
    wait_until(lambda: one.cells.waiters(0)[0] == 1, 1.0)
    other.die()
    started = time.monotonic()
    wait_until(lambda: one.share == CAP, 3.0, lambda: f"{one.share}")
    print(f"back after {time.monotonic() - started:.2f} s")
    assert one.cells.waiters(0)[0] == 0
    assert one.metric("llmgw_peers_removed_total") == 1


def test_an_instance_whose_workers_live_keeps_its_share_without_its_coordinator(
    instance: Callable[[str], Instance],
) -> None:
    one, other = instance("a"), instance("b")
    wait_shares(one, other)
    share = other.share
    other.kill()
    one.lack(100)
    wait_until(lambda: one.log_lines("peer_silent"), 5.0)
    for _ in range(20):  # exchanges in which it might be taken for dead
        count = one.metric("llmgw_redis_exchanges_total")
        wait_until(lambda count=count: one.metric("llmgw_redis_exchanges_total") > count, 2.0)
    assert (one.share, other.share) == (CAP - share, share)
    other.start()
    wait_until(lambda: one.share == CAP, 3.0, lambda: f"{one.share} {other.share}")


@pytest.mark.parametrize("way", ["killed", "hanging"])
def test_without_redis_everyone_keeps_its_share_and_afterwards_they_share_again(
    instance: Callable[[str], Instance], redis: RedisServer, way: str
) -> None:
    one, other = instance("a"), instance("b")
    wait_shares(one, other)
    other.rows[0].add_waiter(0, 0, 1)
    wait_until(lambda: one.cells.waiters(0)[0] == 1, 1.0)
    shares = (one.share, other.share)
    if way == "killed":
        redis.kill()
    else:
        redis.hang()
    wait_until(lambda: one.metric("llmgw_redis_up") == 0 and other.metric("llmgw_redis_up") == 0, 3.0)
    one.lack(100)
    wait_until(lambda: one.cells.waiters(0)[0] == 0, 4.0, "waiters nobody hears of are forgotten")
    assert (one.share, other.share) == shares
    assert len(one.log_lines("redis_away")) == 1
    if way == "killed":
        redis.start()
    else:
        redis.go_on()
    wait_until(lambda: one.metric("llmgw_redis_up") == 1, 3.0)
    wait_until(lambda: one.share > shares[0], 6.0, lambda: f"{one.share} {other.share}")
    assert one.share + other.share <= CAP
    assert len(one.log_lines("redis_away")) == 1


def test_an_instance_that_stops_gives_its_share_back_at_once(instance: Callable[[str], Instance]) -> None:
    one, other = instance("a"), instance("b")
    wait_shares(one, other)
    assert other.program.stop() == 0
    wait_until(lambda: one.share == CAP, 1.0, lambda: f"{one.share}")


def test_nobody_who_starts_without_redis_has_a_share(
    instance: Callable[[str], Instance], redis: RedisServer
) -> None:
    redis.kill()
    alone = instance("a")
    wait_until(lambda: alone.log_lines("redis_away"), 3.0)
    assert alone.share == 0
    redis.start()
    wait_until(lambda: alone.share == CAP, 6.0)


steps = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9), st.integers(0, 12), st.booleans()
    ),
    max_size=12,
)


def test_the_script_does_what_its_model_does(redis: RedisServer) -> None:
    from tests.support.share_ledger import ModelLedger

    runs = iter(range(1000))

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps)
    def run(sequence: list[tuple[str, int, int, int, bool]]) -> None:
        run_name = f"run-{next(runs)}"
        clock = [1.0]
        model = ModelLedger()
        model.now_ms = SETTLE_MS
        ledgers = {
            name: Ledger(redis.settings(cluster_name=run_name), name, lambda: clock[0]) for name in "abc"
        }
        try:
            for ledger in ledgers.values():
                ledger.connect()
            # Settled long ago.
            ledgers["a"]._redis.hset(
                f"llmgw:{{{run_name}}}:life", mapping={"run": ledgers["a"]._run, "born": 0}
            )
            for name, floor, more, cap, is_late in sequence:
                clock[0] += 1.0
                statements = {"pool": Statement(floor, floor + more, cap)}
                if is_late:
                    ledgers[name]._number = 0
                    clock[0] -= 1.0
                held = ledgers[name].exchange(encode(Row()), statements, {}).held
                assert held == model.exchange(name, ledgers[name]._number, statements, {})
        finally:
            for ledger in ledgers.values():
                ledger.close()

    run()


def test_a_server_that_lost_its_scripts_is_a_server_that_is_away(redis: RedisServer) -> None:
    ledger = Ledger(redis.settings(), "a", time.monotonic)
    ledger.connect()
    redis.kill()
    redis.start()
    with pytest.raises(LedgerAway):
        ledger.exchange(b"", {}, {})
    ledger.connect()
    assert not ledger.exchange(b"", {}, {}).is_settled
    ledger.close()
