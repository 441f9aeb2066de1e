"""What a worker knows when it routes: the configuration and the endpoint table, joined.

A `Routing` is one immutable snapshot of the two; a reload or a new endpoint table
makes another. How endpoints are doing is read from the segment at each decision.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from conf.schema import Config, Timeouts
from gateway.core.admission import LaneSettings, lane_settings
from gateway.core.schedule.pipeline import Choice, Fleet, Pipeline, Request
from gateway.core.schedule.registry import build_pipeline
from shm.bands import BandCells, LaneEndpoints, as_range
from shm.endpoints import EndpointRecord, EndpointState, EndpointTable
from shm.inflight import InflightSums
from shm.layout import StatField
from shm.marks import CooldownMarks


@dataclass(frozen=True, slots=True)
class EndpointSignals:
    """Where the live figures of endpoints are read."""

    table: EndpointTable
    inflight: InflightSums
    marks: CooldownMarks
    bands: BandCells


class Lane:
    """One model in one pool: where it is served there, who may run, and how an endpoint is chosen.

    Attributes:
        number: of the lane, and `pool_slot` of its pool, in the shared segment.
        pool: name of the pool.
        of_pool: numbers of all lanes of the pool.
        records: its endpoints; a `Choice.index` points into them.
        settings: what the operator says of its admission.
        endpoints: the live figures that admission looks at.
    """

    __slots__ = (
        "_ids",
        "_pipeline",
        "_signals",
        "_slots",
        "_weights",
        "endpoints",
        "number",
        "of_pool",
        "pool",
        "pool_slot",
        "records",
        "settings",
    )

    def __init__(
        self,
        records: tuple[EndpointRecord, ...],
        pipeline: Pipeline,
        signals: EndpointSignals,
        settings: LaneSettings,
        of_pool: tuple[int, ...],
    ) -> None:
        first = records[0]
        self.number, self.pool_slot, self.pool = first.lane, first.pool_slot, first.pool
        self.of_pool = of_pool
        self.records = records
        self.settings = settings
        self.endpoints = LaneEndpoints(records, signals.table, signals.inflight, signals.marks)
        self._pipeline = pipeline
        self._signals = signals
        self._slots = as_range([record.slot for record in records])
        self._ids = [record.id for record in records]
        self._weights = [record.weight for record in records]

    def choose(self, request: Request, now: float, rng: random.Random) -> Choice:
        """Decide which endpoint gets a request.

        Args:
            request: what the decision knows of it.
            now: monotonic seconds.
            rng: breaks ties.

        Raises:
            gateway.core.schedule.pipeline.NoCandidate: none can take it now.
        """
        return self._pipeline.choose(request, self._fleet(now), rng)

    def has_stuck(self) -> bool:
        """Whether one of the endpoints is out of the choice because a request there makes no progress."""
        return EndpointState.STUCK in self._signals.table.column(self._slots, StatField.STATE)

    def _fleet(self, now: float) -> Fleet:
        table, slots, needs = self._signals.table, self._slots, self._pipeline.needs
        return Fleet(
            now=now,
            slots=slots,
            ids=self._ids,
            state=table.column(slots, StatField.STATE),
            inflight=self._signals.inflight.many(slots) if "inflight" in needs else (),
            waiting=table.column(slots, StatField.WAITING) if "waiting" in needs else (),
            running=table.column(slots, StatField.RUNNING) if "running" in needs else (),
            kv=table.column(slots, StatField.KV) if "kv" in needs else (),
            weight=self._weights,
            cooldown_until=self._signals.marks.many(slots),
        )


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """One model of the catalog.

    Attributes:
        name: catalog name.
        lanes: the pools that serve it, in the order of the configuration.
        fallbacks: names of the models to try next.
        timeouts: its own deadlines, None for the router's.
        endpoints: how many there are in all lanes.
    """

    name: str
    lanes: tuple[Lane, ...]
    fallbacks: tuple[str, ...]
    timeouts: Timeouts | None
    endpoints: int


class Routing:
    """A snapshot of what is configured and which endpoints there are.

    Attributes:
        config: the configuration in force.
        model_names: names and aliases, in the order of the configuration.
        ranks: rank of each band by its name, 0 is the highest; in that order.
    """

    def __init__(self, config: Config, signals: EndpointSignals) -> None:
        self.config = config
        self._signals = signals
        self._records = signals.table.records
        self._by_name: dict[str, ModelRoute] = {}
        pipelines = {name: build_pipeline(profile) for name, profile in config.router.profiles.items()}
        of_pool: dict[str, tuple[int, ...]] = {}
        for record in self._records:
            of_pool[record.pool] = tuple(sorted({*of_pool.get(record.pool, ()), record.lane}))
        for model in config.models:
            records = signals.table.by_model.get(model.name, ())
            pipeline = pipelines[model.routing_profile or config.router.default_profile]
            groups: dict[str, list[EndpointRecord]] = {}
            for record in records:
                groups.setdefault(record.pool, []).append(record)
            lanes = tuple(
                Lane(tuple(group), pipeline, signals, lane_settings(config, pool), of_pool[pool])
                for pool, group in groups.items()
            )
            route = ModelRoute(model.name, lanes, model.fallbacks, model.timeouts, len(records))
            for name in (model.name, *model.aliases):
                self._by_name[name] = route
        self.model_names = tuple(self._by_name)
        self.ranks = {band.name: rank for rank, band in enumerate(config.router.admission.bands_by_rank)}

    def resolve(self, name: str) -> ModelRoute | None:
        """Find a model by name or alias."""
        return self._by_name.get(name)

    def in_flight_by_pool(self) -> dict[str, int]:
        """Return how many requests all workers have under way, by pool."""
        totals: dict[str, int] = {}
        for record in self._records:
            totals[record.pool] = totals.get(record.pool, 0) + self._signals.inflight.of(record.slot)
        return totals

    def queued_by_pool(self) -> dict[str, int]:
        """Return how many requests of all workers wait for a grant, by pool."""
        lanes = {record.lane: record.pool for record in self._records}
        totals = dict.fromkeys(lanes.values(), 0)
        for lane, pool in lanes.items():
            totals[pool] += sum(self._signals.bands.local_waiters(lane))
        return totals

    def stuck(self) -> list[str]:
        """Return the ids of endpoints at which a request makes no progress."""
        table = self._signals.table
        return [r.id for r in self._records if table.stat(r.slot, StatField.STUCK_SINCE)]

    def why_not_ready(self) -> str | None:
        """Tell why no request can be served now; None when one can."""
        if not self._signals.table.generation:
            return "no_endpoint_table"
        for record in self._records:
            if EndpointState(int(self._signals.table.stat(record.slot, StatField.STATE))).is_usable:
                return None
        return "no_endpoint"
