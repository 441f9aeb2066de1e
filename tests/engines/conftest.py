"""A gateway in front of one engine, as OpenAI's clients meet it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.engines import Engine, start_llamacpp, start_sim
from tests.support.gateway import Gateway, Gateways, config_for
from tests.support.processes import Programs

SIM_FLAGS = ("--ttft-ms", "20", "--itl-ms", "5")


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that serves `chat-model` (alias `gpt-4o-mini`) from one engine."""

    gateway: Gateway
    engine: Engine


def serve(engine: Engine, programs: Programs, folder: Path) -> Iterator[Served]:
    """Start a gateway in front of `engine`; afterwards nothing of it may be left."""
    gateways = Gateways(programs, folder)
    router = {"scrape_interval": "200ms", "cooldown_seconds": "200ms"}
    models = [{"name": "chat-model", "aliases": ["gpt-4o-mini"]}]
    gateway = gateways(config_for([engine.endpoint()], router=router, models=models))
    yield Served(gateway, engine)
    gateways.close()


@pytest.fixture(scope="module")
def module_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Programs that live as long as a module's tests."""
    running = Programs(tmp_path_factory.mktemp("programs"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def sim_served(module_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway in front of the simulated engine."""
    engine = start_sim(module_programs, *SIM_FLAGS)
    yield from serve(engine, module_programs, tmp_path_factory.mktemp("sim"))


@pytest.fixture(scope="module")
def llamacpp_served(module_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway in front of the real llama.cpp with the tiny model."""
    engine = start_llamacpp(module_programs)
    yield from serve(engine, module_programs, tmp_path_factory.mktemp("llamacpp"))


@pytest.fixture
def sim(sim_served: Served) -> Iterator[Served]:
    """The simulated engine behind a gateway; for this test alone it may fail."""
    yield sim_served
    sim_served.engine.clear_faults()
    sim_served.engine.wait_idle(5)


@pytest.fixture(params=["sim", "llamacpp"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Each engine in turn, behind a gateway; a test must leave it idle."""
    chosen: Served = request.getfixturevalue(f"{request.param}_served")
    yield chosen
    chosen.engine.wait_idle(5)
