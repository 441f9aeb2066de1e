"""Very many streams at once: all whole and in order; those whose clients leave are freed within a second."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest

from tests.support.accounts import Ledger, in_flight, wait_idle
from tests.support.gateway import Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import CHAT, chat
from tests.support.sim import SimEngine
from tests.support.swarm import Swarm
from tests.support.wait import wait_until

STREAMS = 1000
TOKENS = 20
PROMPTS = 25
FREED_S = 1.0
NOISE_S = 2.0
MODEL = "sim-model"


@pytest.fixture
def swarms() -> Iterator[list[Swarm]]:
    """Swarms to be closed at the end."""
    opened: list[Swarm] = []
    yield opened
    for swarm in opened:
        swarm.close()


def body_of(prompt: int, tokens: int = TOKENS) -> bytes:
    return chat(model=MODEL, content=f"prompt number {prompt}", max_tokens=tokens)


def texts_of(engine: SimEngine) -> list[str]:
    """Ask the engine itself what it answers to each prompt."""
    engine.configure(ttft_ms=0.1, itl_ms=0.1)
    connection = engine.connect()
    texts = []
    for prompt in range(PROMPTS):
        whole = json.loads(body_of(prompt)) | {"stream": False}
        connection.request("POST", CHAT, json.dumps(whole))
        response = connection.getresponse()
        texts.append(json.loads(response.read())["choices"][0]["message"]["content"])
    connection.close()
    assert len(set(texts)) > PROMPTS // 2
    return texts


def total(engines: list[SimEngine], *names: str) -> int:
    """Return the sum of counts over all engines."""
    return sum(int(engine.stats()[name]) for engine in engines for name in names)


@pytest.mark.timeout(180)
def test_a_thousand_streams_at_once_are_all_whole_and_in_order(
    programs: Programs, gateway: Gateways, swarms: list[Swarm]
) -> None:
    engines = [SimEngine(programs, "--max-num-seqs", "1000", "--seed", "7") for _ in range(3)]
    texts = texts_of(engines[0])
    for engine in engines:
        engine.configure(ttft_ms=100, itl_ms=400)
    running = gateway(
        [endpoint(f"e{n}", engine.url, model=MODEL) for n, engine in enumerate(engines)],
        workers=2,
        log={"level": "warning"},
    )
    swarm = Swarm(running.url)
    swarms.append(swarm)
    ledger = Ledger(running)
    for number in range(STREAMS):
        swarm.open(body_of(number % PROMPTS), number % PROMPTS)
    swarm.run(lambda: sum(s.has_token for s in swarm.streams) == STREAMS, 60, "every stream's first token")
    assert not any(stream.is_over for stream in swarm.streams), "they were not all at once"
    assert in_flight(running) == STREAMS
    swarm.run(lambda: all(stream.is_over for stream in swarm.streams), 90, "every stream's end")

    assert {stream.status for stream in swarm.streams} == {200}
    assert [stream.text() for stream in swarm.streams] == [texts[stream.key] for stream in swarm.streams]
    wait_idle(running)
    assert total(engines, "running", "waiting", "blocks_in_use") == 0
    shares = [engine.stats()["completed"] for engine in engines]
    assert min(shares) > STREAMS / 6, f"{shares}: endpoints were not chosen by load"
    assert ledger.grew("llmgw_requests_total", model=MODEL, status="200") == STREAMS
    assert (
        ledger.grew("llmgw_requests_total") - ledger.grew("llmgw_requests_total", model="unmatched")
        == STREAMS
    )
    assert ledger.grew("llmgw_tokens_total", model=MODEL, direction="completion") == STREAMS * TOKENS
    for name in ("llmgw_client_gone_total", "llmgw_upstream_errors_total", "llmgw_retries_total"):
        assert ledger.grew(name) == 0


@pytest.mark.timeout(120)
def test_two_hundred_clients_that_leave_at_any_moment_free_slots_and_blocks_within_a_second(
    programs: Programs, gateway: Gateways, swarms: list[Swarm]
) -> None:
    # 120 run and the others queue at the engines; the third one is slow with its first tokens.
    engines = [SimEngine(programs, "--max-num-seqs", "40", "--seed", "7") for _ in range(3)]
    texts = texts_of(engines[0])
    before = total(engines, "completed")
    for engine, ttft_ms in zip(engines, (50, 50, 60_000), strict=True):
        engine.configure(ttft_ms=ttft_ms, itl_ms=100)
    running = gateway(
        [endpoint(f"e{n}", engine.url, model=MODEL) for n, engine in enumerate(engines)],
        workers=2,
        # Requests have to queue at the engines, which is what admission prevents.
        router={"admission": {"enabled": False}},
    )
    swarm = Swarm(running.url)
    swarms.append(swarm)
    ledger = Ledger(running)
    leaving = [swarm.open(body_of(number, 5000)) for number in range(200)]
    swarm.run(lambda: total(engines, "running", "waiting") == 200, 20, "all to be at the engines")
    # Whatever has a slot and a quick engine has its first token soon.
    swarm.run(lambda: sum(s.has_token for s in leaving) >= 60, 20, "tokens")
    assert total(engines, "waiting") > 40
    assert total(engines, "blocks_in_use") > 0

    rng = random.Random(2)
    rng.shuffle(leaving)
    streaming = 0
    for first in range(0, 200, 20):
        group = leaving[first : first + 20]
        swarm.run(lambda: True, 1, "")
        streaming += sum(stream.has_token for stream in group)
        swarm.leave(group)
        left_at = time.monotonic()
        wait_until(
            lambda first=first: total(engines, "running", "waiting") == 180 - first,
            FREED_S + NOISE_S,
            lambda first=first: f"{180 - first} left; {[engine.stats() for engine in engines]}",
        )
        assert time.monotonic() - left_at < FREED_S + NOISE_S
    assert total(engines, "blocks_in_use") == 0
    assert total(engines, "completed") == before
    wait_idle(running)
    wait_until(lambda: ledger.grew("llmgw_client_gone_total") == 200, 5, "all to be counted")
    # More than these have been sent a token: it may be on its way to a client that leaves.
    assert ledger.grew("llmgw_client_gone_total", phase="streaming") >= streaming > 0
    assert ledger.grew("llmgw_client_gone_total", phase="waiting") > 0
    assert ledger.grew("llmgw_requests_total", model=MODEL, status="499") == 200
    assert ledger.grew("llmgw_upstream_errors_total") == 0
    assert len(running.access_lines(status=499, outcome="client_gone")) == 200

    # The slots serve others.
    engines[2].configure(ttft_ms=1)
    for number in range(PROMPTS):
        swarm.open(body_of(number), number)
    swarm.run(lambda: all(stream.is_over for stream in swarm.streams), 30, "the streams behind them")
    assert [stream.text() for stream in swarm.streams[200:]] == texts
