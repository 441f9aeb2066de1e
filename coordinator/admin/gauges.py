"""Metrics that are computed while /metrics is rendered, from the state of endpoints and processes.

Unlike series in shared cells (shm.definitions) they end with what they are about: an endpoint that leaves the
configuration leaves no series behind (B93).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from conf.version import __version__
from coordinator.admin.views import EndpointView, PoolLoadView
from coordinator.fleet import Fleet
from shm.definitions import Definition, Kind
from shm.endpoints import EndpointState
from shm.layout import FixedSlot

STATES = tuple(state.name.lower() for state in EndpointState)
PROCESS_KINDS = ("worker", *(process.name.lower() for process in FixedSlot))


def _gauge(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, Kind.GAUGE, text, labels)


ENDPOINT_INFO = _gauge(
    "llmgw_endpoint_info",
    "Always 1; says which model, pool and engine an endpoint belongs to, for joins.",
    *("replica", "model", "pool", "engine"),
)
ENDPOINT_CONTRACT_VIOLATED = _gauge(
    "llmgw_endpoint_contract_violated",
    "1 for each field of the metric contract that the engine's metrics break; absent when they do not.",
    *("replica", "field"),
)
QUEUE_DEPTH = _gauge(
    "llmgw_admission_queue_depth",
    "Requests of this instance that wait to be allowed to run.",
    "band",
    "model",
)
POOL_SATURATION = _gauge(
    "llmgw_pool_saturation",
    "How full the fullest model of a pool is: 1 is the healthy limit, bands close at their ceilings; absent "
    "while no endpoint could run anything.",
    "pool",
)
POOL_LEASES = _gauge(
    "llmgw_pool_leases", "Requests of this instance that run in a pool or are on their way there.", "pool"
)
POOL_CAP = _gauge(
    "llmgw_pool_cap",
    "Most requests that may run in a pool, all instances together; absent where there is no limit.",
    "pool",
)
REPLICAS = _gauge("llmgw_replicas", "Endpoints of a model by state.", "model", "state")
PROCESSES = _gauge("llmgw_processes", "Living processes of the instance.", "process")
CONFIG_GENERATION = _gauge(
    "llmgw_config_generation", "Configurations published since the launcher's start; grows with each reload."
)
BUILD_INFO = _gauge("llmgw_build_info", "Always 1; says which version runs.", "version")

# One value per endpoint, label `replica`; None: no series.
_OF_ENDPOINT: tuple[tuple[str, str, Callable[[EndpointView], float | None]], ...] = (
    (
        "llmgw_endpoint_up",
        "1 while requests may go to the endpoint, 0 while it is down, draining or stuck.",
        lambda view: view.is_usable,
    ),
    (
        "llmgw_endpoint_inflight",
        "Requests of this instance under way at the endpoint.",
        lambda view: view.inflight,
    ),
    (
        "llmgw_endpoint_metrics_stale",
        "1 while the engine's metrics cannot be read or used; in-flight counts alone judge it then.",
        lambda view: view.has_stale_metrics,
    ),
    (
        "llmgw_endpoint_scrape_age_seconds",
        "Age of the last usable metrics of the engine; absent before the first.",
        lambda view: view.scrape_age_s,
    ),
    (
        "llmgw_endpoint_scrape_failures",
        "Looks in a row that brought no usable metrics.",
        lambda view: view.failures,
    ),
    (
        "llmgw_endpoint_waiting",
        "Requests queued inside the engine, as last read; absent before the first time.",
        lambda view: view.waiting,
    ),
    (
        "llmgw_endpoint_running",
        "Requests in the engine's batch, as last read; absent before the first time.",
        lambda view: view.running,
    ),
    (
        "llmgw_endpoint_kv_usage_ratio",
        "Share of the engine's KV cache in use, as last read; absent where the engine does not say.",
        lambda view: view.kv_usage_ratio,
    ),
    (
        "llmgw_endpoint_stuck",
        "1 while a request makes no progress at the endpoint for `stuck_after`; it gets no new ones then.",
        lambda view: view.stuck_s > 0,
    ),
    (
        "llmgw_endpoint_cooldown_seconds",
        "How long the endpoint is still left alone after a failed request; 0: it is not.",
        lambda view: view.cooldown_s,
    ),
)
ENDPOINT_GAUGES = tuple((_gauge(name, text, "replica"), figure) for name, text, figure in _OF_ENDPOINT)
GAUGES = (
    *(definition for definition, _ in ENDPOINT_GAUGES),
    ENDPOINT_CONTRACT_VIOLATED,
    ENDPOINT_INFO,
    QUEUE_DEPTH,
    POOL_SATURATION,
    POOL_LEASES,
    POOL_CAP,
    REPLICAS,
    PROCESSES,
    CONFIG_GENERATION,
    BUILD_INFO,
)


class Value(NamedTuple):
    """One series of a gauge; labels in the definition's order."""

    labels: tuple[str, ...]
    value: float


def read_gauges(fleet: Fleet) -> Iterator[tuple[Definition, list[Value]]]:
    """Yield every gauge with its series, in the order of `GAUGES`, from one look at the fleet."""
    views = fleet.endpoints()
    for definition, figure in ENDPOINT_GAUGES:
        figures = ((view.id, figure(view)) for view in views)
        yield definition, [Value((name,), float(value)) for name, value in figures if value is not None]
    yield (
        ENDPOINT_CONTRACT_VIOLATED,
        [Value((v.id, field), 1.0) for v in views for field in v.violated_fields],
    )
    yield ENDPOINT_INFO, [Value((v.id, v.model, v.pool, v.engine), 1.0) for v in views]
    pools = fleet.load().pools
    yield QUEUE_DEPTH, _queue_depths(pools)
    yield POOL_SATURATION, [Value((p.pool,), p.saturation) for p in pools if p.saturation is not None]
    yield POOL_LEASES, [Value((p.pool,), float(p.leases)) for p in pools]
    yield POOL_CAP, [Value((p.pool,), float(p.cap)) for p in pools if p.cap is not None]
    yield REPLICAS, _replicas(views)
    kinds = [view.kind for view in fleet.processes()]
    yield PROCESSES, [Value((kind,), float(kinds.count(kind))) for kind in PROCESS_KINDS]
    yield CONFIG_GENERATION, [Value((), float(fleet.segment.config_generation))]
    yield BUILD_INFO, [Value((__version__,), 1.0)]


def _queue_depths(pools: tuple[PoolLoadView, ...]) -> list[Value]:
    depths: dict[tuple[str, str], int] = {}
    for pool in pools:
        for lane in pool.lanes:
            for band, count in lane.waiting.items():
                depths[band, lane.model] = depths.get((band, lane.model), 0) + count
    return [Value(labels, float(count)) for labels, count in depths.items()]


def _replicas(views: tuple[EndpointView, ...]) -> list[Value]:
    models = dict.fromkeys(view.model for view in views)
    counts = {(model, state): 0 for model in models for state in STATES}
    for view in views:
        counts[view.model, view.state] += 1
    return [Value(labels, float(count)) for labels, count in counts.items()]
