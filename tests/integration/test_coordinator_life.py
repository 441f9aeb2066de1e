"""The coordinator as a process: configurations that come and go, deaths of others and its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conf.schema import Config, Endpoint
from shm.definitions import REQUESTS
from shm.endpoints import EndpointTable
from shm.inflight import InflightRow, InflightSums
from shm.layout import Sizes
from shm.metrics import MetricsRow
from shm.rows import WorkerSlot
from tests.support.coordinator import RunningCoordinator, config_of
from tests.support.processes import ROOT, Programs
from tests.support.scripted_engine import ScriptedEngine
from tests.support.segments import Forked, await_report, report
from tests.support.wait import wait_until

Start = Callable[..., RunningCoordinator]


@pytest.fixture
def start(programs: Programs) -> Iterator[Start]:
    running: list[RunningCoordinator] = []

    def start_one(config: Config, sizes: Sizes | None = None) -> RunningCoordinator:
        running.append(RunningCoordinator(programs, config, sizes))
        return running[-1]

    yield start_one
    for each in running:
        each.close()


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine()
    yield made
    made.refuse()


def endpoints(engine: ScriptedEngine, *names: str, model: str = "chat-model") -> list[Endpoint]:
    return [Endpoint(id=name, model=model, url=engine.url) for name in names]


def test_new_configuration_is_taken_up_without_a_restart(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    coordinator.wait_state("a", "ready")
    coordinator.reload(config_of(endpoints(engine, "a", "b")))
    coordinator.wait_state("b", "ready")
    changes = coordinator.log_lines("endpoint_state_changed", replica="a")
    assert [line["state"] for line in changes] == ["ready"], "a was not looked at afresh"


def test_endpoint_that_leaves_keeps_no_table_entry_and_no_connection(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    coordinator.wait_state("a", "ready")
    coordinator.reload(config_of([]))
    wait_until(lambda: engine.open_connections == 0)
    assert coordinator.endpoints() == {}
    assert EndpointTable(coordinator.segment).records == ()


def test_endpoint_moved_to_another_address_is_unknown_first(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    coordinator.wait_state("a", "ready")
    slot = EndpointTable(coordinator.segment).by_id["a"].slot
    other = ScriptedEngine()
    try:
        coordinator.reload(config_of(endpoints(other, "a")))
        coordinator.wait_state("a", "ready")
        assert other.count("/metrics") > 0
    finally:
        other.refuse()
    changes = coordinator.log_lines("endpoint_state_changed", replica="a")
    assert [line["before"] for line in changes][:2] == ["unknown", "unknown"]
    assert EndpointTable(coordinator.segment).by_id["a"].slot == slot


def test_b93_endpoints_that_come_and_go_leave_no_series_files_or_threads(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of(endpoints(engine, "stays")))

    def usage() -> tuple[int, int, int]:
        """Return metric series, open files and threads."""
        process = coordinator.process
        return len(coordinator.samples()), process.num_fds(), process.num_threads()

    def come_and_go(turn: int) -> None:
        names = [f"turn{turn}-{number}" for number in range(50)]
        coordinator.reload(config_of(endpoints(engine, "stays", *names)))
        coordinator.wait_state(names[-1], "ready")
        coordinator.reload(config_of(endpoints(engine, "stays")))
        wait_until(lambda: engine.open_connections <= 1, message="connections of the gone are closed")

    come_and_go(0)  # pools of threads and lazily opened files have their size after this
    before = usage()
    for turn in (1, 2):
        come_and_go(turn)
    wait_until(
        lambda: all(abs(now - then) <= 5 for now, then in zip(usage(), before, strict=True)),
        message=lambda: f"{usage()}, was {before}",
    )


def test_b93_greenlets_and_connections_of_500_endpoints_end_with_them(
    engine: ScriptedEngine, programs: Programs, tmp_path: Path
) -> None:
    script = [sys.executable, "-m", "tests.support.churn", str(tmp_path / "segment"), engine.url]
    counts = programs.start_command(script, cwd=ROOT).wait_for_output(r"^greenlets (\d+) -> (\d+)$", 60)
    assert int(counts[2]) - int(counts[1]) <= 5
    wait_until(lambda: engine.open_connections == 0)
    assert engine.count("/health") > 500


def test_too_many_endpoints_leave_the_old_table_in_force_and_are_tried_again(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of(endpoints(engine, "a")), Sizes(worker_slots=8, endpoint_slots=2))
    coordinator.wait_state("a", "ready")
    coordinator.publish(config_of(endpoints(engine, "a", "b", "c")))
    wait_until(lambda: coordinator.log_lines("endpoint_table_full"))
    assert list(coordinator.endpoints()) == ["a"]
    coordinator.reload(config_of(endpoints(engine, "a", "b")))
    coordinator.wait_state("b", "ready")
    assert len(coordinator.log_lines("endpoint_table_full")) == 1


def test_unreadable_configuration_changes_nothing(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    coordinator.wait_state("a", "ready")
    coordinator.segment.publish_config(b"\xc1 no msgpack")
    wait_until(lambda: coordinator.log_lines("config_not_readable"))
    assert list(coordinator.endpoints()) == ["a"]


def test_counts_of_a_killed_worker_are_given_back_within_a_second(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    segment = coordinator.segment
    endpoint_slot = EndpointTable(segment).by_id["a"].slot
    read_fd, write_fd = os.pipe()

    def work() -> None:
        row = InflightRow(segment, WorkerSlot.claim(segment))
        for _ in range(3):
            row.add(endpoint_slot)
        report(write_fd)
        time.sleep(60)

    worker = Forked(work)
    await_report(read_fd)
    assert coordinator.metric("llmgw_endpoint_inflight", replica="a") == 3
    assert coordinator.metric("llmgw_processes", process="worker") == 1
    killed_at = time.monotonic()
    worker.kill()
    wait_until(lambda: InflightSums(segment).of(endpoint_slot) == 0)
    took_s = time.monotonic() - killed_at
    wait_until(lambda: coordinator.log_lines("slot_reaped", dead_pid=worker.pid, inflight=3))
    assert coordinator.metric("llmgw_slots_reaped_total") == 1
    assert coordinator.metric("llmgw_inflight_returned_total") == 3
    assert took_s < 1.0, "SPEC, rule 2"
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_killed_coordinator_comes_back_on_the_same_segment_and_loses_nothing(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of(endpoints(engine, "a", "b")))
    coordinator.wait_state("b", "ready")
    segment = coordinator.segment
    slot = WorkerSlot.claim(segment)
    MetricsRow(segment, slot).counter(REQUESTS, ("chat-model", "default", "200")).inc(7)
    before = {record.id: record.slot for record in EndpointTable(segment).records}
    InflightRow(segment, slot).add(before["b"])
    looks = coordinator.metric("llmgw_scrapes_total", outcome="ok") or 0.0
    coordinator.kill()
    coordinator.start()
    assert {record.id: record.slot for record in EndpointTable(segment).records} == before
    assert coordinator.metric("llmgw_endpoint_inflight", replica="b") == 1
    requests = {"model": "chat-model", "pool": "default", "status": "200"}
    assert coordinator.metric("llmgw_requests_total", **requests) == 7
    assert (coordinator.metric("llmgw_scrapes_total", outcome="ok") or 0.0) >= looks > 0
    slot.release()


def test_endpoint_that_was_down_stays_so_through_a_restart_of_the_coordinator(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    engine.refuse()
    coordinator.wait_state("a", "down", "refused")
    coordinator.kill()
    assert not EndpointTable(coordinator.segment).stats(0).state.is_usable
    coordinator.start()
    assert coordinator.endpoints()["a"]["state"] == "down"
    assert coordinator.log_lines("endpoint_state_changed", replica="a") == [], "nothing has changed"


def test_second_coordinator_on_a_segment_gives_way(
    start: Start, engine: ScriptedEngine, programs: Programs
) -> None:
    coordinator = start(config_of(endpoints(engine, "a")))
    second = programs.start("coordinator", "--segment", str(coordinator.segment.directory))
    assert second.wait() == 1
    assert '"event":"another_coordinator_runs"' in second.output()
    assert coordinator.get("/healthz")[0] == 200


def test_coordinator_without_a_segment_says_that_trying_again_is_no_use(programs: Programs) -> None:
    lost = programs.start("coordinator", "--segment", "/dev/shm/llmgw-test-not-there")
    assert lost.wait() == 3
    assert "cannot open the shared segment" in lost.output()
