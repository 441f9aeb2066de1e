"""Fixtures that every floor of tests may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clock import FakeClock
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
