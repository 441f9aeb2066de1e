"""Fixtures that every floor of tests may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clock import FakeClock
from tests.support.gateway import Gateways
from tests.support.processes import Programs
from tests.support.stand import Stand, open_stand


def pytest_configure() -> None:
    """Have programs that tests start see the same surroundings, however the tests were started."""
    # A shell has jobs in its background ignore Ctrl-C, and what they start as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # readline, once imported, tells a size in the name of every terminal.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Start programs; afterwards all are stopped, and none may be left."""
    running = Programs(tmp_path)
    yield running
    running.close()


@pytest.fixture
def gateway(programs: Programs, tmp_path: Path) -> Iterator[Gateways]:
    """Start gateways by calling it; afterwards no process and no shared memory of any may be left."""
    running = Gateways(programs, tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def open_module_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A gateway and two engines of raw bytes, for all tests of a module."""
    with open_stand(tmp_path_factory.mktemp("stand")) as stand:
        yield stand


@pytest.fixture
def stand(open_module_stand: Stand) -> Iterator[Stand]:
    """The module's gateway and engines; a test must leave nothing under way."""
    open_module_stand.begin()
    yield open_module_stand
    open_module_stand.end()
