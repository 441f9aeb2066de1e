"""Cases of health: who may get requests, and what an engine's answers do to that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.accounts import Ledger, wait_idle
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.sim import SimEngine
from tests.support.wait import wait_until
from tests.support.wire import WireClient, chat


def two(programs: Programs) -> tuple[SimEngine, SimEngine]:
    first, second = (SimEngine(programs, "--model", "chat-model") for _ in range(2))
    return first, second


@contextmanager
def traffic(gateway: Gateway, threads: int = 2) -> Iterator[list[tuple[int, str | None]]]:
    """Ask without a pause while the block runs; yields (status, replica) of every answer so far."""
    answers: list[tuple[int, str | None]] = []
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            with WireClient(gateway.url) as client:
                answer = client.ask(chat(max_tokens=1))
                answers.append((answer.status, answer.header("x-llmgw-replica")))
            stopped.wait(0.02)  # about 50 requests a second in each thread

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield answers
    finally:
        stopped.set()
        for thread in running:
            thread.join()


def test_b47_requests_that_the_engine_refuses_are_not_retried_and_not_held_against_it(
    gateway: Gateways, programs: Programs
):
    first, second = two(programs)
    gw = gateway([endpoint("e0", first.url), endpoint("e1", second.url)])
    for sim in (first, second):
        sim.fault("status", "400")
    ledger = Ledger(gw)
    with WireClient(gw.url) as client:
        assert [client.ask(chat()).status for _ in range(50)] == [400] * 50
        assert first.stats()["received"] + second.stats()["received"] == 50
        for sim in (first, second):
            sim.clear_fault()
        replicas = {client.ask(chat()).header("x-llmgw-replica") for _ in range(20)}
    assert replicas == {"e0", "e1"}
    assert ledger.grew("llmgw_retries_total") == 0
    assert ledger.grew("llmgw_requests_total", status="400", model="chat-model") == 50
    assert gw.metric("llmgw_endpoint_cooldown_seconds") == 0
    wait_idle(gw)


@pytest.mark.parametrize("how", ["500", "404", "hangs"])
def test_b67_engines_whose_metrics_fail_still_serve(gateway: Gateways, programs: Programs, how: str):
    """Blind, the gateway goes by what it has in flight itself."""
    first, second = two(programs)
    gw = gateway([endpoint("e0", first.url), endpoint("e1", second.url)])
    for sim in (first, second):
        kind, arg = ("hang_headers", None) if how == "hangs" else ("status", how)
        sim.fault(kind, arg, path="/metrics")
    wait_until(lambda: gw.metric("llmgw_endpoint_metrics_stale") == 2, 20, lambda: str(gw.metrics()))
    with traffic(gw, threads=4) as answers:
        wait_until(lambda: len(answers) > 60, 20)
    assert {status for status, _ in answers} == {200}
    shares = [sum(replica == name for _, replica in answers) for name in ("e0", "e1")]
    assert min(shares) > len(answers) * 0.2, shares
    assert gw.is_ready()
    for sim in (first, second):
        sim.clear_fault()
    wait_until(lambda: gw.metric("llmgw_endpoint_metrics_stale") == 0, 10)


def test_b103_an_engine_that_restarts_costs_no_client_an_error(gateway: Gateways, programs: Programs):
    """It refuses, then is healthy without a model, then serves again; traffic all the time."""
    first, second = two(programs)
    entries = [endpoint("e0", first.url), endpoint("e1", second.url)]
    gw = gateway(
        config_for(entries, router={"scrape_interval": "100ms", "cooldown_seconds": "300ms"}), workers=2
    )

    def state() -> str:
        endpoints = gw.admin_json("/api/v1/endpoints")["endpoints"]
        return str(next(each["state"] for each in endpoints if each["id"] == "e0"))

    with traffic(gw) as answers:
        wait_until(lambda: {replica for _, replica in answers} == {"e0", "e1"}, 10)
        first.fault("refuse")
        wait_until(lambda: state() == "down", 10, state)
        first.fault("health_lies")  # no model is listed, and every request fails
        first.clear_fault("refuse")
        wait_until(lambda: gw.metric("llmgw_endpoint_inflight", replica="e0") == 0, 10)
        received, mark = first.stats()["received"], len(answers)
        wait_until(lambda: len(answers) > mark + 60, 20)
        assert state() == "down"
        assert first.stats()["received"] == received
        first.clear_fault()
        wait_until(lambda: state() == "ready", 10, state)
        mark = len(answers)
        wait_until(lambda: "e0" in {replica for _, replica in answers[mark:]}, 10)
    assert {status for status, _ in answers} == {200}
    wait_idle(gw)


def test_b97_readiness_depends_on_nothing_but_the_ability_to_serve(gateway: Gateways, programs: Programs):
    first, second = two(programs)
    gw = gateway([endpoint("e0", first.url), endpoint("e1", second.url)])
    (coordinator,) = gw.processes("coordinator")
    # What counts and watches is gone: frozen first, then dead. Requests go on.
    os.kill(coordinator.pid, signal.SIGSTOP)
    with traffic(gw) as answers:
        wait_until(lambda: len(answers) > 30, 20)
        assert gw.is_ready()
        os.kill(coordinator.pid, signal.SIGKILL)
        mark = len(answers)
        wait_until(lambda: len(answers) > mark + 30, 20)
        assert gw.is_ready()
    assert {status for status, _ in answers} == {200}
    # One engine of two: still able. None: not, and it says so. One again: able.
    wait_until(lambda: gw.processes("coordinator") not in ([], [coordinator]), 20)
    first.fault("refuse")
    second.fault("refuse")
    wait_until(lambda: gw.get("/readyz") == (503, b'{"ready":false,"reason":"no_endpoint"}'), 15)
    assert gw.get("/healthz")[0] == 200
    second.clear_fault()
    gw.wait_ready(15)
