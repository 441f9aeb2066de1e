"""Every metric the processes of an instance count in shared cells: name, kind, help, labels, buckets.

The one table: shm.metrics lays cells out by it, the admin listener's /metrics renders it, and the metrics
page of the documentation is made from it. Gauges of endpoints are not here: the coordinator computes them
from other regions while it renders.

Label values come from closed sets, or from the configuration (model, pool, replica). A model or path a client
invented is never one: use `UNKNOWN` and `UNMATCHED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

UNKNOWN = "unknown"  # a model the configuration does not name
UNMATCHED = "unmatched"  # a path that no route takes
OTHER = "other"  # what a full row folds further series into


class Kind(Enum):
    """How values of a metric behave."""

    COUNTER = "counter"  # grows only, through deaths of processes too
    GAUGE = "gauge"  # a process's current value; returns to 0 when the process dies; summed over processes
    HISTOGRAM = "histogram"  # counters per bucket, and the sum of what was observed


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    Attributes:
        name: as Prometheus sees it.
        kind: see `Kind`.
        help: one sentence for people.
        labels: names of the labels, in the order in which values are given.
        buckets: upper bounds of a histogram, ascending, in the unit of the name; +Inf is implied.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def values(self) -> int:
        """Cells a series of this metric takes: one, or a histogram's buckets with +Inf, and its sum."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


# 1 ms: a small model with a warm prefix; 120 s: a long prompt behind a queue. Finer where targets lie (50 ms
# .. 5 s).
TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0,
    10.0, 20.0, 40.0, 60.0, 120.0,
)  # fmt: skip
# 5 ms: an embedding; 1 h: the default total timeout.
DURATION_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0, 3600.0,
)  # fmt: skip
WAIT_BUCKETS = (0.0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CANDIDATE_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)

# Counted by workers.
REQUESTS = Definition(
    "llmgw_requests_total",
    Kind.COUNTER,
    "Requests answered, by HTTP status sent (499: the client left before the end).",
    ("model", "pool", "status"),
)
REQUEST_DURATION = Definition(
    "llmgw_request_duration_seconds",
    Kind.HISTOGRAM,
    "Time from a request's first byte to its answer's last.",
    ("model", "pool"),
    DURATION_BUCKETS,
)
TTFT = Definition(
    "llmgw_ttft_seconds",
    Kind.HISTOGRAM,
    "Time from a request's first byte to the first event of its stream, queueing included.",
    ("model", "pool"),
    TTFT_BUCKETS,
)
TOKENS = Definition(
    "llmgw_tokens_total",
    Kind.COUNTER,
    "Tokens as the engines report them; direction is prompt, completion or cached (a part of prompt).",
    ("model", "direction"),
)
RETRIES = Definition(
    "llmgw_retries_total",
    Kind.COUNTER,
    "Attempts repeated on another endpoint, by why the one before failed.",
    ("model", "reason"),
)
CANDIDATES_CONSIDERED = Definition(
    "llmgw_candidates_considered",
    Kind.HISTOGRAM,
    "Endpoints left to score in a scheduling decision.",
    ("model",),
    CANDIDATE_BUCKETS,
)
CANDIDATES_FILTERED = Definition(
    "llmgw_candidates_filtered_total",
    Kind.COUNTER,
    "Endpoints a filter took out of scheduling decisions.",
    ("filter",),
)
UPSTREAM_ERRORS = Definition(
    "llmgw_upstream_errors_total",
    Kind.COUNTER,
    "Failed attempts at engines, those that a retry hid from the client included.",
    ("pool", "reason"),
)
CLIENT_GONE = Definition(
    "llmgw_client_gone_total",
    Kind.COUNTER,
    "Clients that left early; phase is queued, waiting (before the first byte) or streaming.",
    ("model", "phase"),
)
ADMISSION_WAIT = Definition(
    "llmgw_admission_wait_seconds",
    Kind.HISTOGRAM,
    "Time a request waited before it was allowed to run; 0 where it did not have to.",
    ("band", "model"),
    WAIT_BUCKETS,
)
ADMISSION_REJECTED = Definition(
    "llmgw_admission_rejected_total",
    Kind.COUNTER,
    "Requests that did not get to run; reason is full, ttl, displaced, client_gone or a code.",
    ("band", "reason"),
)
CONNECTIONS = Definition("llmgw_client_connections", Kind.GAUGE, "Client connections open.")

# Counted by the coordinator. No replica among the labels: series in cells outlive their endpoint.
SCRAPES = Definition(
    "llmgw_scrapes_total",
    Kind.COUNTER,
    "Looks at engines; outcome is ok (metrics read) or failed. Which engine: llmgw_endpoint_metrics_stale.",
    ("outcome",),
)
CONTRACT_VIOLATIONS = Definition(
    "llmgw_contract_violations_total",
    Kind.COUNTER,
    "Scrapes whose metrics broke the contract. Which engine: llmgw_endpoint_contract_violated.",
    ("field",),
)
SLOTS_REAPED = Definition(
    "llmgw_slots_reaped_total",
    Kind.COUNTER,
    "Dead processes whose counts were given back.",
)
INFLIGHT_RETURNED = Definition(
    "llmgw_inflight_returned_total",
    Kind.COUNTER,
    "Requests that were in flight in a process when it died.",
)

REDIS_UP = Definition(
    "llmgw_redis_up",
    Kind.GAUGE,
    "1 while the exchange with other instances works; 0 while Redis is away, or none is configured.",
)
REDIS_EXCHANGES = Definition(
    "llmgw_redis_exchanges_total",
    Kind.COUNTER,
    "Exchanges with other instances; outcome is ok or failed.",
    ("outcome",),
)
PEERS = Definition("llmgw_peers", Kind.GAUGE, "Other instances of the cluster that are heard of.")
POOL_SHARE = Definition(
    "llmgw_pool_share",
    Kind.GAUGE,
    "This instance's share of a pool's hard cap; over all instances never more than the cap.",
    ("pool",),
)
PEERS_REMOVED = Definition(
    "llmgw_peers_removed_total",
    Kind.COUNTER,
    "Instances that were found dead, whose shares went back.",
)

# Counted by the launcher and by gunicorn's arbiter; whoever reaps a slot counts that, too.
PROCESS_RESTARTS = Definition(
    "llmgw_process_restarts_total",
    Kind.COUNTER,
    "Processes started again after an unasked end; process is workers (the arbiter), worker or coordinator.",
    ("process",),
)
CONFIG_RELOADS = Definition(
    "llmgw_config_reloads_total",
    Kind.COUNTER,
    "Reloads of the configuration; outcome is ok or refused.",
    ("outcome",),
)

DEFINITIONS: tuple[Definition, ...] = (
    REQUESTS,
    REQUEST_DURATION,
    TTFT,
    TOKENS,
    RETRIES,
    CANDIDATES_CONSIDERED,
    CANDIDATES_FILTERED,
    UPSTREAM_ERRORS,
    CLIENT_GONE,
    ADMISSION_WAIT,
    ADMISSION_REJECTED,
    CONNECTIONS,
    SCRAPES,
    CONTRACT_VIOLATIONS,
    SLOTS_REAPED,
    INFLIGHT_RETURNED,
    REDIS_UP,
    REDIS_EXCHANGES,
    PEERS,
    POOL_SHARE,
    PEERS_REMOVED,
    PROCESS_RESTARTS,
    CONFIG_RELOADS,
)
BY_NAME: dict[str, Definition] = {definition.name: definition for definition in DEFINITIONS}
