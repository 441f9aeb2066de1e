"""A gateway before two engines that the test plays: one start for all tests of a module.

Its models differ in what may go wrong with them:
    chat-model     one engine, ordinary deadlines
    slow-headers   the response head is due within DUE_S
    slow-first     the first token is due within DUE_S
    slow-idle      a pause of DUE_S between tokens is too long
    slow-total     the whole answer is due within TOTAL_S
    pair           two engines that share an inbox; either may get the first try
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.accounts import Ledger, settled, wait_idle
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.raw_engine import RawEngine, RawRequest

DUE_S = 0.6
TOTAL_S = 1.5
WRITE_S = 2.0
MAX_EVENT_BYTES = 256 * 1024

_ids = itertools.count()


@dataclass
class Call:
    """A request under way: the client's end of it, and what it is called in logs."""

    client: RawClient
    request_id: str
    model: str


@dataclass
class Stand:
    """The gateway, its engines, and what was counted before the test.

    Attributes:
        engine: of every model.
        other: the second one of `pair`.
    """

    gateway: Gateway
    engine: RawEngine
    other: RawEngine
    ledger: Ledger
    _clients: list[RawClient] = field(default_factory=list)

    def call(
        self,
        model: str = "chat-model",
        *,
        stream: bool = True,
        http10: bool = False,
        receive_buffer: int = 0,
        **fields: Any,
    ) -> Call:
        """Send a chat request on a new connection."""
        client = self.connect(receive_buffer)
        request_id = f"test-{next(_ids)}"
        body = chat(stream=stream, model=model, **fields)
        client.post(body, http10=http10, headers={"x-request-id": request_id})
        return Call(client, request_id, model)

    def connect(self, receive_buffer: int = 0) -> RawClient:
        """Open a connection; closed at the end of the test."""
        client = RawClient(self.gateway.url, receive_buffer=receive_buffer)
        self._clients.append(client)
        return client

    def next_request(self, call: Call) -> RawRequest:
        """Wait until the request is at the engine."""
        request = self.engine.next_request()
        assert request.request_id == call.request_id
        return request

    def settled(self, call: Call, timeout: float = 5.0) -> dict[str, Any]:
        """Wait for the end of a request, prove that it gave everything back, and return its log line."""
        return settled(self.gateway, call.request_id, timeout)

    def begin(self) -> None:
        """Start the accounts of a test."""
        self.ledger = Ledger(self.gateway)

    def end(self) -> None:
        """Prove that a test left nothing: no request in flight, none that the test did not see."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        unseen = self.engine.drop_unseen()
        for engine in (self.engine, self.other):
            for request in engine.requests:
                request.close()
            engine.requests.clear()
        wait_idle(self.gateway)
        assert not unseen


def config(engine: RawEngine, other: RawEngine) -> dict[str, Any]:
    """Return the configuration described above."""
    due = f"{DUE_S * 1000:.0f}ms"
    limits: dict[str, dict[str, str]] = {
        "chat-model": {},
        "slow-headers": {"headers": due},
        "slow-first": {"first_token": due},
        "slow-idle": {"idle": due},
        "slow-total": {"total": f"{TOTAL_S * 1000:.0f}ms"},
        "pair": {},
    }
    return {
        "workers": 1,
        "auth": {"enabled": False},
        "client": {"write": f"{WRITE_S * 1000:.0f}ms"},
        # Without a rest, one test's failing engine is whole for the next one.
        "router": {
            "scrape_interval": "500ms",
            "cooldown_seconds": 0,
            "max_event_bytes": MAX_EVENT_BYTES,
        },
        "models": [
            {"name": name, **({"timeouts": timeouts} if timeouts else {})}
            for name, timeouts in limits.items()
        ],
        "endpoints": [
            *(endpoint(f"{name}-a", engine.url, model=name) for name in limits),
            endpoint("pair-b", other.url, model="pair"),
        ],
    }


@contextmanager
def open_stand(folder: Path, *, env: Mapping[str, str] | None = None) -> Iterator[Stand]:
    """Start it; afterwards no process and no shared memory may be left.

    Args:
        env: added to the gateway's environment.
    """
    programs = Programs(folder)
    gateways = Gateways(programs, folder)
    names = ("chat-model", "slow-headers", "slow-first", "slow-idle", "slow-total", "pair")
    engine = RawEngine(serves=names)
    other = RawEngine(serves=names, inbox=engine.inbox)
    try:
        gateway = gateways(config(engine, other), env=env)
        yield Stand(gateway, engine, other, Ledger(gateway))
    finally:
        engine.close()
        other.close()
        gateways.close()
        programs.close()
