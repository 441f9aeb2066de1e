"""Cases of shutdown and of workers that are kept busy, by their numbers."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.support.accounts import wait_idle
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import CHAT, chat
from tests.support.raw_engine import RawEngine
from tests.support.scripted_engine import response
from tests.support.sim import SimEngine
from tests.support.sse_reference import data_of_events
from tests.support.swarm import Swarm

STREAMS = 50
MODEL = "chat-model"


@pytest.fixture
def sim(programs: Programs) -> SimEngine:
    return SimEngine(programs, "--model", MODEL, "--max-num-seqs", "200", "--max-model-len", "100000000")


@pytest.fixture
def swarms() -> Iterator[list[Swarm]]:
    """Swarms to be closed at the end."""
    opened: list[Swarm] = []
    yield opened
    for swarm in opened:
        swarm.close()


def started(gateway: Gateway, swarms: list[Swarm], tokens: int, streams: int = STREAMS) -> Swarm:
    """Open streams and wait for the first token of each."""
    swarm = Swarm(gateway.url)
    swarms.append(swarm)
    for number in range(streams):
        swarm.open(chat(max_tokens=tokens, content=f"stream {number}"))
    swarm.run(lambda: all(stream.has_token for stream in swarm.streams), 20, "the first tokens")
    return swarm


def ask(gateway: Gateway, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Ask on a connection of its own.

    Raises:
        OSError: nobody took the connection.
    """
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_b95_streams_finish_while_the_gateway_drains(
    gateway: Gateways, sim: SimEngine, swarms: list[Swarm]
) -> None:
    sim.configure(itl_ms=150)
    running = gateway([endpoint("e", sim.url)], workers=2, drain_timeout="60s")
    swarm = started(running, swarms, tokens=30)
    running.program.signal(signal.SIGTERM)

    def is_unready() -> bool:
        try:
            return ask(running, "GET", "/readyz")[0] == 503
        except OSError:
            return True

    swarm.run(is_unready, 5, "readiness to end")

    def is_refused() -> bool:
        # A load balancer takes a second to notice. Whoever comes in this time is told to go elsewhere, or
        # served by the worker that has not heard of it yet.
        try:
            status, body = ask(running, "POST", CHAT, chat(max_tokens=1))
        except OSError:
            return True
        assert status in (200, 503)
        return status == 503 and json.loads(body)["error"]["code"] == "shutting_down"

    swarm.run(is_refused, 5, "requests to be refused")
    assert not any(stream.is_over for stream in swarm.streams), "the drain began too late for this test"
    swarm.run(lambda: all(stream.is_over for stream in swarm.streams), 40, "the streams to finish")
    assert [len(stream.text()) > 0 for stream in swarm.streams] == [True] * STREAMS
    assert running.program.wait() == 0
    assert len(running.access_lines(status=200, streamed=True, outcome="ok")) >= STREAMS
    assert sim.stats()["aborted"] == 0


def test_b95_streams_beyond_the_drain_timeout_end_with_an_error_event(
    gateway: Gateways, sim: SimEngine, swarms: list[Swarm]
) -> None:
    sim.configure(itl_ms=150)
    running = gateway([endpoint("e", sim.url)], workers=2, drain_timeout="1s")
    swarm = started(running, swarms, tokens=5000)
    running.program.signal(signal.SIGTERM)
    swarm.run(lambda: all(stream.is_over for stream in swarm.streams), 20, "the streams to be ended")
    for stream in swarm.streams:
        events = [json.loads(data) for data in data_of_events(stream.payload())]
        assert all(event["choices"] for event in events[:-1])
        assert events[-1]["error"]["code"] == "shutting_down"
    assert running.program.wait() == 0
    lines = running.access_lines(streamed=True)
    assert [(line["outcome"], line["reason"]) for line in lines] == [
        ("stream_broken", "shutting_down")
    ] * STREAMS
    stats = sim.stats()
    assert stats["running"] + stats["waiting"] + stats["blocks_in_use"] == 0
    assert stats["aborted"] == STREAMS


def test_b95_idle_gateway_ends_at_once(gateway: Gateways, sim: SimEngine) -> None:
    running = gateway([endpoint("e", sim.url)], drain_timeout="60s")
    kept = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=5)
    kept.request("GET", "/healthz")
    kept.getresponse().read()
    running.program.signal(signal.SIGTERM)
    assert running.program.wait(15) == 0
    assert kept.sock.recv(1) == b""  # an idle connection holds nothing up
    kept.close()


# B99: large bodies and the streams beside them.

BODIES = 10
BODY_BYTES = 32 * 2**20
GAP_MAX_S = 0.5
ROUNDS = 2


def longest_gap(swarm: Swarm) -> float:
    """Return the longest pause between two reads of any stream, in seconds."""
    return max(late - early for stream in swarm.streams for early, late in itertools.pairwise(stream.times))


def busiest_schedule(pids: set[int]) -> tuple[int, int]:
    """Return how long the busiest of the processes has run, and waited for a processor, in ns."""
    times = []
    for pid in pids:
        with open(f"/proc/{pid}/schedstat") as schedstat:
            ran, waited, _ = schedstat.read().split()
        times.append((int(ran), int(waited)))
    return max(times)


@pytest.mark.timeout(180)
def test_b99_large_bodies_do_not_hold_streams_up(
    gateway: Gateways, sim: SimEngine, swarms: list[Swarm]
) -> None:
    body = chat(model="large", stream=True, content="x" * BODY_BYTES)
    sim.configure(itl_ms=50)
    sink = RawEngine(serves=("large",))  # an engine of its own: only the gateway is shared
    sink.keeps_bodies = False
    sink.answer = lambda request: request.send(
        response(b'{"object":"x"}', "200 OK", "content-type: application/json")
    )
    try:
        running = gateway([endpoint("e", sim.url, model=MODEL), endpoint("sink", sink.url, model="large")])
        workers = {process.pid for process in running.processes("workers")}
        swarm = started(running, swarms, tokens=5000, streams=100)
        gaps: list[float] = []
        while len(gaps) < ROUNDS and (not gaps or gaps[-1] >= GAP_MAX_S):
            ran, waited = busiest_schedule(workers)
            for stream in swarm.streams:
                del stream.times[:-1]
            with ThreadPoolExecutor(BODIES) as pool:
                answers = [pool.submit(ask, running, "POST", CHAT, body) for _ in range(BODIES)]
                swarm.run(lambda wanted=answers: all(answer.done() for answer in wanted), 60, "the answers")
            assert [answer.result()[0] for answer in answers] == [200] * BODIES
            ran_then, waited_then = busiest_schedule(workers)
            # On a busy machine all that the worker does takes longer by this factor.
            slowed = 1 + (waited_then - waited) / (ran_then - ran)
            gaps.append(longest_gap(swarm) / slowed)
            print(
                f"longest gap {gaps[-1] * 1000:.0f} ms on a processor of its own; slowed {slowed:.2f} times"
            )
        assert all(request.body_bytes > BODY_BYTES for request in sink.requests)
        assert len(sink.requests) == BODIES * len(gaps)
        assert min(gaps) < GAP_MAX_S
        assert {process.pid for process in running.processes("workers")} == workers
        assert running.metric("llmgw_worker_restarts_total") == 0
        swarm.leave(swarm.streams)
        wait_idle(running)
    finally:
        sink.close()
