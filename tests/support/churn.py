"""Registers and deregisters 500 endpoints, 50 at a time, and counts greenlets before and after.

Run as a program, since gevent patches what it lives in: `python -m tests.support.churn SEGMENT URL`.
"""

from gevent import monkey

monkey.patch_all()

import gc  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import gevent  # noqa: E402

from conf.schema import Endpoint, Router  # noqa: E402
from coordinator.scrape import Scrapers  # noqa: E402
from shm.layout import FixedSlot, Sizes  # noqa: E402
from shm.metrics import MetricsRow  # noqa: E402
from shm.rows import WorkerSlot  # noqa: E402
from shm.segment import Segment  # noqa: E402
from tests.support.coordinator import config_of  # noqa: E402


def living_greenlets() -> int:
    gc.collect()
    return sum(isinstance(each, gevent.Greenlet) and not each.dead for each in gc.get_objects())


def main(directory: Path, url: str) -> None:
    segment = Segment.create(directory, Sizes())
    metrics = MetricsRow(segment, WorkerSlot.claim_fixed(segment, FixedSlot.COORDINATOR))
    scrapers = Scrapers(
        segment, metrics, clock=time.monotonic, rng=random.Random(1), on_failure=lambda name: sys.exit(name)
    )
    quick = Router(scrape_interval=0.05)
    before = living_greenlets()
    for turn in range(10):
        names = [f"turn{turn}-{number}" for number in range(50)]
        endpoints = [Endpoint(id=name, model="chat-model", url=url) for name in names]
        scrapers.apply(config_of(endpoints, router=quick))
        while any((scrapers.report_of(name) or sys.exit(name)).scraped_at == 0 for name in names):
            gevent.sleep(0.01)
        scrapers.apply(config_of([], router=quick))
    print(f"greenlets {before} -> {living_greenlets()}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
