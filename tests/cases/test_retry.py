"""Cases of retries and kept connections, by their numbers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.accounts import Ledger, settled, wait_idle
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.raw_client import RawClient, chat
from tests.support.raw_engine import DONE, LAST_CHUNK, SSE_HEAD, RawEngine, RawRequest, chunk, event

ONE = event("one")
WHOLE = SSE_HEAD + chunk(ONE) + chunk(DONE) + LAST_CHUNK


@pytest.fixture
def engines() -> Iterator[tuple[RawEngine, RawEngine]]:
    first = RawEngine()
    second = RawEngine(inbox=first.inbox)
    yield first, second
    first.close()
    second.close()


def ask(gateway: Gateway, *, stream: bool = True) -> int:
    with RawClient(gateway.url) as client:
        client.post(chat(stream=stream))
        status = client.status
        client.read_all()
        return status


# B35: kept connections that the engine has closed.


def test_b35_connection_that_breaks_on_reuse_is_replaced_by_one_to_the_same_engine(
    gateway: Gateways, engines: tuple[RawEngine, RawEngine]
) -> None:
    running = gateway([endpoint("a", engines[0].url), endpoint("b", engines[1].url)])
    ledger = Ledger(running)
    for ending in (RawRequest.reset, RawRequest.close):
        warm: set[int] = set()
        while len(warm) < 2:  # a kept connection to each of them
            with RawClient(running.url) as client:
                client.post(chat())
                request = engines[0].next_request()
                warm.add(request.port)
                request.send(WHOLE)
                client.read_all()
                request.finish()
        with RawClient(running.url) as client:
            client.post(chat(), headers={"x-request-id": f"reused-{ending.__name__}"})
            first = engines[0].next_request()
            assert first.nth > 0
            ending(first)
            second = engines[0].next_request()
            assert second.port == first.port
            assert second.nth == 0
            second.send(WHOLE)
            assert client.read_all() == ONE + DONE
            second.close()
        line = settled(running, f"reused-{ending.__name__}")
        assert (line["status"], line["outcome"], line["retries"]) == (200, "ok", 0)
    assert ledger.grew("llmgw_retries_total") == 0
    assert ledger.grew("llmgw_upstream_errors_total") == 0


def test_b35_idle_connections_closed_by_the_engine_cost_no_request(
    gateway: Gateways, engines: tuple[RawEngine, RawEngine]
) -> None:
    """The engine closes what is idle for 100 ms; requests come just then, 20 at a time."""
    engine, _ = engines
    engine.keepalive_s = idle_s = 0.1
    seen: Counter[str | None] = Counter()
    lock = threading.Lock()

    def answer(request: RawRequest) -> None:
        with lock:
            seen[request.request_id] += 1
        request.send(WHOLE)

    engine.answer = answer
    running = gateway([endpoint("a", engine.url)])
    ledger = Ledger(running)
    rounds, parallel = 15, 20
    with ThreadPoolExecutor(parallel) as pool:
        for number in range(rounds):
            statuses = list(pool.map(lambda _: ask(running), range(parallel)))
            assert statuses == [200] * parallel
            time.sleep(idle_s * (0.9 + 0.2 * number / rounds))  # the spacing is what is tried here
    assert len(seen) == rounds * parallel
    assert set(seen.values()) == {1}, "a request was delivered twice"
    assert ledger.grew("llmgw_upstream_errors_total") == 0
    assert ledger.grew("llmgw_retries_total") == 0
    wait_idle(running)


# B53: other endpoints.


def test_b53_endpoint_that_refuses_connections_costs_no_request(
    gateway: Gateways, engines: tuple[RawEngine, RawEngine]
) -> None:
    dead, alive = engines
    alive.answer = lambda request: request.send(WHOLE)
    running = gateway(
        [endpoint("dead", dead.url), endpoint("alive", alive.url)],
        # Nobody but the requests themselves finds out that it refuses.
        router={"scrape_interval": "60s"},
    )
    dead.close()
    ledger = Ledger(running)
    assert [ask(running, stream=bool(n % 2)) for n in range(40)] == [200] * 40
    assert ledger.grew("llmgw_requests_total", pool="default", status="200") == 40
    # It was tried once, and then left alone for its cooldown.
    assert ledger.grew("llmgw_retries_total", reason="unreachable") == 1
    assert ledger.grew("llmgw_upstream_errors_total", reason="unreachable") == 1
    assert {line["replica"] for line in running.access_lines(status=200, method="POST")} == {"alive"}
    wait_idle(running)


def test_b53_all_endpoints_in_cooldown_are_waited_for(
    gateway: Gateways, engines: tuple[RawEngine, RawEngine]
) -> None:
    cooldown_s = 2.0
    running = gateway(
        [endpoint("a", engines[0].url), endpoint("b", engines[1].url)],
        router={"cooldown_seconds": cooldown_s, "scrape_interval": "200ms"},
    )
    with RawClient(running.url) as client:
        client.post(chat())
        for _ in engines:
            engines[0].next_request().reset()
        assert client.status == 503
    started = time.monotonic()
    with RawClient(running.url) as client:
        client.post(chat(), headers={"x-request-id": "patient"})
        request = engines[0].next_request()
        assert time.monotonic() - started > cooldown_s / 2
        request.send(WHOLE)
        assert client.read_all() == ONE + DONE
        request.finish()
    line = settled(running, "patient")
    assert (line["status"], line["retries"]) == (200, 0)


def test_b53_nothing_is_tried_again_behind_the_first_byte(
    gateway: Gateways, engines: tuple[RawEngine, RawEngine]
) -> None:
    running = gateway([endpoint("a", engines[0].url), endpoint("b", engines[1].url)])
    ledger = Ledger(running)
    with RawClient(running.url) as client:
        client.post(chat(), headers={"x-request-id": "broken"})
        request = engines[0].next_request()
        request.send(SSE_HEAD + chunk(ONE))
        assert client.read_until(len(ONE)) == ONE
        request.reset()
        received = client.read_all()
    assert b"upstream_interrupted" in received
    assert b"[DONE]" not in received
    line = settled(running, "broken")
    assert (line["status"], line["outcome"], line["retries"]) == (200, "stream_broken", 0)
    assert not engines[0].drop_unseen()
    assert ledger.grew("llmgw_retries_total") == 0


def test_b53_tries_are_bounded(gateway: Gateways, engines: tuple[RawEngine, RawEngine]) -> None:
    running = gateway([endpoint("a", engines[0].url), endpoint("b", engines[1].url)], router={"retries": 0})
    with RawClient(running.url) as client:
        client.post(chat(), headers={"x-request-id": "once"})
        engines[0].next_request().reset()
        assert client.status == 503
        assert client.error()["code"] == "upstream_unreachable"
    assert settled(running, "once")["retries"] == 0
    assert not engines[0].drop_unseen()
