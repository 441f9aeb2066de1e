"""A segment per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.layout import Sizes
from shm.segment import Segment
from tests.support.segments import made_segment


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    """A small segment: 4 workers, 8 endpoints."""
    with made_segment(
        tmp_path / "segment", Sizes(worker_slots=4, endpoint_slots=8, metric_cells=2048)
    ) as made:
        yield made
