"""Reads the segment and the scrapers' reports into one picture, for the API and for /metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conf.compiled import IS_COMPILED
from conf.version import __version__
from coordinator.admin.views import EndpointView, LoadView, ProcessView, StatusView
from coordinator.core.judge import Report
from coordinator.load import LoadReader, bands
from coordinator.scrape import Scrapers
from shm.bands import BandCells
from shm.endpoints import EndpointRecord, EndpointState, EndpointTable
from shm.inflight import InflightSums
from shm.layout import FixedSlot, StatField
from shm.marks import CooldownMarks
from shm.rows import slots_in_use
from shm.segment import Segment

# A look at one takes about 25 us.
_ENDPOINTS_PER_TURN = 100


@dataclass(frozen=True, slots=True)
class Fleet:
    """The endpoints and processes of this instance, as they are now.

    Everything is read when asked for; long answers let other greenlets run in between (`pause`).
    """

    segment: Segment
    scrapers: Scrapers
    table: EndpointTable
    inflight: InflightSums
    marks: CooldownMarks
    reader: LoadReader
    clock: Callable[[], float]
    pause: Callable[[], None]
    started_at: float
    instance: str

    @classmethod
    def of(
        cls,
        segment: Segment,
        scrapers: Scrapers,
        *,
        clock: Callable[[], float],
        pause: Callable[[], None],
        instance: str,
    ) -> Fleet:
        """Look at `segment` through `scrapers`, from now on.

        Args:
            clock: monotonic seconds.
            pause: lets other greenlets run.
            instance: name of this host.
        """
        table, inflight, marks = EndpointTable(segment), InflightSums(segment), CooldownMarks(segment)
        return cls(
            segment=segment,
            scrapers=scrapers,
            table=table,
            inflight=inflight,
            marks=marks,
            reader=LoadReader(BandCells(segment), table, inflight, marks),
            clock=clock,
            pause=pause,
            started_at=clock(),
            instance=instance,
        )

    def endpoints(self) -> tuple[EndpointView, ...]:
        """Return every endpoint of the configuration, in its order."""
        now = self.clock()
        views = []
        for number, record in enumerate(self.scrapers.records):
            if number % _ENDPOINTS_PER_TURN == _ENDPOINTS_PER_TURN - 1:
                self.pause()
            views.append(self._endpoint(record, self.scrapers.report_of(record.id), now))
        return tuple(views)

    def status(self) -> StatusView:
        """Return the state of the instance as a whole."""
        endpoints = self.endpoints()
        states = [state.name.lower() for state in EndpointState]
        return StatusView(
            version=__version__,
            compiled=IS_COMPILED,
            instance=self.instance,
            phase=self.segment.phase.name.lower(),
            uptime_s=round(self.clock() - self.started_at, 3),
            config_generation=self.segment.config_generation,
            inflight=sum(view.inflight for view in endpoints),
            endpoints_by_state={state: sum(view.state == state for view in endpoints) for state in states},
            processes=self.processes(),
        )

    def load(self) -> LoadView:
        """Return who runs and who waits."""
        config = self.scrapers.config
        pools = self.reader.pools(config, self.scrapers.records, self.clock())
        return LoadView(instance=self.instance, bands=bands(config), pools=pools)

    def processes(self) -> tuple[ProcessView, ...]:
        """Return every process that has a slot."""
        now = self.clock()
        return tuple(
            ProcessView(
                kind=self._kind(slot.slot),
                slot=slot.slot,
                pid=slot.pid,
                state=slot.state.name.lower(),
                age_s=round(now - slot.started_s, 3),
                heartbeat_age_s=round(now - slot.heartbeat_s, 3),
            )
            for slot in slots_in_use(self.segment)
        )

    def _kind(self, slot: int) -> str:
        fixed = slot - self.segment.layout.sizes.worker_slots
        return "worker" if fixed < 0 else FixedSlot(fixed).name.lower()

    def _endpoint(self, record: EndpointRecord, report: Report | None, now: float) -> EndpointView:
        stats = self.table.stats(record.slot)
        was_read = stats.scraped_at > 0
        stuck_since = self.table.stat(record.slot, StatField.STUCK_SINCE)
        return EndpointView(
            id=record.id,
            model=record.model,
            served_model=record.served_model,
            engine=record.engine,
            pool=record.pool,
            url=record.url,
            weight=record.weight,
            state=stats.state.name.lower(),
            reason="" if report is None else report.reason,
            state_age_s=0.0 if report is None else round(now - report.since, 3),
            is_usable=stats.state.is_usable,
            inflight=self.inflight.of(record.slot),
            waiting=int(stats.waiting) if was_read else None,
            running=int(stats.running) if was_read else None,
            kv_usage_ratio=stats.kv if was_read else None,
            has_stale_metrics=record.probe and (report is None or not report.has_fresh_metrics),
            scrape_age_s=round(now - stats.scraped_at, 3) if was_read else None,
            failures=stats.failures,
            stuck_s=round(now - stuck_since, 3) if stuck_since else 0.0,
            cooldown_s=round(max(0.0, self.marks.until(record.slot) - now), 3),
            max_context=stats.max_context,
            block_size=stats.block_size,
            num_blocks=stats.num_blocks,
            violations=() if report is None else tuple(map(str, report.violations)),
            violated_fields=()
            if report is None
            else tuple(dict.fromkeys(each.field for each in report.violations)),
        )
