"""Plain proxy mode: what a request's life is there, where it differs from that with a configuration file.

Rules:
    - `POST /v1/*` goes to the upstream `default`, `POST /synthesis/v1/*` as `/v1/*` to `synthesis`. What is
      in the body and in the answer, an error included, is the upstream's affair: both pass as they are.
    - A request waits for a slot of its upstream and keeps it until the answer is out. `GET` needs none: it
      costs no GPU, and a list of models must not wait behind 16 streams.
    - `X-Priority: background` waits behind everything else; within a class the order is that of arrival,
      whoever asks. Queueing itself is the general one: two bands, and a pool with a hard cap per upstream.
    - The line of a request has the fields of that mode's own format and no others.

The settings are read in conf.plain.
"""

from __future__ import annotations

from typing import Final

import msgspec

from conf.lines import PlainLine
from conf.log import milliseconds
from conf.plain import BACKGROUND, DEFAULT, INTERACTIVE, SYNTHESIS
from gateway.access import Accountant, header_text
from gateway.attempt import Attempt
from gateway.connection import RequestHead
from gateway.core import body as request_body
from gateway.core import errors
from gateway.core.body import RequestBody
from gateway.core.framing import FramingKind
from gateway.core.shapes import decode_peek
from gateway.core.sse import SseRelay
from gateway.core.usage import Usage, UsageTap
from gateway.dispatch import EVENT_STREAM, Dispatcher, Failed, Run
from gateway.exchange import Exchange
from gateway.lease import Lease
from gateway.routing import Lane, ModelRoute
from shm.endpoints import EndpointRecord

_PREFIX: Final = "/synthesis"

HOT_PATHS: Final = frozenset(
    prefix + path
    for prefix in ("", _PREFIX)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
)


def upstream_of(path: str) -> str:
    """Return the name of the upstream that serves a path."""
    return SYNTHESIS if path.startswith(f"{_PREFIX}/") else DEFAULT


def priority_of(head: RequestHead) -> str:
    """Return the class of a request: whatever is not `background` is interactive."""
    wanted = head.fields.get(b"x-priority", b"").strip().lower()
    return BACKGROUND if wanted == b"background" else INTERACTIVE


class PlainDispatcher(Dispatcher):
    """Runs the requests of one worker in plain proxy mode."""

    def _begin(self, exchange: Exchange) -> Run:
        return _PlainRun(self, exchange)


class _PlainRun(Run):
    """The state of one request."""

    def run(self) -> None:
        exchange, connection = self._exchange, self._connection
        if self._dispatcher.is_draining:
            raise errors.ShuttingDown()
        name = upstream_of(exchange.head.path)
        exchange.model = exchange.pool = name
        raw = connection.read_body(exchange.head)
        request = _peek(raw)
        exchange.asked_model = request.model or None
        exchange.is_stream = request.stream
        route = self._routing.resolve(name)
        if route is None:
            raise errors.UnknownRoute()
        connection.watch(self._on_gone)
        if exchange.head.method == "POST":
            self._try_models(request, raw, route)
        elif route.lanes:
            self._pass(request, raw, route)
        else:
            raise errors.NoEndpoint(name)

    def _pass(self, request: RequestBody, raw: bytes, route: ModelRoute) -> None:
        """Relay a request that needs no slot."""
        try:
            self._try_endpoint(request, raw, route, route.lanes[0].records[0])
        except Failed as failed:
            raise failed.error from failed

    def _admit(self, request: RequestBody, route: ModelRoute, lanes: list[Lane]) -> tuple[Lane, Lease]:
        try:
            return super()._admit(request, route, lanes)
        except errors.QueueTimeout as error:
            raise errors.QueueTimeout(status=503, retry_after=error.retry_after, queue=error.queue) from error

    def _band_name(self) -> str:
        return priority_of(self._exchange.head)

    def _tenant(self) -> str:
        return ""  # one for all: turns by tenant would change the order

    def _target(self) -> bytes:
        target = self._exchange.head.target
        return target[len(_PREFIX) :] if self._exchange.pool == SYNTHESIS else target

    def _engine_body(self, request: RequestBody, raw: bytes, record: EndpointRecord) -> tuple[bytes, bool]:
        self._exchange.served_model = None  # only the upstream knows
        return raw, False

    def _answer(self, attempt: Attempt, request: RequestBody, *args: object, **options: object) -> None:
        head = attempt.head
        if head.framing.kind is FramingKind.LENGTH and head.framing.length == len(attempt.rest):
            self._answer_whole(attempt, None)
            return
        is_events = head.content_type.startswith(EVENT_STREAM)
        timeouts = self._config.router.timeouts
        self._relay(attempt, request, timeouts, is_events=is_events, rename=None, withhold_usage=False)

    def _readers(self, **_: object) -> tuple[SseRelay | None, UsageTap | None]:
        return None, None

    def _take_usage(self, usage: Usage | None) -> None:
        """Tokens are not counted in this mode."""


def _peek(raw: bytes) -> RequestBody:
    """Read model and stream, if the body is JSON that has them; anything else is as good."""
    try:
        return request_body.read_request(raw)
    except errors.ApiError:
        pass
    try:
        return request_body.unnamed(bytes(decode_peek(raw).stream))
    except (msgspec.MsgspecError, RecursionError):
        return request_body.unnamed()


class PlainAccountant(Accountant):
    """Counts as ever, and writes the mode's own lines."""

    def _write_line(self, exchange: Exchange, now: float, duration_s: float, ttft_s: float | None) -> None:
        head = exchange.head
        self._log.write(
            PlainLine(
                method=head.method,
                path=head.path,
                upstream=exchange.pool,
                priority=priority_of(head),
                tenant=header_text(head.fields.get(b"x-tenant-id")),
                surface=header_text(head.fields.get(b"x-surface")),
                user=header_text(head.fields.get(b"x-user-id")),
                model=exchange.asked_model,
                status=exchange.status,
                queue_ms=milliseconds(exchange.queue_s),
                upstream_ms=milliseconds(now - exchange.dispatched_at) if exchange.dispatched_at else 0.0,
                streamed=exchange.is_stream,
            )
        )
