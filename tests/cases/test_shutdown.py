"""Cases of shutdown and of workers that are kept busy, by their numbers."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import CHAT, chat
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


def started(gateway: Gateway, swarms: list[Swarm], tokens: int) -> Swarm:
    """Open streams and wait for the first token of each."""
    swarm = Swarm(gateway.url)
    swarms.append(swarm)
    for number in range(STREAMS):
        swarm.open(chat(max_tokens=tokens, content=f"stream {number}"))
    swarm.run(lambda: all(stream.has_token for stream in swarm.streams), 20, "the first tokens")
    return swarm


def ask(gateway: Gateway, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Ask on a connection of its own.

    Raises:
        OSError: nobody took the connection.
    """
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=5)
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
