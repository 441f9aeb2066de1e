"""Who runs and who waits: the API, the metrics and `llmgw-ctl top` tell the same."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import BOOT, Programs
from tests.support.raw_engine import JSON_HEAD, RawEngine, RawRequest
from tests.support.wait import wait_until


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    """An engine that the test plays itself."""
    engine = RawEngine()
    yield engine
    engine.close()


def ask(gateway: Gateway, band: str) -> http.client.HTTPConnection:
    """Send a request; the answer is read by who wants it."""
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/v1/chat/completions", b'{"model": "chat-model"}', {"x-llmgw-band": band})
    return connection


def answer(request: RawRequest) -> None:
    """Answer a request."""
    request.send(JSON_HEAD + b"content-length: 2\r\n\r\n{}")
    request.finish()


def status(connection: http.client.HTTPConnection) -> int:
    """Return the status of the answer."""
    with connection.getresponse() as response:
        response.read()
    connection.close()
    return response.status


def waiting(gateway: Gateway) -> dict[str, int]:
    """Return how many requests wait in each band."""
    (pool,) = gateway.admin_json("/api/v1/load")["pools"]
    (lane,) = pool["lanes"]
    return dict(lane["waiting"])


def test_what_runs_and_waits_is_told_alike_everywhere(
    gateway: Gateways, engine: RawEngine, programs: Programs
) -> None:
    running = gateway(
        [endpoint("e1", engine.url, pool="gpu", batch_capacity=4)],
        pools={"gpu": {"max_concurrent": 1, "target_waiting_per_replica": 100}},
    )
    connections = [ask(running, "gold")]
    first = engine.next_request()
    connections += [ask(running, "gold"), ask(running, "bronze"), ask(running, "bronze")]
    expected = {"platinum": 0, "gold": 1, "silver": 0, "bronze": 2}
    wait_until(lambda: waiting(running) == expected, 5.0, lambda: f"{expected}, not {waiting(running)}")

    view = running.admin_json("/api/v1/load")
    assert [band["name"] for band in view["bands"]] == list(expected)
    (pool,) = view["pools"]
    assert (pool["pool"], pool["leases"], pool["cap"], pool["share"]) == ("gpu", 1, 1, 1)
    (lane,) = pool["lanes"]
    assert (lane["model"], lane["inflight"], lane["pending"]) == ("chat-model", 1, 0)
    assert lane["saturation"] == pool["saturation"]

    assert running.metric("llmgw_admission_queue_depth", band="bronze", model="chat-model") == 2
    assert running.metric("llmgw_admission_queue_depth", band="platinum") == 0
    assert running.metric("llmgw_pool_leases", pool="gpu") == 1
    assert running.metric("llmgw_pool_cap", pool="gpu") == 1
    assert running.metric("llmgw_pool_saturation", pool="gpu") == pool["saturation"]
    assert json.loads(running.get("/healthz")[1])["queued"] == {"gpu": 3}

    once = programs.start("ctl", "top", "--once", "--admin", running.admin_url)
    assert once.wait() == 0
    heading, row = once.output().splitlines()
    assert heading.split()[-2:] == ["bronze", "<0.3"]
    assert row.split()[:2] == ["gpu", "chat-model"]
    assert row.split()[3:] == ["1", "1", "1", "0", "1", "0", "2"]
    as_json = programs.start("ctl", "top", "--json", "--admin", running.admin_url)
    assert as_json.wait() == 0
    assert json.loads(as_json.output())["pools"][0]["lanes"][0]["waiting"] == expected

    answer(first)
    for _ in range(3):
        answer(engine.next_request())
    assert [status(connection) for connection in connections] == [200] * 4
    assert waiting(running) == dict.fromkeys(expected, 0)
    assert running.admin_json("/api/v1/load")["pools"][0]["leases"] == 0


def test_with_no_endpoint_that_could_run_anything_there_is_no_saturation(gateway: Gateways) -> None:
    engine = RawEngine()
    running = gateway([endpoint("e1", engine.url)])
    engine.close()

    def saturation() -> object:
        return running.admin_json("/api/v1/load")["pools"][0]["saturation"]

    wait_until(lambda: saturation() is None, 10.0, "the endpoint to be down")
    assert "llmgw_pool_saturation{" not in "".join(running.metrics())


def test_top_shows_one_look_after_the_other_until_ctrl_c(gateway: Gateways, engine: RawEngine) -> None:
    running = gateway([endpoint("e1", engine.url)])
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    command = [sys.executable, str(BOOT), "ctl", "top", "--admin", running.admin_url]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    ) as top:
        os.close(theirs)
        seen = b""
        try:
            while seen.count(b"chat-model") < 2:
                seen += os.read(ours, 65536)
            top.send_signal(2)
            with suppress(OSError):  # the last writer has closed the terminal
                while data := os.read(ours, 65536):
                    seen += data
            assert top.wait(10) == 0
        finally:
            top.kill()  # leaving the block waits for its end, without a limit
    os.close(ours)
    assert b"Traceback" not in seen
