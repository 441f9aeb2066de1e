"""Looks at every endpoint in turn and publishes what it sees.

Rules:
    - One greenlet and one connection per endpoint; both end when the endpoint leaves the configuration (B93).
    - A stuck engine delays nobody else. Looks are spread over the interval, so that they come in no bursts.
    - What is known of an endpoint survives changes that do not touch the engine behind it, and restarts of
      the coordinator: its state is read back from the segment.
    - A change is logged once, when it happens; everything after is counted.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import gevent
from gevent.event import Event

from agent.core.contract import MappingError, MetricMapping, mapping_for
from conf.schema import Config, Endpoint
from coordinator.core.capacity import LearnedCapacity
from coordinator.core.health import Health
from coordinator.core.judge import EndpointJudge, Notice, Report, Told
from coordinator.core.look import Failure, Look
from coordinator.greenlets import Greenlets
from coordinator.probe import Probe, TlsContexts
from shm.definitions import CONTRACT_VIOLATIONS, SCRAPES
from shm.endpoints import EndpointPublisher, EndpointRecord, EndpointState, EndpointStats, EndpointTable
from shm.layout import StatField
from shm.metrics import MetricsRow
from shm.segment import Segment

LOG = logging.getLogger(__name__)

# Deadline of one answer. An engine whose HTTP server needs longer for /health serves nobody well.
ANSWER_TIMEOUT_S = 2.0
# Time between the first looks at two endpoints.
_STAGGER_S = 0.002
_JITTER = 0.1
_SHORTEST_PAUSE_S = 0.01
# When somebody waits: the pause before the next look, and the same as a multiple of what a look takes, so
# that an engine with slow metrics has little of it.
_HURRIED_PAUSE_S = 0.1
_HURRIED_SHARE = 10.0

_STATES = {
    Health.UNKNOWN: EndpointState.UNKNOWN,
    Health.READY: EndpointState.READY,
    Health.STALE: EndpointState.STALE,
    Health.DOWN: EndpointState.DOWN,
}
_HEALTHS = {state: health for health, state in _STATES.items()}


@dataclass(frozen=True, slots=True)
class Watch:
    """How an endpoint is looked at; another value means another scraper.

    Attributes:
        record: the endpoint.
        interval_s: seconds between two looks.
        mapping: where its metrics say what.
    """

    record: EndpointRecord
    interval_s: float
    mapping: MetricMapping

    def is_same_engine(self, other: Watch) -> bool:
        """Whether what is known through one holds for the other."""
        mine, theirs = self.record, other.record
        return (mine.url, mine.engine, mine.served_model) == (theirs.url, theirs.engine, theirs.served_model)


class Scraper:
    """Looks at one endpoint until it is killed."""

    def __init__(
        self,
        watch: Watch,
        *,
        probe: Probe,
        state: Health,
        on_report: Callable[[EndpointRecord, Report], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Prepare; nothing is asked before `run`.

        Args:
            state: what is known of the endpoint.
            on_report: gets every report; must not block.
        """
        self.watch = watch
        self._probe = probe
        self._on_report = on_report
        self._clock = clock
        self._rng = rng
        self._has_failed = False
        self._hurry = Event()
        self._judge = EndpointJudge(
            engine=watch.record.engine,
            served_model=watch.record.served_model,
            mapping=watch.mapping,
            now=clock(),
            state=state,
        )

    def hurry(self) -> None:
        """Have it look again soon: somebody waits for what it sees. Never blocks."""
        self._hurry.set()

    @property
    def report(self) -> Report:
        """What is known of the endpoint."""
        return self._judge.report

    def run(self, first_pause_s: float) -> None:
        """Look, pause, look; for ever. The connection is closed at the end, however that comes."""
        try:
            gevent.sleep(first_pause_s)
            while True:
                began = self._clock()
                self._look_guarded()
                ended = self._clock()
                interval = self.watch.interval_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
                pause_s = max(_SHORTEST_PAUSE_S, began + interval - ended)
                soonest_s = max(_HURRIED_PAUSE_S, _HURRIED_SHARE * (ended - began))
                self._hurry.clear()
                if soonest_s < pause_s:
                    gevent.sleep(soonest_s)
                    self._hurry.wait(pause_s - soonest_s)
                else:
                    gevent.sleep(pause_s)
        finally:
            self._probe.close()

    def look(self) -> Report:
        """Look once and hand on what was seen."""
        report = self._look()
        if report.is_restarted:
            # Once: two engines behind one address would have us ask without end.
            self._on_report(self.watch.record, report)
            report = self._look()
        self._on_report(self.watch.record, report)
        return report

    def _look_guarded(self) -> None:
        try:
            self.look()
            self._has_failed = False
        except Exception:
            # NOTE: one endpoint's oddity must not end the greenlet, let alone the process.
            if not self._has_failed:
                LOG.exception("scrape_failed", extra={"replica": self.watch.record.id})
            self._has_failed = True

    def _look(self) -> Report:
        health = self._probe.ask("/health")
        if isinstance(health, Failure) or health.status >= 500:
            return self._judge.take(Look(health), self._clock())
        models = self._probe.ask("/v1/models") if self._judge.wants_models(self._clock()) else None
        metrics = None if isinstance(models, Failure) else self._probe.ask("/metrics")
        return self._judge.take(Look(health, models, metrics), self._clock())


class Scrapers:
    """All scrapers of this process, and the endpoint table they write.

    Attributes:
        config: the one whose endpoints are in force.
    """

    def __init__(
        self,
        segment: Segment,
        metrics: MetricsRow,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_failure: Callable[[str], None],
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Go on from the published table, if there is one.

        Args:
            segment: attached; its endpoint table is ours to write.
            metrics: this process's row.
            clock: monotonic seconds.
            rng: spreads looks.
            on_failure: called with a greenlet's name if one ends by itself.
            answer_timeout_s: deadline of one answer.
        """
        self.config = Config()
        self._publisher = EndpointPublisher(segment)
        self._table = EndpointTable(segment)
        self._clock = clock
        self._rng = rng
        self._answer_timeout_s = answer_timeout_s
        self._contexts = TlsContexts()
        self._greenlets = Greenlets(on_failure)
        self._scrapers: dict[str, Scraper] = {}
        self._capacities: dict[str, LearnedCapacity] = {}
        self._renewed: set[int] = set()
        self._looks = {outcome: metrics.counter(SCRAPES, (outcome,)) for outcome in ("ok", "failed")}
        self._metrics = metrics

    def __len__(self) -> int:
        return len(self._scrapers)

    @property
    def records(self) -> tuple[EndpointRecord, ...]:
        """The endpoints in force, with their slots."""
        return self._publisher.records

    def report_of(self, endpoint: str) -> Report | None:
        """Return what is known of an endpoint; None if there is no such one."""
        scraper = self._scrapers.get(endpoint)
        return None if scraper is None else scraper.report

    def hurry(self, endpoints: Iterable[str]) -> None:
        """Have these looked at soon; see `Scraper.hurry`."""
        for name in endpoints:
            if scraper := self._scrapers.get(name):
                scraper.hurry()

    def take_renewed(self) -> set[int]:
        """Return the slots of engines that were restarted since the last call."""
        renewed, self._renewed = self._renewed, set()
        return renewed

    @property
    def publisher(self) -> EndpointPublisher:
        """Who writes the endpoint table of this instance."""
        return self._publisher

    def apply(self, config: Config, caps: Mapping[str, int] | None = None) -> None:
        """Publish the endpoints of a configuration, end the scrapers of those that left, start new ones.

        Args:
            caps: this instance's shares of hard caps; None: it is alone, and the caps are its own.

        Switches greenlets while it waits for the end of scrapers.

        Raises:
            EndpointTableFull: more endpoints than slots; everything stays as it was.
        """
        known = {record.id for record in self._publisher.records}
        records = self._publisher.publish(
            map(_record, config.endpoints), self._clock(), _caps(config) if caps is None else caps
        )
        self.config = config
        mappings = _mappings(config)
        watches = {
            record.id: Watch(record, config.router.scrape_interval, mappings[record.engine])
            for record in records
            if record.probe
        }
        for record in records:
            if not record.probe:
                self._publisher.set_stats(record.slot, EndpointStats())
        old = self._scrapers
        kept = {name: scraper for name, scraper in old.items() if watches.get(name) == scraper.watch}
        self._greenlets.stop(name for name in old if name not in kept)
        self._contexts.clear()
        self._scrapers = {}
        self._capacities = {name: known for name, known in self._capacities.items() if name in watches}
        started = 0
        for name, watch in watches.items():
            scraper = kept.get(name)
            if scraper is None:
                scraper = self._start(watch, old.get(name), is_known=name in known, number=started)
                started += 1
            self._scrapers[name] = scraper

    def stop(self) -> None:
        """End every scraper. What is published stays."""
        self._greenlets.stop()
        self._scrapers = {}

    def _start(self, watch: Watch, old: Scraper | None, *, is_known: bool, number: int) -> Scraper:
        state = Health.UNKNOWN
        if old is not None:
            if old.watch.is_same_engine(watch):
                state = old.report.health
            else:
                self._publisher.set_stats(watch.record.slot, EndpointStats())
                self._capacities.pop(watch.record.id, None)
        elif is_known:  # by an earlier coordinator
            state = _HEALTHS.get(self._table.stats(watch.record.slot).state, Health.UNKNOWN)
        scraper = Scraper(
            watch,
            probe=Probe(watch.record, timeout_s=self._answer_timeout_s, contexts=self._contexts),
            state=state,
            on_report=self._take,
            clock=self._clock,
            rng=self._rng,
        )
        pause = self._rng.uniform(0, min(watch.interval_s, number * _STAGGER_S))
        self._greenlets.spawn(watch.record.id, lambda: scraper.run(pause))
        return scraper

    def _learn(self, record: EndpointRecord, report: Report) -> LearnedCapacity:
        known = self._capacities.get(record.id)
        if known is None:
            known = self._capacities[record.id] = LearnedCapacity(
                int(self._table.stat(record.slot, StatField.BATCH_CAPACITY)),
                self._table.stat(record.slot, StatField.KV_PER_REQUEST),
            )
        if report.is_restarted:
            self._renewed.add(record.slot)
            known.forget()
        stats = report.stats
        known.see(
            running=stats.running or 0.0, waiting=stats.waiting or 0.0, kv=stats.kv_usage, now=self._clock()
        )
        return known

    def _take(self, record: EndpointRecord, report: Report) -> None:
        stats = report.stats
        capacity = self._learn(record, report)
        self._publisher.set_stats(
            record.slot,
            EndpointStats(
                state=_STATES[report.health],
                waiting=stats.waiting or 0,
                running=stats.running or 0,
                kv=stats.kv_usage,
                scraped_at=report.scraped_at,
                failures=report.failures,
                max_context=report.max_context or stats.max_context or 0,
                block_size=stats.block_size or 0,
                num_blocks=stats.num_blocks or 0,
                batch_capacity=capacity.batch,
                kv_per_request=capacity.kv_per_request,
            ),
        )
        self._looks["ok" if report.has_fresh_metrics else "failed"].inc()
        for violation in report.violations:
            self._metrics.counter(CONTRACT_VIOLATIONS, (violation.field,)).inc()
        for notice in report.notices:
            _log(record, report, notice)


def _log(record: EndpointRecord, report: Report, notice: Notice) -> None:
    level = logging.WARNING if notice.is_degraded else logging.INFO
    facts: dict[str, object] = {"replica": record.id, "model": record.model}
    if notice.told is Told.STATE:
        facts |= {"state": report.health.value, "before": report.before.value, "reason": report.reason}
    else:
        facts |= {"engine": record.engine, "detail": notice.detail}
    LOG.log(level, notice.told.value, extra=facts)


def _record(endpoint: Endpoint) -> EndpointRecord:
    tls = endpoint.tls
    return EndpointRecord(
        id=endpoint.id,
        model=endpoint.model,
        url=endpoint.url,
        engine=endpoint.engine,
        pool=endpoint.pool,
        served_model=endpoint.served_model or endpoint.model,
        api_key=endpoint.api_key,
        tls_ca=None if tls is None else tls.ca,
        tls_verify=tls is None or tls.verify,
        weight=endpoint.weight,
        batch_capacity=endpoint.batch_capacity or 0,
        probe=endpoint.probe,
    )


def _caps(config: Config) -> dict[str, int]:
    return {
        name: pool.max_concurrent for name, pool in config.pools.items() if pool.max_concurrent is not None
    }


def _mappings(config: Config) -> dict[str, MetricMapping]:
    """Return the mapping of every engine in use; one that cannot be read is told and left out."""
    mappings: dict[str, MetricMapping] = {}
    for engine in {endpoint.engine for endpoint in config.endpoints}:
        try:
            mappings[engine] = mapping_for(engine, config.router.metrics)
        except MappingError as exc:
            LOG.error("metric_mapping_refused", extra={"engine": engine, "detail": str(exc)})
            mappings[engine] = mapping_for(engine)
    return mappings
