"""kill -9 of each process of a gateway under traffic: what SPEC calls rule 2, with real workers and engines.

A killed process costs the requests it carried itself and nothing else: counts come back within a second,
traffic goes on, and after the next start no process and no segment of the dead is left.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from shm.inflight import InflightSums
from shm.layout import FixedSlot, SlotState
from shm.rows import slots_in_use
from shm.segment import Segment
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.sim import SimEngine
from tests.support.wait import wait_until

COUNTS_BACK_S = 1.0
ITL_MS = 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Chat:
    """A chat request on a connection of its own, sent, with the head of its response read.

    Attributes:
        status: of the response.
    """

    def __init__(self, url: str, *, tokens: int, stream: bool = True) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        body = {"model": "chat-model", "messages": [{"role": "user", "content": "go"}], "max_tokens": tokens}
        try:
            self._connection.request(
                "POST", "/v1/chat/completions", json.dumps(body | {"stream": stream, "ignore_eos": True})
            )
            self._response = self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise
        self.status = self._response.status

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def rest(self) -> bytes | None:
        """Read to the end and close; None if the body was cut."""
        try:
            return self._response.read()
        except (http.client.HTTPException, OSError):
            return None
        finally:
            self.close()

    def is_served(self) -> bool:
        """Read to the end; tell whether the whole stream came."""
        body = self.rest()
        return body is not None and body.rstrip().endswith(b"data: [DONE]")


class Traffic:
    """Short requests, one after the other on fresh connections, until stopped; remembers every outcome."""

    def __init__(self, url: str) -> None:
        self.outcomes: list[str] = []
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                request = Chat(self._url, tokens=1, stream=False)
                self.outcomes.append(str(request.status) if request.rest() is not None else "cut")
            except (http.client.HTTPException, OSError) as error:
                self.outcomes.append(type(error).__name__)

    def goes_on(self) -> None:
        """Wait until five more requests were served."""
        before = self.outcomes.count("200")
        wait_until(lambda: self.outcomes.count("200") >= before + 5, 20, lambda: str(self.outcomes[-5:]))

    @contextmanager
    def running(self) -> Iterator[Traffic]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join()

    @property
    def failures(self) -> list[str]:
        return [outcome for outcome in self.outcomes if outcome != "200"]


class Scene:
    """A gateway with two workers in front of one engine."""

    def __init__(self, gateways: Gateways, sim: SimEngine, **keys: Any) -> None:
        self.sim = sim
        self._streams: list[Chat] = []
        self.gateway: Gateway = gateways([endpoint("e0", sim.url)], workers=2, drain_timeout="20s", **keys)
        wait_until(lambda: len(self.workers) == 2, 10, "both workers")  # it is ready with one

    def streams(self, count: int, *, seconds: float) -> list[Chat]:
        """Open streams, and wait until the engine runs them all."""
        tokens = int(seconds * 1000 / ITL_MS)
        opened = [Chat(self.gateway.url, tokens=tokens) for _ in range(count)]
        self._streams += opened
        assert {stream.status for stream in opened} == {200}
        wait_until(lambda: self.inflight() == count, 5, lambda: f"{self.inflight()} in flight")
        return opened

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def inflight(self) -> int:
        segment = Segment.attach(self.gateway.segment)
        try:
            sums = InflightSums(segment)
            return sum(sums.many(range(segment.layout.sizes.endpoint_slots)))
        finally:
            segment.close()

    def inflight_by_pid(self) -> dict[int, int]:
        """Return what each worker has in flight, by process id."""
        segment = Segment.attach(self.gateway.segment)
        try:
            region, width = segment.layout.inflight, segment.layout.sizes.worker_slots
            return {
                view.pid: sum(segment.cells_i64[region.start + view.slot : region.end : width])
                for view in slots_in_use(segment)
                if view.slot < width
            }
        finally:
            segment.close()

    def inflight_is(self, count: int) -> None:
        """Wait until the counts are right, at most as long as the promise says."""
        began = time.monotonic()
        wait_until(lambda: self.inflight() == count, 10, lambda: f"{self.inflight()} in flight, not {count}")
        assert time.monotonic() - began < COUNTS_BACK_S

    def owners(self) -> dict[str, list[psutil.Process]]:
        """Return who signs the segment's slots: `worker` (those that serve), `arbiter`, ...

        Read there and not from the process table, whose entries vanish while one looks at them.
        """
        found: dict[str, list[psutil.Process]] = {
            "worker": [],
            "coordinator": [],
            "launcher": [],
            "arbiter": [],
        }
        segment = Segment.attach(self.gateway.segment)
        try:
            width = segment.layout.sizes.worker_slots
            for view in slots_in_use(segment):
                is_worker = view.slot < width
                kind = "worker" if is_worker else FixedSlot(view.slot - width).name.lower()
                if psutil.pid_exists(view.pid) and (not is_worker or view.state is SlotState.SERVING):
                    found[kind].append(psutil.Process(view.pid))
        finally:
            segment.close()
        return found

    @property
    def workers(self) -> list[psutil.Process]:
        return self.owners()["worker"]

    def only(self, kind: str) -> psutil.Process:
        """Return the process of a kind of which there is one, waiting for it if need be."""
        return wait_until(lambda: self.owners()[kind], 20, kind)[0]

    def wait_for_another(self, kind: str, old: psutil.Process) -> None:
        wait_until(lambda: self.owners()[kind] not in ([], [old]), 20, f"another {kind}")

    def idle(self) -> None:
        """Wait until nothing is counted and the engine holds nothing."""
        wait_until(lambda: self.inflight() == 0, 5, lambda: f"{self.inflight()} in flight")
        wait_until(lambda: self.sim.stats()["blocks_in_use"] == 0, 5, lambda: str(self.sim.stats()))


@pytest.fixture
def sim(programs: Programs) -> SimEngine:
    return SimEngine(programs, "--model", "chat-model", "--itl-ms", str(ITL_MS))


@pytest.fixture
def scene(gateway: Gateways, sim: SimEngine) -> Iterator[Scene]:
    """On fixed ports, so that a gateway that starts again listens where it did."""
    made = Scene(gateway, sim, listen=f"127.0.0.1:{free_port()}", admin_listen=f"127.0.0.1:{free_port()}")
    yield made
    made.close()


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def test_a_killed_worker_costs_its_own_streams_only_and_its_counts_come_back(scene: Scene):
    with Traffic(scene.gateway.url).running() as traffic:
        traffic.goes_on()
    streams = scene.streams(16, seconds=3)
    carried = scene.inflight_by_pid()
    survivor, victim = sorted(scene.workers, key=lambda worker: carried[worker.pid])
    requests_before = scene.gateway.metric("llmgw_requests_total")
    kill(victim)
    scene.inflight_is(carried[survivor.pid])
    lost = sum(not stream.is_served() for stream in streams)
    assert lost == carried[victim.pid]
    wait_until(lambda: len(scene.workers) == 2, 10, "a new worker")
    assert survivor in scene.workers
    scene.idle()
    assert scene.gateway.metric("llmgw_requests_total") >= requests_before + 16 - lost
    with Traffic(scene.gateway.url).running() as traffic:
        traffic.goes_on()
    assert traffic.failures == []


def test_counts_of_a_killed_worker_come_back_within_a_second_even_without_a_coordinator(scene: Scene):
    streams = scene.streams(12, seconds=30)
    for process in (scene.only("coordinator"), *scene.workers):
        kill(process)
    scene.inflight_is(0)
    assert not any(stream.is_served() for stream in streams)
    scene.gateway.wait_ready()
    scene.idle()


def test_a_killed_coordinator_is_not_noticed_by_clients_and_loses_no_count(scene: Scene):
    streams = scene.streams(8, seconds=3)
    with Traffic(scene.gateway.url).running() as traffic:
        for _ in range(2):
            old = scene.only("coordinator")
            segment = scene.gateway.segment
            kill(old)
            traffic.goes_on()
            wait_until(
                lambda old=old: scene.gateway.processes("coordinator") not in ([], [old]), 20, "another"
            )
            wait_until(lambda: scene.gateway.metric("llmgw_process_restarts_total") >= 1, 20, "its metrics")
            assert (scene.gateway.state_dir / "segment").read_text().strip() == str(segment)
    assert traffic.failures == []
    assert all(stream.is_served() for stream in streams)
    assert scene.gateway.metric("llmgw_requests_total", status="200") >= len(traffic.outcomes)
    assert scene.gateway.metric("llmgw_process_restarts_total", process="coordinator") == 2
    scene.idle()


def test_workers_of_a_killed_arbiter_finish_their_streams_while_new_ones_serve(scene: Scene):
    streams = scene.streams(8, seconds=4)
    arbiter = scene.only("arbiter")
    old = [arbiter, *scene.workers]
    with Traffic(scene.gateway.url).running() as traffic:
        kill(arbiter)
        traffic.goes_on()
    assert traffic.failures == []
    assert all(stream.is_served() for stream in streams)
    wait_until(lambda: not any(process.is_running() for process in old), 10, "the old workers' end")
    assert len(scene.workers) == 2
    scene.idle()


def test_a_stop_after_the_arbiter_was_killed_lets_its_streams_finish(scene: Scene):
    streams = scene.streams(6, seconds=3)
    old = scene.only("arbiter")
    kill(old)
    scene.wait_for_another("arbiter", old)
    wait_until(lambda: len(scene.workers) == 2, 10, "its workers")
    scene.gateway.program.signal(signal.SIGTERM)
    assert all(stream.is_served() for stream in streams)
    assert scene.gateway.program.wait() == 0
    assert not scene.gateway.segment.exists()


def test_streams_survive_a_killed_launcher_and_the_next_one_takes_over(scene: Scene):
    streams = scene.streams(8, seconds=4)
    old_program, old_segment = scene.gateway.program, scene.gateway.segment
    scene.gateway.kill()
    scene.gateway.start()
    with Traffic(scene.gateway.url).running() as traffic:
        traffic.goes_on()
    assert traffic.failures == []
    assert not old_segment.exists()
    assert all(stream.is_served() for stream in streams)
    wait_until(lambda: not old_program.processes(), 10, lambda: str(old_program.processes()))
    scene.idle()


def test_after_every_process_was_killed_at_once_the_next_start_is_as_new(scene: Scene):
    scene.streams(8, seconds=30)
    old_program, old_segment = scene.gateway.program, scene.gateway.segment
    processes = old_program.processes()
    scene.gateway.kill()
    for process in processes:
        if process.pid != old_program.pid:
            process.kill()
    wait_until(lambda: not old_program.processes(), 10)
    assert old_segment.exists()
    scene.gateway.start()
    assert not old_segment.exists()
    assert segments_of(scene.gateway) == [scene.gateway.segment]
    scene.idle()


def segments_of(gateway: Gateway) -> list[Path]:
    """Return the segments that processes of this gateway have mapped."""
    found = set()
    for process in gateway.program.processes():
        for mapped in process.memory_maps():
            if mapped.path.startswith("/dev/shm/llmgw-"):
                found.add(Path(mapped.path).parent)
    return sorted(found)
