"""Queues as clients see them: turns, order, places, refusals, and who leaves (B07, B43, B67, B69, B71)."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.accounts import wait_idle
from tests.support.cells import Cells, cells_of
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.sim import SimEngine
from tests.support.wait import wait_until

MODEL = "chat-model"
PLATINUM, GOLD, SILVER, BRONZE = range(4)


class Scene:
    """A gateway that lets one request run at a time (or `cap`), before an engine that serves any number."""

    def __init__(
        self, programs: Programs, gateways: Gateways, *, cap: int | None = 1, workers: int = 2, **router: Any
    ) -> None:
        self.engine = SimEngine(programs, "--model", MODEL, "--max-num-seqs", "500", "--ttft-ms", "1")
        admission = {"queue_ttl": "60s", **router.pop("admission", {})}
        self.gateway: Gateway = gateways(
            config_for(
                [endpoint("e0", self.engine.url, model=MODEL)],
                workers=workers,
                pools={"default": {"max_concurrent": cap}},
                router={"scrape_interval": "200ms", "admission": admission, **router},
            )
        )
        self._clients: list[RawClient] = []
        self._attached = cells_of(self.gateway)
        self.cells: Cells = self._attached.__enter__()

    def ask(
        self,
        content: str = "hello",
        *,
        band: str = "gold",
        tenant: str = "t",
        stream: bool = True,
        **fields: Any,
    ) -> RawClient:
        """Send a request on a connection of its own."""
        client = RawClient(self.gateway.url, timeout=30)
        self._clients.append(client)
        headers = {"x-llmgw-band": band, "x-tenant-id": tenant}
        client.post(chat(content=content, stream=stream, **fields), headers=headers)
        return client

    def occupy(self, tokens: int = 100_000) -> RawClient:
        """Take the only place."""
        self.engine.configure(itl_ms=20)
        client = self.ask("occupies", band="platinum", tenant="occupant", max_tokens=tokens)
        assert client.status == 200
        return client

    def queue(self, content: str = "waits", **fields: Any) -> RawClient:
        """Send a request and wait until it is known to wait."""
        before = sum(self.cells.waiters)
        client = self.ask(content, **fields)
        wait_until(lambda: sum(self.cells.waiters) == before + 1, 5, interval=0.001)
        return client

    def order(self, count: int) -> list[str]:
        """Return what the last requests at the engine said, in order of arrival."""
        return [seen.json()["messages"][0]["content"] for seen in self.engine.seen(count)]

    def end(self) -> None:
        """Leave, and prove that all has been given back."""
        try:
            for client in self._clients:
                client.close()
            wait_until(self.cells.is_zero, 5, lambda: f"{self.cells.all_of_it()}")
            wait_idle(self.gateway)
        finally:
            self._attached.__exit__(None, None, None)


@pytest.fixture
def scene(programs: Programs, gateway: Gateways) -> Iterator[Callable[..., Scene]]:
    """Build a scene by calling it with what differs."""
    made: list[Scene] = []

    def make(**keys: Any) -> Scene:
        made.append(Scene(programs, gateway, **keys))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.timeout(120)
def test_nine_tenants_with_one_request_each_are_served_within_18_grants_of_one_with_a_thousand(
    scene: Callable[..., Scene],
) -> None:
    stage = scene()
    occupant = stage.occupy()
    heavy = [stage.ask(f"heavy {n}", tenant="heavy", max_tokens=1) for n in range(1000)]
    wait_until(lambda: sum(stage.cells.waiters) == 1000, 20)
    light = [stage.queue(f"light {n}", tenant=f"light-{n}", max_tokens=1) for n in range(9)]
    before = stage.engine.stats()["received"]
    occupant.close()
    for client in light:
        assert client.status == 200
        client.read_all()
    wait_until(lambda: stage.engine.stats()["received"] - before >= 40, 10)
    count = min(250, int(stage.engine.stats()["received"] - before))
    served = stage.order(count + 20)
    first = next(at for at, text in enumerate(served) if text != "occupies")
    assert sum(text.startswith("light") for text in served[first : first + 18]) == 9
    for client in heavy[::100]:
        assert client.status == 200


def test_bands_are_served_from_the_top_and_each_in_the_order_of_arrival(scene: Callable[..., Scene]) -> None:
    stage = scene()
    occupant = stage.occupy()
    for number in range(4):
        for band in ("bronze", "gold", "platinum", "silver"):
            stage.queue(f"{band} {number}", band=band, max_tokens=1)
    occupant.close()
    wait_until(lambda: stage.engine.stats()["received"] == 17, 10)
    served = stage.order(16)
    assert served == [
        f"{band} {number}" for band in ("platinum", "gold", "silver", "bronze") for number in range(4)
    ], served


@pytest.mark.timeout(120)
def test_b69_with_fairness_by_service_a_tenant_of_long_requests_does_not_starve_one_of_short_ones(
    scene: Callable[..., Scene],
) -> None:
    stage = scene(admission={"fairness": "service"})
    occupant = stage.occupy()
    for number in range(60):
        stage.ask(f"x {number}", tenant="x", max_tokens=200)
    wait_until(lambda: sum(stage.cells.waiters) == 60, 10)
    for number in range(10):
        stage.queue(f"y {number}", tenant="y", max_tokens=5)
    stage.engine.configure(itl_ms=0.5)
    occupant.close()
    wait_until(lambda: sum(text.startswith("y") for text in stage.order(30)) == 10, 20)
    served = [text for text in stage.order(30) if text != "occupies"]
    places = [at for at, text in enumerate(served) if text.startswith("y")]
    # Ten of y cost less than one of x.
    assert statistics.median(places) - places[0] <= 6
    assert max(places) <= 11 + places[0]


def test_b71_the_answer_tells_how_long_it_waited_and_from_which_place(scene: Callable[..., Scene]) -> None:
    stage = scene(workers=1)  # two may tell the coordinator of requests in another order than they came
    stage.engine.configure(itl_ms=20)
    occupant = stage.ask("occupies", max_tokens=50)
    assert occupant.status == 200
    waiting = []
    for _ in range(5):
        asked_at = time.monotonic()
        waiting.append((stage.queue(max_tokens=20), asked_at))
    for place, (client, asked_at) in enumerate(waiting, 1):
        assert client.status == 200
        waited_s = time.monotonic() - asked_at
        assert client.header("x-llmgw-queue-position") == str(place)
        told_s = int(client.header("x-llmgw-queue-ms") or 0) / 1000
        assert told_s == pytest.approx(waited_s, rel=0.2)
        client.read_all()
    assert occupant.header("x-llmgw-queue-position") is None
    assert occupant.header("x-llmgw-queue-ms") == "0"


@pytest.mark.timeout(60)
def test_b71_a_refusal_tells_when_there_will_be_room(scene: Callable[..., Scene]) -> None:
    stage = scene(admission={"queue_capacity_per_band": 30})
    stage.engine.configure(itl_ms=10)
    for _ in range(31):
        stage.ask(max_tokens=25)  # four a second
    wait_until(lambda: sum(stage.cells.waiters) == 30, 10)
    wait_until(lambda: sum(stage.cells.waiters) <= 20, 20)
    while sum(stage.cells.waiters) < 30:
        stage.ask(max_tokens=25)
        time.sleep(0.002)
    refused = stage.ask(max_tokens=25, stream=False)
    error, asked_at = refused.error(), time.monotonic()
    assert (refused.status, error["code"], error["reason"]) == (503, "band_full", "band_full")
    assert error["queue"]["depth"]["gold"] == pytest.approx(30, abs=2)
    told_s = int(refused.header("retry-after") or 0)
    assert error["retry_after"] == told_s
    wait_until(lambda: sum(stage.cells.waiters) == 0, 30)
    drained_s = time.monotonic() - asked_at
    assert drained_s / 2 <= told_s <= drained_s * 2 + 1


def test_a_higher_band_takes_the_place_of_the_newest_of_the_lowest(scene: Callable[..., Scene]) -> None:
    # One worker: of two, the coordinator may hear in another order than they came.
    stage = scene(workers=1, admission={"queue_capacity": 4, "queue_capacity_per_band": 4})
    stage.occupy()
    silver = stage.queue(band="silver", stream=False)
    first = stage.queue(band="bronze", stream=False)
    stage.queue(band="bronze", stream=False)
    newest = stage.queue(band="bronze", stream=False)
    stage.ask(band="gold", stream=False)
    assert (newest.status, newest.error()["code"]) == (503, "displaced")
    assert newest.header("retry-after") is not None
    assert newest.error()["queue"]["depth"] == {"platinum": 0, "gold": 1, "silver": 1, "bronze": 2}
    same_band = stage.ask(band="bronze", stream=False)
    assert (same_band.status, same_band.error()["code"]) == (503, "band_full")
    wait_until(lambda: stage.cells.waiters[:4] == [0, 1, 1, 2], 2)
    assert not first.payload
    assert not silver.payload


def test_who_waits_too_long_is_refused_with_what_the_queue_looks_like(scene: Callable[..., Scene]) -> None:
    stage = scene(admission={"queue_ttl": "700ms"})
    stage.occupy()
    asked_at = time.monotonic()
    late = stage.queue(stream=False)
    stage.queue(stream=False, band="bronze")
    assert late.status == 504
    assert 0.7 <= time.monotonic() - asked_at < 1.7
    error = late.error()
    assert (error["code"], error["type"]) == ("queue_timeout", "server_error")
    assert error["retry_after"] == int(late.header("retry-after") or 0) >= 1
    assert set(error["queue"]["depth"]) == {"platinum", "gold", "silver", "bronze"}
    assert stage.engine.stats()["received"] == 1


def test_b43_who_leaves_the_queue_is_out_of_it_within_a_second_and_never_dispatched(
    scene: Callable[..., Scene],
) -> None:
    stage = scene()
    occupant = stage.occupy()
    leaving = [stage.queue(f"leaves {n}", max_tokens=1) for n in range(20)]
    staying = stage.queue("stays", max_tokens=1)
    left_at = time.monotonic()
    for client in leaving:
        client.close()
    wait_until(lambda: sum(stage.cells.waiters) == 1, 2)
    assert time.monotonic() - left_at < 1.5
    occupant.close()
    assert staying.status == 200
    assert stage.order(10) == ["occupies", "stays"]
    wait_until(lambda: len(stage.gateway.access_lines(status=499)) == 21, 5)


def test_b07_a_stream_that_waits_gets_signs_of_life(scene: Callable[..., Scene]) -> None:
    stage = scene(stream_ping={"mode": "comment", "interval": "300ms"})
    occupant = stage.occupy()
    asked_at = time.monotonic()
    waiting = stage.queue(max_tokens=2)
    assert waiting.status == 200
    waiting.read_until(len(b": ping\n") * 3)
    assert 0.8 < time.monotonic() - asked_at < 3.0
    assert bytes(waiting.payload).replace(b": ping\n", b"") == b""
    assert stage.engine.stats()["received"] == 1
    occupant.close()
    assert waiting.read_all().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("fault", [("status", "500"), ("hang_headers", None)], ids=["500", "hangs"])
@pytest.mark.timeout(60)
def test_b67_engines_without_metrics_get_traffic_at_a_bounded_concurrency(
    scene: Callable[..., Scene], fault: tuple[str, str | None]
) -> None:
    stage = scene(cap=None)
    stage.engine.fault(fault[0], fault[1], path="/metrics")
    wait_until(lambda: stage.gateway.metric("llmgw_endpoint_metrics_stale", replica="e0") == 1, 20)
    stage.engine.configure(itl_ms=10)
    clients = [stage.ask(f"n {n}", band="bronze", max_tokens=20) for n in range(60)]
    wait_until(lambda: sum(stage.cells.waiters) > 0, 5)
    assert [client.status for client in clients] == [200] * 60
    assert all(re.search(rb"\[DONE\]", client.read_all()) for client in clients)
    # Assumed 8, learned 8 + 8 at most before; and what bronze may have in the engine's queue.
    assert stage.engine.stats()["max_running_seen"] <= 8 + 8 + 4


def test_a_place_counts_turns_and_not_heads(scene: Callable[..., Scene]) -> None:
    stage = scene(workers=1)
    occupant = stage.occupy()
    for number in range(20):
        stage.queue(f"heavy {number}", tenant="heavy", max_tokens=1)
    light = stage.queue("light", tenant="light", max_tokens=1)
    occupant.close()
    assert light.status == 200
    assert light.header("x-llmgw-queue-position") == "2"
