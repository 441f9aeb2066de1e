"""Cases of clients that leave and engines that vanish, by their numbers."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.accounts import Ledger, settled
from tests.support.gateway import Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.raw_engine import SSE_HEAD, RawEngine, chunk
from tests.support.sim import SimEngine
from tests.support.wait import wait_until

NOTICED_S = 2.0
"""What the cases allow; measured at the engine."""


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    engine = RawEngine()
    yield engine
    engine.close()


def test_b41_client_that_leaves_a_whole_answer_stops_the_engine(gateway: Gateways, engine: RawEngine) -> None:
    running = gateway([endpoint("e", engine.url)])
    ledger = Ledger(running)
    client = RawClient(running.url)
    client.post(chat(stream=False), headers={"x-request-id": "left"})
    request = engine.next_request()
    client.close()
    request.wait_closed(NOTICED_S)
    line = settled(running, "left", NOTICED_S)
    assert (line["status"], line["outcome"]) == (499, "client_gone")
    assert ledger.grew("llmgw_requests_total", status="499") == 1
    assert ledger.grew("llmgw_client_gone_total", phase="waiting") == 1


@pytest.mark.parametrize("sent", [b"", SSE_HEAD, SSE_HEAD + chunk(b": ping\n\n")], ids=["", "head", "ping"])
def test_b43_client_that_leaves_before_the_first_token_is_noticed(
    gateway: Gateways, engine: RawEngine, sent: bytes
) -> None:
    running = gateway([endpoint("e", engine.url)])
    ledger = Ledger(running)
    client = RawClient(running.url)
    client.post(chat(), headers={"x-request-id": "left"})
    request = engine.next_request()
    request.send(sent)
    if sent:
        assert client.status == 200
    client.close()
    request.wait_closed(NOTICED_S)
    line = settled(running, "left", NOTICED_S)
    assert (line["status"], line["ttft_ms"]) == (499, None)
    assert ledger.grew("llmgw_client_gone_total", phase="waiting") == 1


def test_b43_client_that_leaves_the_wait_for_a_cooldown_never_reaches_an_engine(
    gateway: Gateways, engine: RawEngine
) -> None:
    other = RawEngine(inbox=engine.inbox)
    try:
        running = gateway(
            [endpoint("a", engine.url), endpoint("b", other.url)],
            router={"cooldown_seconds": "3s", "scrape_interval": "200ms"},
        )
        with RawClient(running.url) as first:
            first.post(chat())
            engine.next_request().reset()
            engine.next_request().reset()
            assert first.status == 503
        ledger = Ledger(running)
        client = RawClient(running.url)
        client.post(chat(), headers={"x-request-id": "left"})
        wait_until(lambda: ledger.grew("llmgw_candidates_filtered_total") >= 2, 5.0, "both to be left out")
        client.close()
        line = settled(running, "left", NOTICED_S)
        assert (line["status"], line["replica"]) == (499, None)
        assert running.metric("llmgw_client_gone_total", phase="queued") == 1
    finally:
        other.close()
    assert not engine.drop_unseen()


def test_b45_frozen_engine_is_given_up_after_its_deadline_and_left_alone_then(
    programs: Programs, gateway: Gateways
) -> None:
    """What is possible without agents, who will report it: the deadline, and the cooldown."""
    frozen, healthy = (SimEngine(programs, "--model", "chat-model") for _ in range(2))
    running = gateway(
        [endpoint("frozen", frozen.url), endpoint("healthy", healthy.url)],
        # Scrapes would find it out as well: here the requests themselves have to.
        router={"scrape_interval": "60s", "timeouts": {"first_token": "700ms", "headers": "700ms"}},
    )
    frozen.program.signal(signal.SIGSTOP)
    try:
        answers = []
        while len(answers) < 30 and 504 not in answers:
            answers.append(_ask(running.url)[0])
        assert answers.count(504) == 1, answers  # the kernel accepted it; nobody answered
        # With the endpoint at rest, all go to the other one.
        assert [_ask(running.url) for _ in range(10)] == [(200, "healthy")] * 10
    finally:
        frozen.program.signal(signal.SIGCONT)
    assert running.metric("llmgw_upstream_errors_total", reason="timeout") == 1
    (line,) = running.access_lines(status=504)
    assert (line["replica"], line["outcome"]) == ("frozen", "upstream_timeout")
    settled(running, line["request_id"])


def test_b45_engine_that_dies_before_the_first_byte_is_replaced_at_once(
    programs: Programs, gateway: Gateways
) -> None:
    sims = [SimEngine(programs, "--model", "chat-model") for _ in range(2)]
    running = gateway(
        [endpoint("a", sims[0].url), endpoint("b", sims[1].url)], router={"scrape_interval": "60s"}
    )
    for sim in sims:
        sim.configure(ttft_ms=60_000)
    with RawClient(running.url) as client:
        client.post(chat(stream=False, max_tokens=2), headers={"x-request-id": "moved"})
        busy = wait_until(lambda: [sim for sim in sims if sim.stats()["running"]], 5.0, "it to run")
        other = sims[1 - sims.index(busy[0])]
        other.configure(ttft_ms=1)
        busy[0].program.signal(signal.SIGKILL)
        busy[0].program.wait()
        assert client.status == 200
        assert client.header("x-llmgw-replica") == "ab"[sims.index(other)]
        client.read_all()
    assert settled(running, "moved")["retries"] == 1


def _ask(url: str) -> tuple[int, str | None]:
    with RawClient(url) as client:
        client.post(chat(max_tokens=1))
        return client.status, client.header("x-llmgw-replica")
