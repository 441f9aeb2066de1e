"""What the management API shows: the bodies of its answers, as the server encodes and llmgw-ctl decodes them.

No secrets: of an endpoint's key there is no trace. Times are ages in seconds, since monotonic clocks of two
hosts have nothing in common.
"""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the management API."""


class EndpointView(View, frozen=True, kw_only=True):
    """One endpoint.

    Attributes:
        id: the `replica` of logs, metrics and response headers.
        model: catalog name; `served_model`: the engine's name for it.
        state: unknown, ready, stale, down, draining or stuck.
        reason: why it is not ready, from a closed set; empty if it is.
        state_age_s: how long it has been in this state.
        is_usable: whether requests may go there, cooldown aside.
        inflight: requests of this instance under way there, over all workers.
        waiting, running: requests in the engine, as of the last good scrape; None: never read.
        kv_usage_ratio: 0..1; None: the engine does not say, or never read.
        has_stale_metrics: whether the three figures above are older than the last look.
        scrape_age_s: age of the last good scrape; None: there was none.
        failures: looks in a row without usable metrics.
        stuck_s: how long it has counted as stuck; 0: it does not.
        cooldown_s: how long it is still left alone after a failure of a request; 0: not.
        max_context: tokens; 0: unknown. `block_size` and `num_blocks` likewise.
        violations: breaches of the metric contract, in words.
        violated_fields: the contract's fields that they are about.
    """

    id: str
    model: str
    served_model: str
    engine: str
    pool: str
    url: str
    weight: float
    state: str
    reason: str
    state_age_s: float
    is_usable: bool
    inflight: int
    waiting: int | None
    running: int | None
    kv_usage_ratio: float | None
    has_stale_metrics: bool
    scrape_age_s: float | None
    failures: int
    stuck_s: float
    cooldown_s: float
    max_context: int
    block_size: int
    num_blocks: int
    violations: tuple[str, ...] = ()
    violated_fields: tuple[str, ...] = ()


class EndpointsView(View, frozen=True, kw_only=True):
    """`GET /api/v1/endpoints`."""

    endpoints: tuple[EndpointView, ...]


class ProcessView(View, frozen=True, kw_only=True):
    """A living process of the instance.

    Attributes:
        kind: worker, coordinator, launcher or arbiter.
        slot: its slot in the segment.
        state: starting, serving or draining.
        age_s: since it took its slot; `heartbeat_age_s`: since it last said that it lives.
    """

    kind: str
    slot: int
    pid: int
    state: str
    age_s: float
    heartbeat_age_s: float


class StatusView(View, frozen=True, kw_only=True):
    """`GET /api/v1/status`.

    Attributes:
        compiled: whether the request path runs as extension modules.
        phase: running or draining.
        uptime_s: of the coordinator; the instance may be older.
        config_generation: configurations published since the launcher's start.
        inflight: requests under way, over all endpoints.
        endpoints_by_state: how many endpoints are in each state.
    """

    version: str
    compiled: bool
    instance: str
    phase: str
    uptime_s: float
    config_generation: int
    inflight: int
    endpoints_by_state: dict[str, int]
    processes: tuple[ProcessView, ...]


class BandView(View, frozen=True, kw_only=True):
    """A priority class.

    Attributes:
        saturation_ceiling: saturation up to which its requests start.
    """

    name: str
    saturation_ceiling: float


class LaneLoadView(View, frozen=True, kw_only=True):
    """What one model has to do in one pool; its requests wait together.

    Attributes:
        saturation: 1 is the healthy limit, more is legal; None: no endpoint could run anything.
        inflight: requests of this instance under way at its endpoints; `pending`: on their way there.
        waiting: requests of this instance that wait, by the name of their band, highest first.
        remote_inflight, remote_waiting: the same of all other instances together.
    """

    model: str
    saturation: float | None
    inflight: int
    pending: int
    waiting: dict[str, int]
    remote_inflight: int
    remote_waiting: int


class PoolLoadView(View, frozen=True, kw_only=True):
    """What a pool has to do.

    Attributes:
        saturation: of its fullest lane that could run anything; None: none could.
        leases: rights to run that this instance holds; `remote_leases`: all others.
        cap: most leases of all instances together; `share`: of this one. None: no limit.
    """

    pool: str
    saturation: float | None
    leases: int
    remote_leases: int
    cap: int | None
    share: int | None
    lanes: tuple[LaneLoadView, ...]


class LoadView(View, frozen=True, kw_only=True):
    """`GET /api/v1/load`: who runs and who waits.

    Attributes:
        bands: the highest first.
    """

    instance: str
    bands: tuple[BandView, ...]
    pools: tuple[PoolLoadView, ...]


class HealthView(View, frozen=True, kw_only=True):
    """`GET /healthz`: the coordinator answers."""

    ok: bool = True
