"""The text of /metrics, against Prometheus' own parser, and the pages made from definitions."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conf.schema import Endpoint
from coordinator.admin import reference
from coordinator.admin.exposition import Exposition
from coordinator.admin.gauges import GAUGES
from coordinator.fleet import Fleet
from coordinator.scrape import Scrapers
from shm.definitions import DEFINITIONS, REQUEST_DURATION, REQUESTS, UNMATCHED
from shm.layout import FixedSlot
from shm.metrics import MetricsRow
from shm.rows import WorkerSlot
from shm.segment import Segment
from tests.support.coordinator import config_of
from tests.support.segments import made_segment

ROOT = Path(__file__).parents[3]


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with made_segment(tmp_path / "segment") as made:
        yield made


class Page:
    """An exposition of a segment with one endpoint that nobody looks at, and rows of workers."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        own = MetricsRow(segment, WorkerSlot.claim_fixed(segment, FixedSlot.COORDINATOR))
        self.scrapers = Scrapers(
            segment, own, clock=time.monotonic, rng=random.Random(1), on_failure=lambda name: None
        )
        self.scrapers.apply(config_of([Endpoint(id="e1", model="m", url="http://127.0.0.1:1")]))
        self.pauses = 0
        self._exposition = Exposition(
            Fleet.of(segment, self.scrapers, clock=time.monotonic, pause=self._pause, instance="test")
        )

    def _pause(self) -> None:
        self.pauses += 1

    def worker(self) -> MetricsRow:
        return MetricsRow(self.segment, WorkerSlot.claim(self.segment))

    def text(self) -> str:
        return self._exposition.page().decode()

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, frozenset(labels.items())))


@pytest.fixture
def page(segment: Segment) -> Iterator[Page]:
    made = Page(segment)
    yield made
    made.scrapers.stop()


def test_every_defined_metric_is_there_with_its_kind_before_the_first_event(page: Page) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(page.text())}
    for definition in (*DEFINITIONS, *GAUGES):
        assert kinds[definition.name.removesuffix("_total")] == definition.kind.value


def test_every_metric_has_one_help_and_one_type_line(page: Page) -> None:
    lines = page.text().splitlines()
    for kind in ("# HELP ", "# TYPE "):
        names = [line.split(" ", 3)[2] for line in lines if line.startswith(kind)]
        assert len(names) == len(set(names))


def test_counters_of_all_workers_are_summed(page: Page) -> None:
    labels = ("m", "default", "200")
    page.worker().counter(REQUESTS, labels).inc(2)
    page.worker().counter(REQUESTS, labels).inc(3)
    assert page.value("llmgw_requests_total", model="m", pool="default", status="200") == 5


def test_buckets_of_a_histogram_are_cumulative_and_end_with_its_count(page: Page) -> None:
    for row, seconds in ((page.worker(), (0.001, 0.3)), (page.worker(), (0.3, 10_000.0))):
        for each in seconds:
            row.histogram(REQUEST_DURATION, ("m", "default")).observe(each)
    labels = {"model": "m", "pool": "default"}
    buckets = [
        page.value("llmgw_request_duration_seconds_bucket", le=le, **labels)
        for le in ("0.005", "0.25", "0.5", "3600.0", "+Inf")
    ]
    assert buckets == [1, 1, 3, 3, 4]
    assert page.value("llmgw_request_duration_seconds_count", **labels) == 4
    assert page.value("llmgw_request_duration_seconds_sum", **labels) == pytest.approx(10_000.601)


@pytest.mark.parametrize("model", ['quo"te', "back\\slash", "new\nline", "}", 'a="b",', "ünï"])
def test_label_values_are_escaped(page: Page, model: str) -> None:
    page.worker().counter(REQUESTS, (model, "default", "200")).inc()
    assert page.value("llmgw_requests_total", model=model, pool="default", status="200") == 1


def test_kept_names_follow_new_series_and_new_values(page: Page) -> None:
    row = page.worker()
    counter = row.counter(REQUESTS, ("m", "default", "200"))
    counter.inc()
    page.text()
    counter.inc()
    row.counter(REQUESTS, (UNMATCHED, "default", "404")).inc()
    assert page.value("llmgw_requests_total", model="m", pool="default", status="200") == 2
    assert page.value("llmgw_requests_total", model=UNMATCHED, pool="default", status="404") == 1


def test_series_of_an_endpoint_end_with_it(page: Page) -> None:
    assert page.value("llmgw_endpoint_metrics_stale", replica="e1") == 1
    page.scrapers.apply(config_of([]))
    assert 'replica="' not in page.text()


def test_endpoint_nobody_looked_at_is_up_and_its_figures_are_absent(page: Page) -> None:
    assert page.value("llmgw_endpoint_up", replica="e1") == 1
    assert page.value("llmgw_endpoint_waiting", replica="e1") is None
    assert page.value("llmgw_replicas", model="m", state="unknown") == 1
    assert page.value("llmgw_replicas", model="m", state="ready") == 0


def test_own_cost_of_the_coordinator_is_there(page: Page) -> None:
    assert page.value("process_resident_memory_bytes")


def test_others_run_between_two_metrics(page: Page) -> None:
    page.text()
    assert page.pauses >= len(DEFINITIONS) + len(GAUGES)


def test_metrics_page_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference.render(), "run `make docs`"
