"""Progress of requests: the most silent one and the last move, over all workers."""

from __future__ import annotations

from shm.endpoints import EndpointPublisher, EndpointState, EndpointStats, EndpointTable
from shm.layout import StatField
from shm.progress import ProgressCells, ProgressRow
from shm.rows import WorkerSlot
from shm.segment import Segment


def test_the_most_silent_request_and_the_last_move_of_all_workers_count(segment: Segment):
    slots = [WorkerSlot.claim(segment) for _ in range(3)]
    rows = [ProgressRow(segment, slot) for slot in slots]
    cells = ProgressCells(segment)
    assert (cells.silent_since(4), cells.moved_at(4)) == (None, 0.0)
    for row, silent, moved in zip(rows, (0.0, 12.0, 11.0), (30.0, 0.0, 20.0), strict=True):
        row.set_silent(4, silent)
        row.set_moved(4, moved)
    assert (cells.silent_since(4), cells.moved_at(4)) == (11.0, 30.0)
    assert (cells.silent_since(3), cells.silent_since(5)) == (None, None)
    slots[2].release()  # as if it had died: nothing of it stays
    assert (cells.silent_since(4), cells.moved_at(4)) == (12.0, 30.0)
    for slot in slots[:2]:
        slot.release()
    assert (cells.silent_since(4), cells.moved_at(4)) == (None, 0.0)


def test_an_endpoint_that_is_stuck_stays_so_over_scrapes_and_returns_to_what_they_say(segment: Segment):
    publisher, table = EndpointPublisher(segment), EndpointTable(segment)

    def state() -> EndpointState:
        return table.stats(2).state

    publisher.set_stats(2, EndpointStats(EndpointState.READY))
    publisher.set_stuck(2, 50.0)
    assert (state(), table.stat(2, StatField.STUCK_SINCE)) == (EndpointState.STUCK, 50.0)
    publisher.set_stats(2, EndpointStats(EndpointState.STALE))
    assert state() is EndpointState.STUCK
    publisher.set_stats(2, EndpointStats(EndpointState.DOWN))
    assert state() is EndpointState.DOWN
    publisher.set_stats(2, EndpointStats(EndpointState.STALE))
    publisher.set_stuck(2, 0.0)
    assert (state(), table.stat(2, StatField.STUCK_SINCE)) == (EndpointState.STALE, 0.0)
