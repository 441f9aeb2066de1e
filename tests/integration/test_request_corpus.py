"""Every request of tests/corpus/requests through a real socket, and by each way into the gateway.

A head comes whole or in pieces, and is read by the quick parser or by the careful one; what is accepted or
refused may not depend on that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import corpus
from tests.support.corpus import RecordedRequest
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.sim import SimEngine
from tests.support.wait import wait_until
from tests.support.wire import WireClient, chat

MAX_BODY_BYTES = 1 << 20
WAYS = ("whole", "in_pieces", "careful")


class Scene:
    """A gateway and its engine, shared by the tests of this file."""

    def __init__(self, gateway: Gateway, sim: SimEngine) -> None:
        self.gateway = gateway
        self.sim = sim


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("corpus")
    programs = Programs(folder)
    gateways = Gateways(programs, folder)
    try:
        sim = SimEngine(programs, "--model", "chat-model")
        yield Scene(gateways([endpoint("e0", sim.url)], max_body_bytes=MAX_BODY_BYTES), sim)
    finally:
        gateways.close()
        programs.close()


def send(client: WireClient, data: bytes, way: str) -> None:
    """Send a request in one of the ways; a server that has had enough may close meanwhile."""
    if way == "careful":
        # This header does no harm, and is one of those that only the careful parser may judge.
        start = 2 if data.startswith(b"\r\n") else 0  # an empty line may come first
        line, end, rest = data[start:].partition(b"\r\n")
        data = data[:start] + line + end + b"TE: trailers\r\n" + rest if end else data
    step = max(1, len(data) // 150) if way == "in_pieces" else len(data)
    try:
        for start in range(0, len(data), step):
            client.send(data[start : start + step])
            if way == "in_pieces":
                time.sleep(0)
    except (BrokenPipeError, ConnectionResetError):
        pass


def exchange(scene: Scene, recorded: RecordedRequest, way: str) -> None:
    """Send one request and check what became of it."""
    sim, gateway = scene.sim, scene.gateway
    received = sim.stats()["received"]
    written = gateway.program.log.stat().st_size
    with WireClient(gateway.url) as client:
        send(client, recorded.data, way)
        answers = [client.answer(is_head=recorded.is_head) for _ in recorded.statuses]
        assert [answer.status for answer in answers] == recorded.statuses, answers[-1].body
        if recorded.code:
            assert answers[-1].code == recorded.code, answers[-1].body
        seen = sim.seen(len(recorded.bodies)) if recorded.bodies else []
        assert sim.stats()["received"] - received == len(recorded.bodies)
        assert [one.body for one in seen] == recorded.bodies
        if recorded.targets:
            assert [one.target for one in seen] == recorded.targets
        if recorded.stays_open:
            last = answers[-1].header("connection")
            assert last is None, last
            assert client.ask(chat()).status == 200
        else:
            assert answers[-1].header("connection") == "close"
            assert client.is_closed()
    quiet = b"/healthz" in recorded.data or b"/readyz" in recorded.data
    expected = sum(status != 100 for status in recorded.statuses) + recorded.stays_open
    if not quiet:
        wait_until(lambda: len(lines_since(gateway, written)) >= expected, 5, f"{expected} lines of requests")
        lines = lines_since(gateway, written)
        statuses = [status for status in recorded.statuses if status != 100]
        assert [line["status"] for line in lines] == statuses + [200] * recorded.stays_open


def lines_since(gateway: Gateway, offset: int) -> list[dict[str, Any]]:
    """Return the lines of requests behind a place in the log."""
    with gateway.program.log.open("rb") as log:
        log.seek(offset)
        lines = log.read().split(b"\n")[:-1]
    return [entry for entry in map(json.loads, lines) if entry["event"] == "request"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", corpus.names("valid"))
def test_a_valid_request_is_served_and_its_body_arrives_byte_for_byte(scene: Scene, name: str, way: str):
    exchange(scene, corpus.load("valid", name), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", corpus.names("invalid"))
def test_an_invalid_request_is_refused_and_reaches_no_engine(scene: Scene, name: str, way: str):
    exchange(scene, corpus.load("invalid", name), way)
