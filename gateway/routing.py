"""What a worker knows when it routes: the configuration and the endpoint table, joined.

A `Routing` is one immutable snapshot of the two; a reload or a new endpoint table
makes another. How endpoints are doing is read from the segment at each decision.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import Config, Timeouts
from gateway.core.schedule.pipeline import Choice, Fleet, Pipeline, Request
from gateway.core.schedule.registry import build_pipeline
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


class ModelRoute:
    """One model: where it is served and how an endpoint is chosen.

    Attributes:
        name: catalog name.
        records: its endpoints; a `Choice.index` points into them.
        fallbacks: names of the models to try next.
        timeouts: its own deadlines, None for the router's.
    """

    __slots__ = (
        "_ids",
        "_pipeline",
        "_signals",
        "_slots",
        "_weights",
        "fallbacks",
        "name",
        "records",
        "timeouts",
    )

    def __init__(
        self,
        name: str,
        records: tuple[EndpointRecord, ...],
        fallbacks: tuple[str, ...],
        timeouts: Timeouts | None,
        pipeline: Pipeline,
        signals: EndpointSignals,
    ) -> None:
        self.name = name
        self.records = records
        self.fallbacks = fallbacks
        self.timeouts = timeouts
        self._pipeline = pipeline
        self._signals = signals
        self._slots = _as_range([record.slot for record in records])
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


def _as_range(slots: list[int]) -> Sequence[int]:
    """Return slots that follow each other as a `range`, whose columns are read in one piece."""
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        return range(slots[0], slots[0] + len(slots))
    return slots


class Routing:
    """A snapshot of what is configured and which endpoints there are.

    Attributes:
        config: the configuration in force.
        model_names: names and aliases, in the order of the configuration.
    """

    def __init__(self, config: Config, signals: EndpointSignals) -> None:
        self.config = config
        self._signals = signals
        self._records = signals.table.records
        self._by_name: dict[str, ModelRoute] = {}
        pipelines = {name: build_pipeline(profile) for name, profile in config.router.profiles.items()}
        for model in config.models:
            route = ModelRoute(
                model.name,
                signals.table.by_model.get(model.name, ()),
                model.fallbacks,
                model.timeouts,
                pipelines[model.routing_profile or config.router.default_profile],
                signals,
            )
            for name in (model.name, *model.aliases):
                self._by_name[name] = route
        self.model_names = tuple(self._by_name)

    def resolve(self, name: str) -> ModelRoute | None:
        """Find a model by name or alias."""
        return self._by_name.get(name)

    def in_flight_by_pool(self) -> dict[str, int]:
        """Return how many requests all workers have under way, by pool."""
        totals: dict[str, int] = {}
        for record in self._records:
            totals[record.pool] = totals.get(record.pool, 0) + self._signals.inflight.of(record.slot)
        return totals

    def why_not_ready(self) -> str | None:
        """Tell why no request can be served now; None when one can."""
        if not self._signals.table.generation:
            return "no_endpoint_table"
        for record in self._records:
            if EndpointState(int(self._signals.table.stat(record.slot, StatField.STATE))).is_usable:
                return None
        return "no_endpoint"
