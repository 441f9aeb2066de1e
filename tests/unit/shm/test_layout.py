"""Offsets: no two regions share a cell, whatever the sizes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.layout import (
    CELL_BYTES,
    HEADER_CELLS,
    LINE_CELLS,
    SLOT_CELLS,
    STAT_FIELDS,
    FixedSlot,
    Header,
    Layout,
    Region,
    Sizes,
    SlotField,
    StatField,
)

SIZES = st.builds(
    Sizes,
    worker_slots=st.integers(1, 300),
    endpoint_slots=st.integers(1, 2000),
    metric_cells=st.integers(LINE_CELLS, 5000),
)


def regions(layout: Layout) -> list[Region]:
    values = (getattr(layout, field.name) for field in dataclasses.fields(layout))
    return [value for value in values if isinstance(value, Region)]


@given(SIZES)
def test_regions_follow_each_other_on_cache_lines_and_fill_the_file(sizes: Sizes):
    layout = Layout.of(sizes)
    end = 0
    for region in regions(layout):
        assert region.start % LINE_CELLS == 0
        assert 0 <= region.start - end < LINE_CELLS
        end = region.end
    assert 0 <= layout.total_bytes - end * CELL_BYTES < LINE_CELLS * CELL_BYTES


@given(SIZES)
def test_rows_and_slots_of_every_process_lie_within_their_region(sizes: Sizes):
    layout = Layout.of(sizes)
    last = sizes.total_slots - 1
    assert layout.fixed_slot(max(FixedSlot)) == last
    assert layout.metrics_row(last).end == layout.metrics.end
    assert layout.slot_cell(last, max(SlotField)) < layout.slots.end


@pytest.mark.parametrize(
    ("fields", "room"), [(Header, HEADER_CELLS), (SlotField, SLOT_CELLS), (StatField, STAT_FIELDS)]
)
def test_fields_fit_into_the_room_kept_for_them(fields: type[Header], room: int):
    assert sorted(fields) == list(range(len(fields)))
    assert len(fields) <= room


@given(SIZES, SIZES)
def test_layouts_of_different_sizes_have_different_fingerprints(one: Sizes, other: Sizes):
    assert (Layout.of(one).fingerprint == Layout.of(other).fingerprint) == (one == other)


@pytest.mark.parametrize(("workers", "slots"), [(1, 8), (2, 8), (4, 16), (8, 32)])
def test_three_generations_of_workers_have_slots(workers: int, slots: int):
    assert Sizes.for_workers(workers).worker_slots == slots


@pytest.mark.parametrize("wrong", [{"worker_slots": 0}, {"endpoint_slots": 0}, {"metric_cells": 0}])
def test_sizes_without_room_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="at least one"):
        Sizes(**wrong)
