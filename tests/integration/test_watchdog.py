"""An engine that is stuck leaves the candidates, callers are told, and it comes back."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.raw_engine import JSON_HEAD, LAST_CHUNK, SSE_HEAD, RawEngine, RawRequest, chunk, event
from tests.support.wait import wait_until

STUCK_AFTER_S = 1


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    """An engine that the test plays itself."""
    engine = RawEngine()
    yield engine
    engine.close()


def ask(gateway: Gateway, model: str = "chat-model") -> http.client.HTTPConnection:
    """Send a request; the answer is read by who wants it."""
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": model, "stream": True}))
    return connection


def read(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    """Return status and body of the answer."""
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def answer(request: RawRequest) -> None:
    """Answer a request."""
    request.send(JSON_HEAD + b"content-length: 2\r\n\r\n{}")
    request.finish()


def stuck(gateway: Gateway) -> list[str]:
    """Return what `/healthz` says of engines that are stuck."""
    found: list[str] = json.loads(gateway.get("/healthz")[1]).get("runner_stuck", [])
    return found


def wait_stuck(gateway: Gateway, *names: str) -> None:
    """Wait until exactly these endpoints are stuck."""
    wait_until(lambda: stuck(gateway) == list(names), 10.0, lambda: f"{names} stuck, not {stuck(gateway)}")


def test_a_silent_request_flags_its_endpoint_and_progress_takes_that_back(
    gateway: Gateways, engine: RawEngine
) -> None:
    running = gateway([endpoint("e1", engine.url)], pools={"default": {"stuck_after": STUCK_AFTER_S}})
    silent = ask(running)
    request = engine.next_request()
    request.send(SSE_HEAD + chunk(event("a")))
    wait_stuck(running, "e1")

    status, body = read(ask(running))
    error = json.loads(body)["error"]
    assert (status, error["code"], error["reason"]) == (503, "runner_stuck", "runner_stuck")
    assert running.metric("llmgw_endpoint_stuck", replica="e1") == 1
    assert running.metric("llmgw_endpoint_up", replica="e1") == 0
    (view,) = running.admin_json("/api/v1/endpoints")["endpoints"]
    assert (view["state"], view["is_usable"]) == ("stuck", False)
    assert len(running.log_lines(event="endpoint_stuck", replica="e1", level="warning")) == 1

    request.send(chunk(event("b")))
    wait_stuck(running)
    assert running.metric("llmgw_endpoint_stuck", replica="e1") == 0
    assert len(running.log_lines(event="endpoint_not_stuck", finding="moving")) == 1
    again = ask(running)
    answer(engine.next_request())
    assert read(again)[0] == 200
    request.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
    request.finish()
    assert read(silent)[0] == 200


def test_another_endpoint_serves_while_one_is_stuck(gateway: Gateways, engine: RawEngine) -> None:
    other = RawEngine()
    running = gateway(
        [endpoint("e1", engine.url), endpoint("e2", other.url)],
        pools={"default": {"stuck_after": STUCK_AFTER_S}},
    )
    connections = [ask(running), ask(running)]
    silent = engine.next_request()
    answer(other.next_request())
    wait_stuck(running, "e1")
    for _ in range(4):
        connections.append(ask(running))
        answer(other.next_request())
    answer(silent)
    assert [read(connection)[0] for connection in connections] == [200] * 6
    other.close()


def test_who_waits_for_a_slot_that_a_stuck_request_holds_is_told(
    gateway: Gateways, engine: RawEngine
) -> None:
    running = gateway(
        [endpoint("e1", engine.url)], pools={"default": {"stuck_after": STUCK_AFTER_S, "max_concurrent": 1}}
    )
    silent = ask(running)
    request = engine.next_request()
    waiter = ask(running)
    status, body = read(waiter)
    assert (status, json.loads(body)["error"]["code"]) == (503, "runner_stuck")
    answer(request)
    assert read(silent)[0] == 200
    wait_stuck(running)


def test_an_endpoint_whose_silent_request_has_gone_is_tried_again(
    gateway: Gateways, engine: RawEngine
) -> None:
    running = gateway([endpoint("e1", engine.url)], pools={"default": {"stuck_after": STUCK_AFTER_S}})
    silent = ask(running)
    engine.next_request()
    wait_stuck(running, "e1")
    silent.close()
    wait_stuck(running)
    again = ask(running)
    answer(engine.next_request())
    assert read(again)[0] == 200


def test_without_a_limit_nothing_is_stuck(gateway: Gateways, engine: RawEngine) -> None:
    other = RawEngine(serves=["watched-model"])
    running = gateway(
        [endpoint("e1", engine.url), endpoint("e2", other.url, model="watched-model", pool="watched")],
        pools={"watched": {"stuck_after": STUCK_AFTER_S}},
    )
    connections = [ask(running), ask(running, "watched-model")]
    requests = [engine.next_request(), other.next_request()]
    wait_stuck(running, "e2")
    for request in requests:
        answer(request)
    assert [read(connection)[0] for connection in connections] == [200, 200]
    other.close()
