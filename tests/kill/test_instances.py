"""Two instances that share a hard cap: it is exact, whoever leaves, is killed, or has no Redis."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.flood import body
from tests.support.gateway import Gateways
from tests.support.instances import CAP, MODEL, Pair, PairMaker
from tests.support.processes import Programs
from tests.support.redis import RedisServer
from tests.support.storm import Storm
from tests.support.wait import wait_until

REQUESTS = 2000
AT_ONCE = 150
KILLS = 8


@pytest.fixture
def pair(programs: Programs, gateway: Gateways, tmp_path: Path) -> Iterator[PairMaker]:
    """Build a pair by calling it with what differs."""
    made: list[Pair] = []

    def make(**keys: object) -> Pair:
        made.append(Pair(programs, gateway, RedisServer(programs, tmp_path), **keys))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def storms() -> Iterator[list[Storm]]:
    """Storms to be closed at the end."""
    opened: list[Storm] = []
    yield opened
    for storm in opened:
        storm.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [4])
def test_the_engine_never_sees_more_than_the_cap_through_two_instances(
    pair: PairMaker, storms: list[Storm], workers: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stage = pair(workers=workers)
    storm = Storm([stage.one.url, stage.other.url], rng)
    storms.append(storm)
    kill_at = sorted(rng.randrange(200, REQUESTS - 100) for _ in range(KILLS))
    seen_shares = set()
    deadline = time.monotonic() + 150
    while storm.opened < REQUESTS or storm.under_way:
        assert time.monotonic() < deadline, (storm.opened, storm.under_way, stage.counts())
        while storm.opened < REQUESTS and storm.under_way < AT_ONCE:
            if kill_at and storm.opened >= kill_at[0]:
                kill_at.pop(0)
                rng.choice(rng.choice(stage.both).serving()).kill()
            storm.open(body(f"{storm.opened:08}", model=MODEL, max_tokens=rng.randrange(1, 12)))
        storm.turn()
        seen_shares.add(stage.shares())
    print(storm.statuses, "left", storm.left, "cut", storm.cut, stage.engine.stats()["max_running_seen"])
    print(f"{len(seen_shares)} ways to share")

    # Shares on their way are nobody's, so that all of the cap need not have been in use at once.
    assert CAP / 2 < stage.engine.stats()["max_running_seen"] <= CAP
    assert len(seen_shares) > 10, "shares have to move"
    assert max(map(sum, seen_shares)) <= CAP
    assert set(storm.statuses) == {200}
    assert storm.answered > REQUESTS / 2
    wait_until(stage.is_zero, 5, stage.counts)
    stage.engine.configure(itl_ms=50)
    for each in stage.both:
        stage.assert_all_usable_from(each)
    assert stage.engine.stats()["max_running_seen"] == CAP


@pytest.mark.timeout(90)
def test_a_killed_instance_gives_its_share_back_within_three_seconds(
    pair: PairMaker, storms: list[Storm]
) -> None:
    stage = pair()
    stage.engine.configure(itl_ms=50)
    here = Storm([stage.one.url], random.Random(1), leaving=0.0)
    there = Storm([stage.other.url], random.Random(2), leaving=0.0)
    storms += [here, there]
    for number in range(CAP):
        there.open(body(f"{number:08} there", model=MODEL, max_tokens=10_000))
    wait_until(lambda: stage.engine.stats()["running"] >= CAP // 2, 10, stage.counts)
    for number in range(2 * CAP):
        here.open(body(f"{number:08} here", model=MODEL, max_tokens=10_000))
    wait_until(lambda: stage.engine.stats()["running"] == CAP, 10, stage.counts)
    assert stage.other.cells.leases >= CAP // 2
    assert stage.one.cells.share <= CAP // 2

    killed_at = time.monotonic()
    stage.other.gateway.kill_all()
    wait_until(lambda: stage.one.cells.share == CAP, 3.0, stage.counts)
    print(f"back after {time.monotonic() - killed_at:.2f} s")
    wait_until(lambda: stage.engine.stats()["running"] == CAP, 1.0, stage.counts)
    assert stage.one.cells.leases == CAP
    assert stage.engine.stats()["max_running_seen"] == CAP
    assert stage.one.gateway.metric("llmgw_peers_removed_total") == 1
    assert stage.one.log_count("peer_removed") == 1
    here.close()
    there.close()
    wait_until(stage.one.cells.is_zero, 5, stage.counts)

    stage.restart_other()
    stage.wait_dealt()
    stage.assert_all_usable_from(stage.other)


@pytest.mark.timeout(90)
def test_without_redis_no_request_fails_and_the_cap_holds(pair: PairMaker, storms: list[Storm]) -> None:
    stage = pair()
    storm = Storm([stage.one.url, stage.other.url], random.Random(1), leaving=0.0)
    storms.append(storm)

    def flood_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while storm.under_way < 60:
                storm.open(body(f"{storm.opened:08}", model=MODEL, max_tokens=10))
            storm.turn()
            assert sum(stage.shares()) <= CAP

    flood_for(1.0)
    stage.redis.kill()
    flood_for(4.0)
    for each in stage.both:
        assert each.gateway.metric("llmgw_redis_up") == 0
        assert each.gateway.is_ready()
        assert (each.log_count("redis_away"), each.log_count("redis_connected")) == (1, 1)
    frozen = stage.shares()
    flood_for(0.5)
    assert stage.shares() == frozen
    stage.redis.start()
    flood_for(4.0)
    while storm.under_way:
        storm.turn()
    print(storm.statuses, "most", stage.engine.stats()["max_running_seen"], "shares without", frozen)
    assert set(storm.statuses) == {200}
    assert storm.cut == 0
    assert stage.engine.stats()["max_running_seen"] <= CAP
    for each in stage.both:
        assert each.gateway.metric("llmgw_redis_up") == 1
        assert (each.log_count("redis_away"), each.log_count("redis_connected")) == (1, 2)
    stage.engine.configure(itl_ms=50)
    for each in stage.both:
        stage.assert_all_usable_from(each)
    assert stage.engine.stats()["max_running_seen"] == CAP
