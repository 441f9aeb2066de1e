"""What calls into shared memory cost that run on every request; prints figure and budget, fails above it.

python -m bench.micro_shm
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.calls import Call, report
from shm.definitions import REQUESTS, TTFT
from shm.endpoints import EndpointPublisher, EndpointStats, EndpointTable
from shm.inflight import InflightRow, InflightSums
from shm.layout import Sizes, StatField
from shm.marks import CooldownMarks
from shm.metrics import MetricsReader, MetricsRow
from shm.rows import WorkerSlot, reap_dead
from shm.segment import Segment

ENDPOINTS = 16


def main() -> int:
    """Measure all calls; return 1 if one is over its budget."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="llmgw-bench-") as folder:
        segment = Segment.create(Path(folder, "segment"), Sizes(worker_slots=8))
        try:
            return 0 if report(_calls(segment)) else 1
        finally:
            segment.close()


def _calls(segment: Segment) -> list[Call]:
    slots = [WorkerSlot.claim(segment) for _ in range(8)]
    row, sums, marks = InflightRow(segment, slots[3]), InflightSums(segment), CooldownMarks(segment, slots[3])
    publisher, table = EndpointPublisher(segment), EndpointTable(segment)
    stats = EndpointStats(waiting=1.0, running=2.0, kv=0.5)
    rows = [MetricsRow(segment, slot) for slot in slots]
    for number in range(50):
        for each in rows:
            each.counter(REQUESTS, (f"model-{number}", "default", "200")).inc()
            each.histogram(TTFT, (f"model-{number}", "default")).observe(0.2)
    counter = rows[0].counter(REQUESTS, ("model-7", "default", "200"))
    histogram = rows[0].histogram(TTFT, ("model-7", "default"))
    reader = MetricsReader(segment)
    scattered, adjacent = list(range(0, ENDPOINTS * 3, 3)), range(ENDPOINTS)

    def add_sub() -> None:
        row.add(5)
        row.sub(5)

    return [
        Call("in-flight add + sub", add_sub, 0.8),
        Call("in-flight sums, 16 endpoints x 8 workers", lambda: sums.many(scattered), 10.0),
        Call("  of adjacent slots", lambda: sums.many(adjacent), 10.0),
        Call("latest marks, 16 endpoints x 8 workers", lambda: marks.many(scattered), 10.0),
        Call("  of adjacent slots", lambda: marks.many(adjacent), 10.0),
        Call("stats column, 16 endpoints", lambda: table.column(scattered, StatField.KV), 5.0),
        Call("  of adjacent slots", lambda: table.column(adjacent, StatField.KV), 5.0),
        Call("endpoint table unchanged?", table.refresh_if_changed, 0.5),
        Call("counter inc", counter.inc, 0.5),
        Call("histogram observe", lambda: histogram.observe(0.2), 1.0),
        Call("heartbeat", lambda: slots[0].heartbeat(12.5), 1.0),
        Call("coordinator: set_stats", lambda: publisher.set_stats(3, stats), 10.0),
        Call("coordinator: reap, 8 living workers", lambda: reap_dead(segment), 100.0),
        Call("scrape: 100 series x 8 rows", reader.read, 2_000.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
