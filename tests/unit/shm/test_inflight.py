"""In-flight counts and cooldown marks: own columns, sums and latest deadlines over all workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from shm.inflight import InflightRow, InflightSums
from shm.layout import FixedSlot
from shm.marks import CooldownMarks
from shm.rows import WorkerSlot
from shm.segment import Segment


@pytest.fixture
def slots(segment: Segment) -> Iterator[list[WorkerSlot]]:
    claimed = [WorkerSlot.claim(segment) for _ in range(3)]
    yield claimed
    for slot in claimed:
        slot.release()


def test_counts_of_all_workers_are_summed_per_endpoint(segment: Segment, slots: list[WorkerSlot]):
    rows = [InflightRow(segment, slot) for slot in slots]
    for row, endpoints in zip(rows, ([0, 7, 7], [7], [2]), strict=True):
        for endpoint in endpoints:
            row.add(endpoint)
    sums = InflightSums(segment)
    assert sums.many(range(8)) == [1, 0, 1, 0, 0, 0, 0, 3]
    assert sums.many([7, 0]) == [3, 1]
    assert [sums.of(endpoint) for endpoint in range(8)] == sums.many(range(8))
    rows[0].sub(7)
    assert (sums.of(7), rows[0].of(7), rows[1].of(7)) == (2, 1, 1)


SEQUENCES = [range(8), range(2, 5), range(0, 8, 3), range(7, 0, -2), range(0), [7, 0, 7], []]


@pytest.mark.parametrize("endpoints", SEQUENCES)
def test_several_endpoints_are_read_in_the_order_given_however_they_are_named(
    segment: Segment, slots: list[WorkerSlot], endpoints: Sequence[int]
):
    for number, slot in enumerate(slots):
        row, marks = InflightRow(segment, slot), CooldownMarks(segment, slot)
        for endpoint in range(8):
            for _ in range(endpoint):
                row.add(endpoint)
            marks.set(endpoint, 0.5 * endpoint * number)
    sums, marks = InflightSums(segment), CooldownMarks(segment)
    assert sums.many(endpoints) == [3 * endpoint for endpoint in endpoints]
    assert marks.many(endpoints) == [1.0 * endpoint for endpoint in endpoints]


@pytest.mark.parametrize("endpoints", SEQUENCES)
def test_endpoints_without_marks_are_free(segment: Segment, endpoints: Sequence[int]):
    assert CooldownMarks(segment).many(endpoints) == [0.0] * len(endpoints)


def test_a_request_given_back_twice_is_told_and_the_count_stays_zero(
    segment: Segment, slots: list[WorkerSlot]
):
    row = InflightRow(segment, slots[0])
    row.add(1)
    row.sub(1)
    with pytest.raises(ValueError, match="more often than taken"):
        row.sub(1)
    assert InflightSums(segment).of(1) == 0


def test_the_latest_mark_of_all_workers_counts(segment: Segment, slots: list[WorkerSlot]):
    marks = [CooldownMarks(segment, slot) for slot in slots]
    marks[0].set(5, 20.0)
    marks[1].set(5, 30.0)
    marks[2].set(4, 10.0)
    reader = CooldownMarks(segment)
    assert reader.many([5, 4, 0]) == [30.0, 10.0, 0.0]
    marks[1].set(5, 0.0)
    assert reader.until(5) == 20.0


def test_a_process_without_a_workers_slot_cannot_write(segment: Segment):
    launcher = WorkerSlot.claim_fixed(segment, FixedSlot.LAUNCHER)
    with pytest.raises(ValueError, match="not a worker"):
        InflightRow(segment, launcher)
    with pytest.raises(ValueError, match="not a worker"):
        CooldownMarks(segment, launcher)
    with pytest.raises(ValueError, match="read-only"):
        CooldownMarks(segment).set(0, 1.0)
    launcher.release()
