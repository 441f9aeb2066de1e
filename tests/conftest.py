"""Fixtures that every floor of tests may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clock import FakeClock
from tests.support.gateway import Gateways
from tests.support.processes import Programs


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
