"""The launcher with stub children: what it gives them, what it does when they end, what its signals do."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from conf import load
from conf.values import ListenAddress
from gateway.listeners import AddressUnavailable, open_listeners, written
from shm.definitions import CONFIG_RELOADS, INFLIGHT_RETURNED, PROCESS_RESTARTS
from shm.inflight import InflightSums
from shm.metrics import read_all
from shm.segment import Segment, is_in_use
from tests.support.processes import Program, Programs
from tests.support.wait import wait_until

STUB = Path(__file__).resolve().parents[1] / "support" / "stub_launcher.py"
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Stubs:
    """A launcher with stub children in a folder of its own."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self._programs = programs
        self.folder = folder
        self.state = folder / "state"
        self.config_file = folder / "llmgw.yaml"
        self.segments: list[Path] = []
        self.configure()

    def configure(self, **keys: Any) -> None:
        whole = {
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "state_dir": str(self.state),
            "auth": {"enabled": False},
            "drain_timeout": 60,
        }
        self.config_file.write_text(yaml.safe_dump(whole | keys))

    def mode(self, child: str, mode: str) -> None:
        (self.folder / f"{child}.mode").write_text(mode)

    def launch(self) -> Program:
        argv = [sys.executable, "-W", "error", str(STUB), str(self.folder), "--config", str(self.config_file)]
        self.launcher = self._programs.start_command(argv)
        return self.launcher

    def start(self) -> Program:
        """Launch, and wait until both children run."""
        before = [len(self.events(child, "started")) for child in ("workers", "coordinator")]
        launcher = self.launch()

        def both() -> bool:
            assert launcher.returncode is None, launcher.output()
            after = [len(self.events(child, "started")) for child in ("workers", "coordinator")]
            return all(new > old for new, old in zip(after, before, strict=True))

        wait_until(both, 10, launcher.output)
        self.segments.append(Path((self.state / "segment").read_text().strip()))
        return launcher

    def events(self, child: str, event: str) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / f"{child}.events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def wait_for(self, child: str, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until an event has occurred `count` times; return the newest."""
        wait_until(lambda: len(self.events(child, event)) >= count, 15, self.launcher.output)
        return self.events(child, event)[-1]

    def lines(self, event: str) -> list[dict[str, Any]]:
        entries = (json.loads(line) for line in self.launcher.output().splitlines() if line.startswith("{"))
        return [entry for entry in entries if entry["event"] == event]

    @property
    def segment(self) -> Path:
        return self.segments[-1]

    def counted(self, definition: Any, *labels: str) -> float:
        segment = Segment.attach(self.segment)
        try:
            return sum(
                s.value for s in read_all(segment) if s.definition is definition and s.labels == labels
            )
        finally:
            segment.close()


@pytest.fixture
def stubs(programs: Programs, tmp_path: Path) -> Iterator[Stubs]:
    made = Stubs(programs, tmp_path)
    yield made
    programs.close()
    assert [segment for segment in made.segments if segment.exists()] == []


def test_children_get_the_segment_their_listeners_and_the_hard_limit_of_open_files(stubs: Stubs):
    stubs.start()
    addresses = json.loads((stubs.state / "addresses.json").read_text())
    workers, coordinator = stubs.events("workers", "started")[0], stubs.events("coordinator", "started")[0]
    assert [f"127.0.0.1:{port}" for port in workers["ports"]] == addresses["listen"]
    assert [f"127.0.0.1:{port}" for port in coordinator["ports"]] == [addresses["admin"]]
    assert workers["segment"] == coordinator["segment"] == str(stubs.segment)
    assert workers["files"] == coordinator["files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_sigterm_drains_the_workers_then_stops_the_coordinator_and_leaves_nothing(stubs: Stubs):
    launcher = stubs.start()
    assert int((stubs.state / "launcher.pid").read_text()) == launcher.pid
    assert launcher.stop() == 0
    assert [event["number"] for event in stubs.events("workers", "signal")] == [TERM]
    assert stubs.events("workers", "signal")[0]["phase"] == 1
    assert [event["number"] for event in stubs.events("coordinator", "signal")] == [TERM]
    stopped = [line["child"] for line in stubs.lines("child_stopped")]
    assert stopped == ["workers", "coordinator"]
    assert not stubs.segment.exists()
    assert [path.name for path in stubs.state.iterdir()] == ["launcher.lock"]


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_second_signal_stops_workers_that_still_drain_at_once(stubs: Stubs, number: signal.Signals):
    stubs.mode("workers", "stubborn")
    launcher = stubs.start()
    launcher.signal(number)
    assert stubs.wait_for("workers", "signal")["number"] == TERM
    launcher.signal(number)
    assert launcher.wait() == 0
    assert [event["number"] for event in stubs.events("workers", "signal")] == [TERM, INT]


def test_sigquit_stops_without_draining(stubs: Stubs):
    launcher = stubs.start()
    launcher.signal(signal.SIGQUIT)
    assert launcher.wait() == 0
    assert [event["number"] for event in stubs.events("workers", "signal")] == [INT]


def test_workers_deaf_to_every_signal_are_killed_when_told_three_times(stubs: Stubs):
    stubs.mode("workers", "deaf")
    launcher = stubs.start()
    for count in (1, 2):
        launcher.signal(TERM)
        stubs.wait_for("workers", "signal", count)
    launcher.signal(TERM)
    assert launcher.wait() == 0
    assert [line["exit"] for line in stubs.lines("child_stopped")] == ["signal SIGKILL", "code 0"]


def test_workers_that_a_killed_arbiter_leaves_at_the_end_are_killed_as_well(stubs: Stubs):
    stubs.mode("workers", "deaf_worker")
    (stubs.folder / "worker.hangs").touch()
    launcher = stubs.start()
    stubs.wait_for("workers", "worker_started")
    for count in (1, 2):
        launcher.signal(TERM)
        stubs.wait_for("workers", "signal", count)
    launcher.signal(TERM)
    assert launcher.wait() == 0
    assert launcher.processes() == []


def test_a_dead_child_is_started_again_on_the_same_segment_and_listener(stubs: Stubs):
    stubs.start()
    for child in ("coordinator", "workers"):
        first = stubs.events(child, "started")[0]
        os.kill(first["pid"], signal.SIGKILL)
        second = stubs.wait_for(child, "started", 2)
        assert second["pid"] != first["pid"]
        assert {**second, "pid": 0} == {**first, "pid": 0}
        assert stubs.counted(PROCESS_RESTARTS, child) == 1


def test_a_child_that_cannot_boot_stops_everything_with_a_sentence(stubs: Stubs):
    stubs.mode("workers", "cannot_boot")
    launcher = stubs.launch()
    assert launcher.wait() == 1
    assert "llmgw-gateway: workers cannot start" in launcher.output()
    assert not Path("/dev/shm", launcher.output().split("/dev/shm/")[1].split('"')[0]).exists()


def test_a_child_that_keeps_crashing_is_retried_with_growing_pauses_until_it_runs(stubs: Stubs):
    stubs.mode("coordinator", "crash")
    stubs.launch()
    stubs.wait_for("coordinator", "crash", 3)
    stubs.mode("coordinator", "run")
    stubs.wait_for("coordinator", "started")
    assert [line["restart_in_s"] for line in stubs.lines("child_exited")][:3] == [0.0, 0.5, 1.0]
    stubs.segments.append(Path((stubs.state / "segment").read_text().strip()))


def test_a_good_reload_publishes_and_says_what_changed_and_what_needs_a_restart(stubs: Stubs):
    launcher = stubs.start()
    stubs.configure(drain_timeout=7, workers=3)
    launcher.signal(HUP)
    wait_until(lambda: stubs.lines("config_needs_restart"), 10, launcher.output)
    assert stubs.lines("config_reloaded")[0]["changed"] == ["drain_timeout"]
    assert stubs.lines("config_needs_restart")[0]["keys"] == ["workers"]
    assert stubs.counted(CONFIG_RELOADS, "ok") == 1
    segment = Segment.attach(stubs.segment)
    try:
        config = load.decode(segment.read_config())
        assert (segment.config_generation, config.drain_timeout, config.workers) == (2, 7.0, 2)
    finally:
        segment.close()


def test_a_broken_file_changes_nothing_and_every_problem_is_told(stubs: Stubs):
    launcher = stubs.start()
    stubs.configure(drain_timeout="soon", workres=3)
    launcher.signal(HUP)
    wait_until(lambda: len(stubs.lines("config_refused")) >= 2, 10, launcher.output)
    told = " ".join(line["problem"] for line in stubs.lines("config_refused"))
    assert "drain_timeout" in told
    assert "workres" in told
    assert stubs.counted(CONFIG_RELOADS, "refused") == 1
    segment = Segment.attach(stubs.segment)
    try:
        assert segment.config_generation == 1
    finally:
        segment.close()
    assert launcher.stop() == 0


def test_a_bad_configuration_ends_with_code_2_and_one_line_per_problem(stubs: Stubs):
    stubs.configure(drain_timeout="soon", workres=3)
    launcher = stubs.launch()
    assert launcher.wait() == 2
    lines = launcher.output().splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{stubs.config_file}:") for line in lines)


def test_a_taken_address_ends_with_code_1_and_a_sentence(stubs: Stubs):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        stubs.configure(listen=f"127.0.0.1:{port}")
        launcher = stubs.launch()
        assert launcher.wait() == 1
    assert f"listen: cannot listen on 127.0.0.1:{port}: another program listens there" in launcher.output()
    assert "Traceback" not in launcher.output()


def test_an_address_that_becomes_free_within_seconds_is_taken(stubs: Stubs):
    with socket.create_server(("127.0.0.1", 0)) as other:
        stubs.configure(listen=f"127.0.0.1:{other.getsockname()[1]}")
        launcher = stubs.launch()
        wait_until(lambda: stubs.lines("address_taken_waiting"), 10, launcher.output)
    stubs.wait_for("workers", "started")
    stubs.segments.append(Path((stubs.state / "segment").read_text().strip()))


def test_a_second_launcher_of_a_state_dir_is_refused_and_harms_nothing(stubs: Stubs):
    first = stubs.start()
    second = stubs.launch()
    assert second.wait() == 1
    assert f"in use by the gateway with process id {first.pid}" in second.output()
    assert is_in_use(stubs.segment)
    assert first.returncode is None


def test_ctrl_c_in_a_terminal_reaches_the_launcher_alone(stubs: Stubs):
    launcher = stubs.start()
    os.killpg(launcher.pid, INT)
    assert launcher.wait() == 0
    assert [event["number"] for event in stubs.events("workers", "signal")] == [TERM]


def test_children_of_a_killed_launcher_are_told_and_the_next_start_removes_its_segment(stubs: Stubs):
    first = stubs.start()
    old = stubs.segment
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    wait_until(lambda: not first.processes(), 10, first.output)
    assert [event["number"] for event in stubs.events("workers", "signal")] == [TERM]
    assert old.exists()
    stubs.start()
    assert not old.exists()
    assert stubs.segment != old


def test_workers_of_a_killed_arbiter_drain_and_are_collected(stubs: Stubs):
    stubs.mode("workers", "worker")
    launcher = stubs.start()
    stubs.wait_for("workers", "worker_started")
    os.kill(stubs.events("workers", "started")[0]["pid"], signal.SIGKILL)
    stubs.wait_for("workers", "worker_ends")
    stubs.wait_for("workers", "worker_started", 2)
    segment = Segment.attach(stubs.segment)
    try:
        inflight = InflightSums(segment)
        wait_until(
            lambda: inflight.of(0) == 1, 5, "the dead worker's request is given back, the new one's counts"
        )
    finally:
        segment.close()
    zombies = [
        p for p in psutil.Process(launcher.pid).children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE
    ]
    assert zombies == []


def test_a_stop_waits_for_the_workers_of_a_killed_arbiter(stubs: Stubs):
    stubs.mode("workers", "worker")
    launcher = stubs.start()
    stubs.wait_for("workers", "worker_started")
    os.kill(stubs.events("workers", "started")[0]["pid"], signal.SIGKILL)
    stubs.wait_for("workers", "worker_drains")
    assert launcher.stop() == 0
    assert len(stubs.events("workers", "worker_ends")) >= 1


def test_an_orphan_that_never_drains_is_killed_after_the_drain_time(stubs: Stubs):
    stubs.configure(drain_timeout=0.1)
    stubs.mode("workers", "worker")
    (stubs.folder / "worker.hangs").touch()
    stubs.start()
    orphan = stubs.wait_for("workers", "worker_started")["pid"]
    (stubs.folder / "worker.hangs").unlink()
    os.kill(stubs.events("workers", "started")[0]["pid"], signal.SIGKILL)
    wait_until(lambda: stubs.lines("orphan_killed"), 10, stubs.launcher.output)
    assert [line["orphan_pid"] for line in stubs.lines("orphan_killed")] == [orphan]
    wait_until(lambda: not psutil.pid_exists(orphan), 5)
    wait_until(lambda: stubs.counted(INFLIGHT_RETURNED) == 1, 5)


def test_workers_that_drain_too_long_are_stopped_at_once(stubs: Stubs):
    stubs.configure(drain_timeout=0.1)
    stubs.mode("workers", "stubborn")
    launcher = stubs.start()
    assert launcher.stop() == 0
    assert [event["number"] for event in stubs.events("workers", "signal")] == [TERM, INT]


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("", ["127.0.0.1", "::1"]),
        ("::", ["127.0.0.1", "::1"]),
    ],
)
def test_a_listener_is_reached_by_every_address_it_stands_for(host: str, reached: list[str]):
    listeners = open_listeners(ListenAddress(host, 0), "listen")
    try:
        for address in reached:
            port = listeners[0].getsockname()[1]
            socket.create_connection((address, port), timeout=5).close()
    finally:
        for listener in listeners:
            listener.close()


def test_a_name_listens_on_all_its_addresses_with_one_port(monkeypatch: pytest.MonkeyPatch):
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        places = ("127.0.0.1", "127.0.0.2", "203.0.113.9")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, port)) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listeners = open_listeners(ListenAddress("several", 0), "listen")
    try:
        (port,) = {each.getsockname()[1] for each in listeners}
        assert [written(each) for each in listeners] == [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("host", ["203.0.113.9", "no-such-host.invalid"])
def test_an_address_nobody_has_is_refused_at_once(host: str):
    with pytest.raises(AddressUnavailable, match="listen: cannot listen on"):
        open_listeners(ListenAddress(host, 0), "listen")
