"""A gateway before simulated engines: one start for all tests of a module.

@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    with open_scene(tmp_path_factory.mktemp("scene"), max_body_bytes=1024) as scene:
        yield scene
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.accounts import Ledger, settled, wait_idle
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.sim import SimEngine
from tests.support.wait import wait_until
from tests.support.wire import WireClient

_ids = itertools.count()


@dataclass(slots=True)
class Scene:
    """A running gateway and its engines `e0`, `e1`, ... which all serve `chat-model`.

    Attributes:
        programs, gateways: start more.
    """

    programs: Programs
    gateways: Gateways
    gateway: Gateway
    sims: list[SimEngine]

    @property
    def sim(self) -> SimEngine:
        """The first engine."""
        return self.sims[0]

    def client(self, **keys: Any) -> WireClient:
        """Open a connection to the gateway."""
        return WireClient(self.gateway.url, **keys)

    def ledger(self) -> Ledger:
        """Note the metrics as they are."""
        return Ledger(self.gateway)

    def settled(self, request_id: str) -> dict[str, Any]:
        """Wait for the end of a request, prove that it gave everything back, and return its line."""
        line = settled(self.gateway, request_id)
        self.wait_idle()
        return line

    def wait_idle(self) -> None:
        """Prove that no request is under way, here or at an engine."""
        wait_idle(self.gateway)
        for sim in self.sims:
            wait_until(lambda sim=sim: sim.stats()["blocks_in_use"] == 0, 5, lambda sim=sim: str(sim.stats()))


def request_id() -> str:
    """Return an id for `x-request-id` that no other request has."""
    return f"test-{next(_ids)}"


@contextmanager
def open_scene(
    folder: Path, *flags: str, sims: int = 1, models: Sequence[str] = ("chat-model",), **keys: Any
) -> Iterator[Scene]:
    """Start engines and a gateway; afterwards no process and no shared memory may be left.

    Args:
        flags: of every `llmgw-sim`.
        models: names that every engine serves; the gateway has one endpoint for each.
        keys: top-level keys of the gateway's configuration.
    """
    programs = Programs(folder)
    gateways = Gateways(programs, folder)
    try:
        names = [flag for name in models for flag in ("--model", name)]
        engines = [SimEngine(programs, *names, *flags) for _ in range(sims)]
        entries = [
            endpoint(f"e{number}" if name == models[0] else f"e{number}-{place}", engine.url, model=name)
            for place, name in enumerate(models)
            for number, engine in enumerate(engines)
        ]
        yield Scene(programs, gateways, gateways(config_for(entries, **keys)), engines)
    finally:
        gateways.close()
        programs.close()
