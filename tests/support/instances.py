"""Two real gateways on one real Redis, before one engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil

from tests.support.cells import Cells, cells_of
from tests.support.flood import body
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.redis import RedisServer
from tests.support.sim import SimEngine
from tests.support.storm import Storm
from tests.support.wait import wait_until

MODEL = "sim-model"
CAP = 16


class Instance:
    """One of them."""

    def __init__(self, gateway: Gateway, stack: ExitStack) -> None:
        self.gateway = gateway
        self.cells: Cells = stack.enter_context(cells_of(gateway))

    @property
    def url(self) -> str:
        return self.gateway.url

    def serving(self) -> list[psutil.Process]:
        """Return the workers that serve; their parent is one of the same kind."""
        kind = self.gateway.processes("workers")
        pids = {process.pid for process in kind}
        return [process for process in kind if process.ppid() in pids]

    def log_count(self, event: str) -> int:
        return len(self.gateway.log_lines(event=event))


class Pair:
    """Both, with what they share. Leave it with `close`."""

    def __init__(
        self,
        programs: Programs,
        gateways: Gateways,
        redis: RedisServer,
        *,
        cap: int | None = CAP,
        workers: int = 2,
        engine: tuple[str, ...] = ("--max-num-seqs", "1000", "--ttft-ms", "8", "--itl-ms", "3"),
        endpoint_keys: dict[str, Any] | None = None,
        **admission: Any,
    ) -> None:
        """Start everything.

        Args:
            cap: of the pool; shares are dealt when this returns.
            workers: of each.
            engine: its arguments.
            admission: keys of `router.admission`.
        """
        self._stack = ExitStack()
        self._clients: list[RawClient] = []
        self.redis = redis
        self.cap = cap
        self.engine = SimEngine(programs, *engine)
        keys = {"queue_ttl": "60s", "assumed_batch_capacity": 1000, **admission}
        config = config_for(
            [endpoint("e0", self.engine.url, model=MODEL, **(endpoint_keys or {}))],
            workers=workers,
            pools={"default": {"max_concurrent": cap}},
            router={"scrape_interval": "200ms", "admission": keys},
            redis={"url": redis.url},
        )
        self.one = Instance(gateways(config), self._stack)
        self.other = Instance(gateways(config), self._stack)
        self.both = (self.one, self.other)
        if cap is not None:
            self.wait_dealt()
        else:
            self.wait_acquainted()

    def ask(
        self,
        at: Instance,
        content: str = "hello",
        *,
        band: str = "gold",
        tenant: str = "t",
        max_tokens: int = 1,
    ) -> RawClient:
        """Send a request on a connection of its own."""
        client = RawClient(at.url, timeout=20)
        self._clients.append(client)
        headers = {"x-llmgw-band": band, "x-tenant-id": tenant}
        client.post(chat(content=content, model=MODEL, max_tokens=max_tokens), headers=headers)
        return client

    def queue(self, at: Instance, content: str, **keys: Any) -> RawClient:
        """Send a request and wait until it is known to wait."""
        before = sum(at.cells.waiters)
        client = self.ask(at, content, **keys)
        wait_until(lambda: sum(at.cells.waiters) == before + 1, 5, interval=0.001)
        return client

    def order(self, count: int) -> list[str]:
        """Return what the last requests at the engine said, in order of arrival."""
        return [seen.json()["messages"][0]["content"] for seen in self.engine.seen(count)]

    def restart_other(self) -> None:
        """Start the second one again, after its end."""
        self.other.gateway.start()
        self.other = Instance(self.other.gateway, self._stack)
        self.both = (self.one, self.other)

    def shares(self) -> tuple[int, int]:
        """Return what each may use of the cap at one moment, if this process is not held up thrice."""
        one, other = self.one.cells, self.other.cells
        for _ in range(20):
            before = one.share, other.share
            after = one.share, other.share
            if before == after:
                break
        return after

    def wait_dealt(self, timeout: float = 10.0) -> None:
        """Wait until the whole cap is dealt, with something for each that has more than one to share."""
        least = 1 if self.cap and self.cap > 1 else 0
        wait_until(
            lambda: sum(shares := self.shares()) == self.cap and min(shares) >= least,
            timeout,
            lambda: f"shares {self.shares()}",
        )
        self.wait_acquainted(timeout)

    def wait_acquainted(self, timeout: float = 10.0) -> None:
        """Wait until each knows the other."""
        for each in self.both:
            wait_until(lambda each=each: each.gateway.metric("llmgw_peers") == 1, timeout, interval=0.05)

    def is_zero(self) -> bool:
        return all(each.cells.is_zero() for each in self.both)

    def counts(self) -> str:
        """Return what a failed wait should show."""
        cells = [each.cells.all_of_it() for each in self.both]
        stats = self.engine.stats()
        return f"shares {self.shares()} cells {cells} engine {stats['running']} of {stats['received']}"

    def assert_all_usable_from(self, instance: Instance) -> None:
        """Assert that one instance alone can have the whole cap, and no more; nothing runs yet."""
        assert self.cap is not None
        storm = Storm([instance.url], random.Random(1), leaving=0.0)
        try:
            for number in range(self.cap + 10):
                storm.open(body(f"{number:08} last", model=MODEL, max_tokens=10_000))
            wait_until(
                lambda: self.engine.stats()["running"] == self.cap and sum(instance.cells.waiters) == 10,
                10,
                self.counts,
            )
        finally:
            storm.close()
        wait_until(lambda: self.is_zero() and self.engine.stats()["running"] == 0, 5, self.counts)

    def close(self) -> None:
        """Leave, and prove that all has been given back."""
        try:
            for client in self._clients:
                client.close()
            wait_until(self.is_zero, 5, self.counts)
        finally:
            self._stack.close()


PairMaker = Callable[..., Pair]
