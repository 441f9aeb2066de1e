"""The endpoint table: slots that stay, slots that are given away again, whole rows."""

from __future__ import annotations

import dataclasses

import pytest

from shm.endpoints import (
    EndpointPublisher,
    EndpointRecord,
    EndpointState,
    EndpointStats,
    EndpointTable,
    EndpointTableFull,
)
from shm.inflight import InflightRow
from shm.layout import Header, StatField
from shm.marks import CooldownMarks
from shm.rows import WorkerSlot
from shm.segment import Segment
from tests.support.segments import Forked

NOW = 1000.0


def record(identifier: str, model: str = "m") -> EndpointRecord:
    return EndpointRecord(
        id=identifier, model=model, url=f"http://{identifier}", engine="sim", pool="p", served_model=model
    )


def slots(publisher: EndpointPublisher, *identifiers: str, now: float = NOW) -> dict[str, int]:
    return {each.id: each.slot for each in publisher.publish([record(i) for i in identifiers], now)}


def test_readers_take_up_a_new_table_at_their_next_look(segment: Segment):
    table, publisher = EndpointTable(segment), EndpointPublisher(segment)
    assert (table.generation, table.records) == (0, ())
    publisher.publish([record("a"), record("b", "other"), record("c")], NOW)
    old = table.records
    assert table.refresh_if_changed()
    assert not table.refresh_if_changed()
    assert old == ()
    assert {model: [each.id for each in group] for model, group in table.by_model.items()} == {
        "m": ["a", "c"],
        "other": ["b"],
    }
    assert table.by_id["b"].slot == 1


def test_an_endpoint_keeps_its_slot_whatever_comes_and_goes(segment: Segment):
    publisher = EndpointPublisher(segment)
    first = slots(publisher, "a", "b", "c")
    second = slots(publisher, "x", "c", "a")
    assert (second["a"], second["c"]) == (first["a"], first["c"])
    assert second["x"] not in first.values()


def test_a_new_publisher_goes_on_with_the_slots_of_a_dead_one(segment: Segment):
    first = slots(EndpointPublisher(segment), "a", "b", "c")
    second = slots(EndpointPublisher(segment), "z", "c", "b", "a")
    assert {name: second[name] for name in first} == first


def test_a_publisher_that_died_before_it_raised_the_generation_loses_no_slot(segment: Segment):
    first = slots(EndpointPublisher(segment), "a", "b")
    segment.cells_i64[Header.ENDPOINTS_GENERATION] = 0
    assert slots(EndpointPublisher(segment), "b", "a") == first


def test_a_left_slot_is_given_away_only_when_nothing_is_in_flight_or_marked(segment: Segment):
    publisher, slot = EndpointPublisher(segment), WorkerSlot.claim(segment)
    row, marks = InflightRow(segment, slot), CooldownMarks(segment, slot)
    assert slots(publisher, "a", "b") == {"a": 0, "b": 1}
    row.add(0)
    marks.set(1, NOW + 10)
    publisher.publish([], NOW)
    assert slots(publisher, "c") == {"c": 2}
    row.sub(0)
    assert slots(publisher, "c", "d") == {"c": 2, "d": 0}
    assert slots(publisher, "c", "d", "e", now=NOW + 11) == {"c": 2, "d": 0, "e": 1}
    slot.release()


def test_a_slot_is_not_left_and_given_away_in_one_publication(segment: Segment):
    publisher = EndpointPublisher(segment)
    slots(publisher, "a")
    assert slots(publisher, "b") == {"b": 1}
    assert slots(publisher, "c") == {"c": 0}


def test_a_reused_slot_starts_as_unknown(segment: Segment):
    publisher, table = EndpointPublisher(segment), EndpointTable(segment)
    slots(publisher, "a")
    publisher.set_stats(0, EndpointStats(state=EndpointState.DOWN, waiting=9, kv=0.5))
    publisher.publish([], NOW)
    assert slots(publisher, "b") == {"b": 0}
    assert table.stats(0) == EndpointStats()


def test_a_full_table_is_told_and_the_old_one_stays(segment: Segment):
    publisher, table = EndpointPublisher(segment), EndpointTable(segment)
    slots(publisher, *(f"e{number}" for number in range(8)))
    with pytest.raises(EndpointTableFull, match="'e8'"):
        slots(publisher, *(f"e{number}" for number in range(9)))
    table.refresh_if_changed()
    assert len(table.records) == len(publisher.records) == 8


@pytest.mark.parametrize("kv", [None, 0.0, 0.73])
def test_stats_come_back_as_they_were_set(segment: Segment, kv: float | None):
    stats = EndpointStats(EndpointState.STALE, 3.0, 4.0, kv, NOW, 2, 32768, 16, 9000, 1.5)
    EndpointPublisher(segment).set_stats(5, stats)
    table = EndpointTable(segment)
    assert table.stats(5) == stats
    assert table.stat(5, StatField.RUNNING) == 4.0
    for slots in ([4, 5], range(4, 6)):
        assert table.column(slots, StatField.WAITING) == [0.0, 3.0]
    assert table.column(range(5, 2, -2), StatField.WAITING) == [3.0, 0.0]


def test_only_down_draining_and_stuck_endpoints_are_unusable():
    assert [state.name for state in EndpointState if not state.is_usable] == [
        "DOWN",
        "DRAINING",
        "STUCK",
    ]


def test_keys_of_engines_do_not_show_when_a_record_is_printed():
    secret = EndpointRecord(
        id="a", model="m", url="u", engine="sim", pool="p", served_model="m", api_key="sk-secret"
    )
    assert "sk-secret" not in repr(secret)


def test_a_row_read_without_interruption_is_never_torn(segment: Segment):
    """Every field of a row is written with the same number; a torn row would show two."""

    def write() -> None:
        publisher = EndpointPublisher(segment)
        number = 0
        while True:
            number += 1
            publisher.set_stats(0, EndpointStats(EndpointState.READY, *[number] * 11))

    table = EndpointTable(segment)
    writer = Forked(write)
    try:
        torn_without_lock, seen = 0, set()
        while len(seen) < 50 or not torn_without_lock:
            torn_without_lock += table.stat(0, StatField.WAITING) != table.stat(0, StatField.DRAIN_RATE)
            stats = table.try_stats(0)
            if stats is not None and stats.state is EndpointState.READY:
                numbers = {getattr(stats, field.name) for field in dataclasses.fields(stats)[1:]}
                assert len(numbers) == 1, stats
                seen |= numbers
    finally:
        writer.kill()


def test_a_row_whose_writer_died_inside_it_is_read_all_the_same_and_repaired_by_the_next(segment: Segment):
    publisher, table = EndpointPublisher(segment), EndpointTable(segment)
    publisher.set_stats(0, EndpointStats(waiting=1))
    seq = segment.layout.stats_seq.start
    segment.cells_i64[seq] += 1
    assert table.stats(0).waiting == 1
    EndpointPublisher(segment).set_stats(0, EndpointStats(waiting=2))
    assert segment.cells_i64[seq] % 2 == 0
    assert table.stats(0).waiting == 2
