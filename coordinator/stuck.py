"""Watches for stuck endpoints and takes them out of the choice: shell of coordinator.core.watchdog."""

from __future__ import annotations

import logging
from collections.abc import Callable

import gevent

from coordinator.core.watchdog import Change, Flag, Progress, Watchdog
from coordinator.scrape import Scrapers
from shm.endpoints import EndpointRecord, EndpointTable
from shm.layout import StatField
from shm.progress import ProgressCells
from shm.segment import Segment

LOG = logging.getLogger(__name__)

TURN_S = 0.25


class StuckWatch:
    """Looks at the progress of requests at all endpoints of this instance."""

    def __init__(self, segment: Segment, scrapers: Scrapers, *, clock: Callable[[], float]) -> None:
        """Watch the endpoints of `scrapers`.

        Args:
            clock: monotonic seconds, as workers write them.
        """
        self._scrapers = scrapers
        self._clock = clock
        self._cells = ProgressCells(segment)
        self._table = EndpointTable(segment)
        self._watchdog = Watchdog()

    def run(self) -> None:
        """Look, pause, look; for ever."""
        while True:
            self.look()
            gevent.sleep(TURN_S)

    def look(self) -> None:
        """Look once: set flags, take them back, and tell what has changed."""
        now = self._clock()
        pools = self._scrapers.config.pools
        renewed = self._scrapers.take_renewed()
        limits = {name: pool.stuck_after for name, pool in pools.items()}
        records = {record.slot: record for record in self._scrapers.records}
        changes = self._watchdog.look(
            {
                slot: Progress(
                    self._cells.silent_since(slot),
                    self._cells.moved_at(slot),
                    limits.get(record.pool, 0.0),
                    slot in renewed,
                )
                for slot, record in records.items()
            },
            now,
        )
        for slot in records:
            since = self._watchdog.stuck.get(slot, 0.0)
            if self._table.stat(slot, StatField.STUCK_SINCE) != since:
                self._scrapers.publisher.set_stuck(slot, since)
        for change in changes:
            _log(records[change.endpoint], change)


def _log(record: EndpointRecord, change: Change) -> None:
    is_stuck = change.flag is Flag.STUCK
    LOG.log(
        logging.WARNING if is_stuck else logging.INFO,
        "endpoint_stuck" if is_stuck else "endpoint_not_stuck",
        extra={
            "replica": record.id,
            "model": record.model,
            "pool": record.pool,
            "finding": change.finding.value,
            "silent_s": round(change.silent_s, 3),
        },
    )
