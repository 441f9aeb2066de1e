"""Metric cells: series that stay, sums over rows, a row that fills up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.definitions import (
    BY_NAME,
    CLIENT_GONE,
    CONNECTIONS,
    DEFINITIONS,
    DURATION_BUCKETS,
    OTHER,
    REQUESTS,
    TTFT,
    TTFT_BUCKETS,
    Definition,
    Kind,
)
from shm.layout import Sizes
from shm.metrics import MetricsReader, MetricsRow, Sample, read_all
from shm.rows import WorkerSlot
from shm.segment import Segment
from tests.support.segments import made_segment


@pytest.fixture
def slots(segment: Segment) -> Iterator[list[WorkerSlot]]:
    claimed = [WorkerSlot.claim(segment) for _ in range(2)]
    yield claimed
    for slot in claimed:
        slot.release()


def only(segment: Segment, definition: Definition) -> Sample:
    (sample,) = (each for each in read_all(segment) if each.definition is definition)
    return sample


def test_counters_of_all_rows_are_summed(segment: Segment, slots: list[WorkerSlot]):
    for slot, amount in zip(slots, (2, 40), strict=True):
        MetricsRow(segment, slot).counter(REQUESTS, ("m", "p", "200")).inc(amount)
    MetricsRow(segment, slots[0]).counter(REQUESTS, ("m", "p", "500")).inc()
    values = {sample.labels: sample.value for sample in read_all(segment)}
    assert values == {("m", "p", "200"): 42, ("m", "p", "500"): 1}


def test_the_same_labels_are_the_same_series(segment: Segment, slots: list[WorkerSlot]):
    row = MetricsRow(segment, slots[0])
    row.counter(REQUESTS, ("m", "p", "200")).inc()
    row.counter(REQUESTS, ("m", "p", "200")).inc()
    MetricsRow(segment, slots[0]).counter(REQUESTS, ("m", "p", "200")).inc()
    assert only(segment, REQUESTS).value == 3


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (120.0, 21), (120.1, 22), (1e9, 22)]
)
def test_an_observation_counts_in_the_first_bucket_whose_bound_it_does_not_pass(
    segment: Segment, slots: list[WorkerSlot], value: float, bucket: int
):
    MetricsRow(segment, slots[0]).histogram(TTFT, ("m", "p")).observe(value)
    sample = only(segment, TTFT)
    assert [number for number, count in enumerate(sample.buckets) if count] == [bucket]
    assert (sample.count, sample.value) == (1, value)


def test_histograms_of_all_rows_are_summed_bucket_by_bucket(segment: Segment, slots: list[WorkerSlot]):
    for slot in slots:
        histogram = MetricsRow(segment, slot).histogram(TTFT, ("m", "p"))
        histogram.observe(0.3)
        histogram.observe(200.0)
    sample = only(segment, TTFT)
    assert (sample.count, sample.value, sample.buckets[10], sample.buckets[-1]) == (4, 400.6, 2, 2)


def test_gauges_of_all_rows_are_summed(segment: Segment, slots: list[WorkerSlot]):
    gauges = [MetricsRow(segment, slot).gauge(CONNECTIONS) for slot in slots]
    gauges[0].set(5)
    gauges[1].add(3)
    gauges[1].add(-1)
    assert only(segment, CONNECTIONS).value == 7


def test_a_reader_finds_series_that_came_after_it(segment: Segment, slots: list[WorkerSlot]):
    reader, row = MetricsReader(segment), MetricsRow(segment, slots[0])
    assert reader.read() == []
    row.counter(REQUESTS, ("m", "p", "200")).inc()
    assert [sample.value for sample in reader.read()] == [1]
    row.counter(CLIENT_GONE, ("m", "queued")).inc()
    MetricsRow(segment, slots[1]).counter(REQUESTS, ("m", "p", "200")).inc()
    assert [(sample.definition, sample.value) for sample in reader.read()] == [
        (REQUESTS, 2),
        (CLIENT_GONE, 1),
    ]


def test_a_series_that_was_not_finished_is_never_seen(segment: Segment, slots: list[WorkerSlot]):
    row = MetricsRow(segment, slots[0])
    row.counter(REQUESTS, ("m", "p", "200")).inc()
    start = segment.layout.metrics_row(0).start
    used = segment.cells_i64[start]
    row.counter(REQUESTS, ("m", "p", "404")).inc(7)
    segment.cells_i64[start] = used  # as if killed just before the series became visible
    assert [sample.labels for sample in read_all(segment)] == [("m", "p", "200")]
    MetricsRow(segment, slots[0]).counter(REQUESTS, ("m", "p", "503")).inc()
    assert [sample.value for sample in read_all(segment)] == [1, 1]


@pytest.mark.parametrize(
    ("definition", "labels"), [(REQUESTS, ("m",)), (REQUESTS, ()), (TTFT, ("m", "p")), (CONNECTIONS, ())]
)
def test_a_series_of_another_shape_than_defined_is_refused(
    segment: Segment, slots: list[WorkerSlot], definition: Definition, labels: tuple[str, ...]
):
    with pytest.raises(ValueError, match=definition.name):
        MetricsRow(segment, slots[0]).counter(definition, labels)


@pytest.mark.parametrize("label", ["", "größe", "a\0b", "x" * 500, "\ud800"])
def test_any_label_value_keeps_its_place(segment: Segment, slots: list[WorkerSlot], label: str):
    MetricsRow(segment, slots[0]).counter(REQUESTS, (label, "p", "200")).inc()
    sample = only(segment, REQUESTS)
    assert sample.labels == (label.replace("\0", "?").replace("\ud800", "?"), "p", "200")


def test_a_series_of_a_build_with_other_buckets_is_left_out(segment: Segment, slots: list[WorkerSlot]):
    other = Definition(TTFT.name, Kind.HISTOGRAM, TTFT.help, TTFT.labels, (1.0, 2.0))
    MetricsRow(segment, slots[0]).histogram(other, ("m", "p")).observe(1.5)
    row = MetricsRow(segment, slots[0])
    row.histogram(TTFT, ("m", "p")).observe(1.5)
    assert only(segment, TTFT).count == 1


def test_a_full_row_folds_new_series_and_loses_no_count(tmp_path: Path):
    with made_segment(tmp_path / "s", Sizes(worker_slots=1, endpoint_slots=1, metric_cells=1024)) as segment:
        slot = WorkerSlot.claim(segment)
        row = MetricsRow(segment, slot)
        for number in range(500):
            row.counter(REQUESTS, (f"model-{number}", "p", "200")).inc()
        samples = read_all(segment)
        assert sum(sample.value for sample in samples) == 500
        folded = {sample.labels: sample.value for sample in samples}[OTHER, OTHER, OTHER]
        assert folded == 500 - (len(samples) - 1)
        # The room kept back: every other metric still has a series, whatever its labels.
        for definition in DEFINITIONS:
            labels = tuple("new" for _ in definition.labels)
            {Kind.COUNTER: row.counter, Kind.GAUGE: row.gauge, Kind.HISTOGRAM: row.histogram}[
                definition.kind
            ](definition, labels)
        slot.release()


def test_a_row_too_small_for_the_definitions_is_told(tmp_path: Path):
    with made_segment(tmp_path / "s", Sizes(worker_slots=1, endpoint_slots=1, metric_cells=16)) as segment:
        slot = WorkerSlot.claim(segment)
        with pytest.raises(ValueError, match="too small"):
            MetricsRow(segment, slot).histogram(TTFT, ("m", "p"))
        slot.release()


def test_definitions_are_as_prometheus_wants_them():
    assert len(BY_NAME) == len(DEFINITIONS)
    for definition in DEFINITIONS:
        assert definition.name.startswith("llmgw_")
        assert definition.name.endswith("_total") == (definition.kind is Kind.COUNTER)
        assert bool(definition.buckets) == (definition.kind is Kind.HISTOGRAM)
        assert list(definition.buckets) == sorted(set(definition.buckets))
        assert definition.help.endswith(".")


def test_buckets_cover_a_warm_first_token_and_an_hour_long_request():
    assert (TTFT_BUCKETS[0], TTFT_BUCKETS[-1]) == (0.001, 120.0)
    assert (DURATION_BUCKETS[0], DURATION_BUCKETS[-1]) == (0.005, 3600.0)
