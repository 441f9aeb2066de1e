"""What is kept of a finished request: its metrics and its log line."""

from __future__ import annotations

import time

from conf.lines import AccessLine
from conf.log import AccessLog, milliseconds
from gateway.exchange import Exchange
from shm import definitions
from shm.metrics import Counter, Histogram, MetricsRow

_QUIET_PATHS = frozenset(("/healthz", "/readyz"))
"""Asked every second by load balancers; counted, but not logged."""
_NO_POOL = "none"


class _RouteSeries:
    """The series of one (model, pool), found once."""

    __slots__ = ("_row", "_statuses", "duration", "labels", "ttft")

    def __init__(self, row: MetricsRow, model: str, pool: str) -> None:
        self._row = row
        self._statuses: dict[int, Counter] = {}
        self.labels = (model, pool)
        self.duration: Histogram = row.histogram(definitions.REQUEST_DURATION, self.labels)
        self.ttft: Histogram = row.histogram(definitions.TTFT, self.labels)

    def status(self, status: int) -> Counter:
        counter = self._statuses.get(status)
        if counter is None:
            counter = self._row.counter(definitions.REQUESTS, (*self.labels, str(status)))
            self._statuses[status] = counter
        return counter


class Accountant:
    """Counts and logs the requests of one worker.

    Attributes:
        connections: gauge of open client connections.
    """

    def __init__(self, row: MetricsRow, log: AccessLog) -> None:
        self.connections = row.gauge(definitions.CONNECTIONS)
        self._row = row
        self._log = log
        self._routes: dict[tuple[str, str | None], _RouteSeries] = {}
        self._tokens: dict[str, tuple[Counter, Counter, Counter]] = {}
        self._waits: dict[tuple[str, str], Histogram] = {}
        self._candidates: dict[str, Histogram] = {}
        self._counters: dict[tuple[str, ...], Counter] = {}

    def finish(self, exchange: Exchange) -> None:
        """Count a request and write its line. Once for each request."""
        now = time.monotonic()
        path = exchange.head.path
        duration_s = now - exchange.received_at
        model = exchange.model or (definitions.UNKNOWN if path.startswith("/v1/") else definitions.UNMATCHED)
        route = self._routes.get((model, exchange.pool))
        if route is None:
            route = _RouteSeries(self._row, model, exchange.pool or _NO_POOL)
            self._routes[model, exchange.pool] = route
        route.status(exchange.status).inc()
        route.duration.observe(duration_s)
        ttft_s = None
        if exchange.first_at and exchange.is_stream:
            ttft_s = exchange.first_at - exchange.received_at
            route.ttft.observe(ttft_s)
        if exchange.prompt_tokens is not None and exchange.model is not None:
            self._count_tokens(exchange)
        if path not in _QUIET_PATHS:
            self._write_line(exchange, now, duration_s, ttft_s)
        exchange.connection.bytes_out = 0

    def _write_line(self, exchange: Exchange, now: float, duration_s: float, ttft_s: float | None) -> None:
        fields = exchange.head.fields
        self._log.write(
            AccessLine(
                request_id=exchange.request_id,
                method=exchange.head.method,
                path=exchange.head.path,
                status=exchange.status,
                outcome=exchange.outcome,
                reason=exchange.reason,
                duration_ms=milliseconds(duration_s),
                upstream=exchange.replica,
                priority=header_text(fields.get(b"x-priority")),
                tenant=header_text(fields.get(b"x-tenant-id")),
                band=exchange.band,
                surface=header_text(fields.get(b"x-surface")),
                user=header_text(fields.get(b"x-user-id")),
                model=exchange.model,
                served_model=exchange.served_model,
                pool=exchange.pool,
                replica=exchange.replica,
                queue_ms=milliseconds(exchange.queue_s),
                ttft_ms=None if ttft_s is None else milliseconds(ttft_s),
                upstream_ms=milliseconds(now - exchange.dispatched_at) if exchange.dispatched_at else None,
                streamed=exchange.is_stream,
                prompt_tokens=exchange.prompt_tokens,
                completion_tokens=exchange.completion_tokens,
                cached_tokens=exchange.cached_tokens,
                bytes_out=exchange.connection.bytes_out,
                retries=exchange.retries,
            )
        )

    def _count_tokens(self, exchange: Exchange) -> None:
        assert exchange.model is not None
        series = self._tokens.get(exchange.model)
        if series is None:
            model = exchange.model
            series = self._tokens[model] = (
                self._row.counter(definitions.TOKENS, (model, "prompt")),
                self._row.counter(definitions.TOKENS, (model, "completion")),
                self._row.counter(definitions.TOKENS, (model, "cached")),
            )
        prompt, completion, cached = series
        prompt.inc(exchange.prompt_tokens or 0)
        completion.inc(exchange.completion_tokens or 0)
        cached.inc(exchange.cached_tokens or 0)

    def candidates(self, model: str, considered: int) -> None:
        """Observe how many endpoints a scheduling decision had to choose from."""
        histogram = self._candidates.get(model)
        if histogram is None:
            histogram = self._row.histogram(definitions.CANDIDATES_CONSIDERED, (model,))
            self._candidates[model] = histogram
        histogram.observe(considered)

    def admitted(self, band: str, model: str, waited_s: float) -> None:
        """Observe how long a request waited before it was allowed to run."""
        histogram = self._waits.get((band, model))
        if histogram is None:
            histogram = self._row.histogram(definitions.ADMISSION_WAIT, (band, model))
            self._waits[band, model] = histogram
        histogram.observe(waited_s)

    def count(self, definition: definitions.Definition, *labels: str, amount: int = 1) -> None:
        """Add to a counter that is not on the path of every request."""
        key = (definition.name, *labels)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._row.counter(definition, labels)
        counter.inc(amount)


def header_text(value: bytes | None) -> str | None:
    """Return a header's value for the log."""
    """Decode what a client sent, so that nothing in it passes for the end of a line or moves a terminal."""
    if value is None:
        return None
    text = value.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
