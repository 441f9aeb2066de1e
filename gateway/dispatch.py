"""The life of a request that goes to an engine, in order: body, model, endpoint, relay, account."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator

from conf.schema import Config, Timeouts
from gateway.access import Accountant
from gateway.attempt import Attempt, AttemptDeadlines
from gateway.channel import CLIENT_GONE
from gateway.connection import FOREVER, ClientClosed
from gateway.core import body as request_body
from gateway.core import errors, headers
from gateway.core.body import RequestBody
from gateway.core.framing import FramingKind, encode_chunk
from gateway.core.retry import Outcome, classify
from gateway.core.schedule.pipeline import Choice, NoCandidate
from gateway.core.schedule.pipeline import Request as SchedulingRequest
from gateway.core.sse import SseRelay, empty_chunk_event
from gateway.core.usage import Usage, UsageTap, usage_in
from gateway.exchange import Exchange
from gateway.lease import Lease, WorkerAdmission
from gateway.progress import ProgressTracker, Watched
from gateway.relay import LAST_CHUNK, Relay, RelayDeadlines, RelayEnd
from gateway.routing import Lane, ModelRoute, Routing
from gateway.upstream import UpstreamPools
from shm import definitions
from shm.endpoints import EndpointRecord
from shm.inflight import InflightRow
from shm.marks import CooldownMarks

_log = logging.getLogger(__name__)

ERROR_BODY_MAX_BYTES = 1024 * 1024
"""Longest error body of an engine that is passed on."""
COOLDOWN_WAIT_MAX_S = 30.0
"""How long a request waits for an endpoint to come out of its cooldown, when there is no other."""
EVENT_STREAM = b"text/event-stream"
OUTCOMES = {
    RelayEnd.COMPLETE: "ok",
    RelayEnd.CLIENT_GONE: "client_gone",
}


class Failed(Exception):
    """A try that did not lead to an answer; the client has seen nothing of it."""

    def __init__(self, error: errors.ApiError, outcome: Outcome) -> None:
        super().__init__(error)
        self.error = error
        self.outcome = outcome


class Dispatcher:
    """Runs the requests of one worker.

    Attributes:
        is_draining: no request is taken any more.
    """

    def __init__(
        self,
        routing: Callable[[], Routing],
        pools: UpstreamPools,
        inflight: InflightRow,
        marks: CooldownMarks,
        accountant: Accountant,
        admission: WorkerAdmission,
        progress: ProgressTracker,
        rng: random.Random,
    ) -> None:
        self.is_draining = False
        self._routing = routing
        self._pools = pools
        self._inflight = inflight
        self._marks = marks
        self._accountant = accountant
        self._admission = admission
        self._progress = progress
        self._rng = rng

    def run(self, exchange: Exchange) -> None:
        """Answer a request, or raise the error that answers it.

        Raises:
            errors.ApiError: nothing has been sent; the caller answers.
        """
        try:
            self._begin(exchange).run()
        except ClientClosed:
            exchange.connection.gone = True
            exchange.is_answered = True
            exchange.status, exchange.outcome = 499, "client_gone"
            phase = "waiting" if exchange.dispatched_at else "queued"
            self._accountant.count(definitions.CLIENT_GONE, exchange.model or definitions.UNKNOWN, phase)
        except BaseException:
            if exchange.is_answered:
                # Half an answer is out: nothing may follow it on this connection.
                exchange.connection.gone = True
                exchange.outcome = "internal_error"
            raise
        finally:
            exchange.connection.unwatch()
            exchange.connection.deadline = FOREVER
            if exchange.is_answered:
                self._accountant.finish(exchange)

    def _begin(self, exchange: Exchange) -> Run:
        return Run(self, exchange)


class Run:
    """The state of one request between its steps."""

    def __init__(self, dispatcher: Dispatcher, exchange: Exchange) -> None:
        self._dispatcher = dispatcher
        self._exchange = exchange
        self._connection = exchange.connection
        self._routing = dispatcher._routing()
        self._config: Config = self._routing.config
        self._body_bytes = 0
        self._prompt_tokens: int | None = None  # an estimate, made when it is asked for
        self._watched: Watched | None = None
        self._is_open = False  # the response head went out early, with a ping

    def run(self) -> None:
        if self._dispatcher.is_draining:
            raise errors.ShuttingDown()
        raw = self._connection.read_body(self._exchange.head)
        self._body_bytes = len(raw)
        request = self._connection.turns.run(len(raw), request_body.read_request, raw)
        route = self._routing.resolve(request.model)
        if route is None:
            raise errors.UnknownModel(request.model)
        self._exchange.model = route.name
        self._exchange.is_stream = request.stream
        self._connection.watch(self._on_gone)
        try:
            self._try_models(request, raw, route)
        except errors.ApiError as error:
            if not self._is_open:
                raise
            self._end_opened_stream(error)

    def _on_gone(self) -> None:
        self._connection.parker.wake(CLIENT_GONE)

    def _try_models(self, request: RequestBody, raw: bytes, route: ModelRoute) -> None:
        error: errors.ApiError | None = None
        for model in self._chain(route):
            try:
                self._try_endpoints(request, raw, model)
                return
            except Failed as failed:
                error = failed.error
                if self._exchange.is_answered or failed.outcome is Outcome.CLIENT_ERROR:
                    break  # a ping is out; or the request is at fault, and would be everywhere
            except NoCandidate:
                is_stuck = any(lane.has_stuck() for lane in model.lanes)
                error = error or (errors.RunnerStuck() if is_stuck else errors.NoEndpoint(route.name))
        assert error is not None
        raise error

    def _chain(self, route: ModelRoute) -> Iterator[ModelRoute]:
        yield route
        for name in route.fallbacks:
            fallback = self._routing.resolve(name)
            if fallback is not None:
                yield fallback

    def _try_endpoints(self, request: RequestBody, raw: bytes, route: ModelRoute) -> None:
        """Try the lanes of one model until an endpoint answers.

        Raises:
            NoCandidate: the model has no endpoint that can be tried at all.
            Failed: every try failed, or the last one must not be repeated.
            errors.ApiError: the request may not run.
        """
        lanes = list(route.lanes)
        tried: set[int] = set()
        failed: Failed | None = None
        while lanes:
            try:
                lane, lease = self._admit(request, route, lanes)
            except errors.RunnerStuck:
                lanes.pop(0)  # where it would have waited
                continue
            try:
                failed = self._try_lane(request, raw, route, lane, lease, tried, failed)
            except NoCandidate:
                pass
            finally:
                lease.release(self._exchange.served_tokens)
            if failed is None and self._exchange.is_answered:
                return
            lanes.remove(lane)
        if failed is not None:
            raise failed
        raise NoCandidate("empty")

    def _admit(self, request: RequestBody, route: ModelRoute, lanes: list[Lane]) -> tuple[Lane, Lease]:
        """Decide when: take a lease in the first lane that is open, or wait for one in the first of all."""
        exchange, dispatcher = self._exchange, self._dispatcher
        admission, accountant = dispatcher._admission, dispatcher._accountant
        if exchange.band is None:
            exchange.band = self._band_name()
            exchange.tenant = self._tenant()
        band, tenant = self._routing.ranks[exchange.band], exchange.tenant
        if not self._config.router.admission.enabled:
            return lanes[0], admission.free_lease(lanes[0], band, tenant)
        now = time.monotonic()
        for lane in lanes:
            lease = admission.try_start(lane, band, tenant, now)
            if lease is not None:
                accountant.admitted(exchange.band, route.name, 0.0)
                return lane, lease
        ping = self._config.router.stream_ping
        try:
            lease, exchange.queue_position = admission.wait(
                self._connection,
                lanes[0],
                band,
                tenant,
                config=self._config,
                cost=request.prompt_token_estimate() + 2 * (request.max_tokens or 0),
                ping_s=ping.interval if ping.mode != "off" and request.stream else FOREVER,
                on_silence=self._ping_while_silent,
            )
        except errors.ApiError as error:
            accountant.count(
                definitions.ADMISSION_REJECTED, exchange.band, _REJECTIONS.get(error.code, error.code)
            )
            raise
        except ClientClosed:
            accountant.count(definitions.ADMISSION_REJECTED, exchange.band, "client_gone")
            raise
        finally:
            exchange.queue_s += time.monotonic() - now
        accountant.admitted(exchange.band, route.name, exchange.queue_s)
        return lanes[0], lease

    def _band_name(self) -> str:
        """Take the band from the client's header; there is no key to take it from."""
        wanted = self._exchange.head.fields.get(b"x-llmgw-band")
        if wanted is None:
            return self._config.router.admission.default_band
        name, ranks = wanted.decode("latin-1"), self._routing.ranks
        if name not in ranks:
            raise errors.BadField(
                "x-llmgw-band", f"There is no band of this name; there are {', '.join(ranks)}."
            )
        return name

    def _tenant(self) -> str:
        """Say whose turn it is inside a band: the tenant that the client names, else its address."""
        wanted = self._exchange.head.fields.get(b"x-tenant-id")
        return self._connection.address[0] if wanted is None else wanted.decode("latin-1")[:128]

    def _try_lane(
        self,
        request: RequestBody,
        raw: bytes,
        route: ModelRoute,
        lane: Lane,
        lease: Lease,
        tried: set[int],
        failed: Failed | None,
    ) -> Failed | None:
        """Try endpoints of one lane under one lease.

        Args:
            tried: slots of endpoints that this request has tried; grows.
            failed: the try before, in another lane.

        Returns:
            None when an endpoint answered, else the last failure, after which another lane may be tried.

        Raises:
            NoCandidate: nothing was tried here.
            Failed: the last failure must not be repeated anywhere.
        """
        dispatcher, exchange = self._dispatcher, self._exchange
        tried_here = False
        while True:
            try:
                choice = self._choose(lane, tried)
            except NoCandidate:
                if not tried_here:
                    raise
                return failed
            record = lane.records[choice.index]
            tried.add(record.slot)
            tried_here = True
            if failed is not None:
                exchange.retries += 1
                dispatcher._accountant.count(definitions.RETRIES, route.name, failed.outcome.name.lower())
            dispatcher._inflight.add(record.slot)
            lease.dispatched()
            watched = self._watched = dispatcher._progress.begin(record.slot)
            try:
                self._try_endpoint(request, raw, route, record)
                return None
            except Failed as exc:
                failed = exc
            finally:
                dispatcher._inflight.sub(record.slot)
                dispatcher._progress.end(watched, has_answer=exchange.is_answered)
            lease.undispatched()
            verdict = failed.outcome.verdict
            dispatcher._accountant.count(
                definitions.UPSTREAM_ERRORS, record.pool, failed.outcome.name.lower()
            )
            if verdict.cools_down and route.endpoints > 1:
                # A model's only endpoint is not left alone: there is nobody else to ask.
                dispatcher._marks.set(record.slot, time.monotonic() + self._config.router.cooldown_seconds)
            if exchange.is_answered or not verdict.may_retry or len(tried) > self._config.router.retries:
                raise failed

    def _choose(self, lane: Lane, tried: set[int]) -> Choice:
        """Choose an endpoint; when all that could serve are cooling down, wait for the first of them.

        Raises:
            NoCandidate: waiting would not help either.
        """
        request = SchedulingRequest(tried)
        while True:
            now = time.monotonic()
            try:
                choice = lane.choose(request, now, self._dispatcher._rng)
            except NoCandidate as nobody:
                self._note_decision(0, nobody.filtered)
                if nobody.usable_at is None or tried or nobody.usable_at - now > COOLDOWN_WAIT_MAX_S:
                    raise
                self._wait_until(nobody.usable_at)
            else:
                self._note_decision(choice.considered, choice.filtered)
                return choice

    def _note_decision(self, considered: int, filtered: tuple[tuple[str, int], ...]) -> None:
        accountant = self._dispatcher._accountant
        accountant.candidates(self._exchange.model or definitions.UNKNOWN, considered)
        for name, count in filtered:
            accountant.count(definitions.CANDIDATES_FILTERED, name, amount=count)

    def _wait_until(self, at: float) -> None:
        """Wait, with an eye on the client."""
        connection = self._connection
        while time.monotonic() < at:
            connection.deadline = at
            bits = connection.parker.park()
            if bits & CLIENT_GONE or connection.gone:
                raise ClientClosed
            if connection.shutdown:
                raise errors.ShuttingDown()

    def _try_endpoint(
        self, request: RequestBody, raw: bytes, route: ModelRoute, record: EndpointRecord
    ) -> None:
        exchange, config = self._exchange, self._config
        exchange.pool, exchange.replica, exchange.served_model = record.pool, record.id, record.served_model
        exchange.dispatched_at = time.monotonic()
        pool = self._dispatcher._pools.of(record)
        body, injects_usage = self._engine_body(request, raw, record)
        timeouts = route.timeouts or config.router.timeouts
        attempt = Attempt(
            self._connection,
            pool,
            self._attempt_deadlines(timeouts, request),
            self._ping_while_silent,
        )
        head = headers.engine_request_head(
            pool.base_path + self._target(),
            exchange.head.headers,
            host=pool.host_header,
            content_length=len(body),
            request_id=exchange.request_id,
            api_key=record.api_key,
            method=exchange.head.method.encode("ascii"),
        )
        try:
            attempt.run(head, body)
            self._answer(attempt, request, record, timeouts, withhold_usage=injects_usage)
        except errors.UpstreamError as error:
            raise Failed(error, classify(error)) from error

    def _target(self) -> bytes:
        """Return path and query as the engine gets them, behind what its URL begins with."""
        return self._exchange.head.target

    def _engine_body(self, request: RequestBody, raw: bytes, record: EndpointRecord) -> tuple[bytes, bool]:
        """Return the body for the engine, and whether it asks for usage that the client did not want."""
        body, turns = raw, self._connection.turns
        if request.model != record.served_model:
            body = turns.run(len(body), request_body.set_model, body, record.served_model)
        injects_usage = self._config.router.inject_usage and request.stream and not request.include_usage
        if injects_usage and self._exchange.head.path in _USAGE_ROUTES:
            body = turns.run(len(body), request_body.with_include_usage, body, request)
        return body, injects_usage

    def _attempt_deadlines(self, timeouts: Timeouts, request: RequestBody) -> AttemptDeadlines:
        headers_s = _or_forever(timeouts.headers)
        if request.stream:
            headers_s = min(headers_s, _or_forever(timeouts.first_token))
        headers_s += self._prefill_s(timeouts, request)
        ping = self._config.router.stream_ping
        return AttemptDeadlines(
            connect_s=timeouts.connect,
            headers_s=headers_s,
            total=self._exchange.received_at + _or_forever(timeouts.total),
            ping_s=ping.interval if ping.mode != "off" and request.stream else FOREVER,
        )

    def _prefill_s(self, timeouts: Timeouts, request: RequestBody) -> float:
        """Return what the length of the prompt adds to the deadlines of the first token, in seconds."""
        if not timeouts.first_token_per_token:
            return 0.0
        if self._prompt_tokens is None:
            turns = self._connection.turns
            self._prompt_tokens = turns.run(self._body_bytes, request.prompt_token_estimate)
        return timeouts.first_token_per_token * self._prompt_tokens

    def _answer(
        self,
        attempt: Attempt,
        request: RequestBody,
        record: EndpointRecord,
        timeouts: Timeouts,
        *,
        withhold_usage: bool,
    ) -> None:
        head = attempt.head
        idle_s = _or_forever(timeouts.idle)
        rename = None
        if self._config.router.response_model == "requested" and request.model != record.served_model:
            rename = (record.served_model, request.model)
        if head.status >= 400:
            body = attempt.read_all(ERROR_BODY_MAX_BYTES, idle_s)
            raise errors.from_upstream(head.status, head.content_type, body, head.headers, rename=rename)
        is_events = head.content_type.startswith(EVENT_STREAM)
        if self._is_open and not is_events:
            attempt.upstream.close()
            raise errors.UpstreamProtocol()
        if (
            not is_events
            and head.framing.kind is FramingKind.LENGTH
            and head.framing.length == len(attempt.rest)
        ):
            self._answer_whole(attempt, rename)
            return
        if rename is not None and not is_events and b"json" in head.content_type:
            self._answer_edited(attempt, rename, idle_s)
            return
        self._relay(
            attempt, request, timeouts, is_events=is_events, rename=rename, withhold_usage=withhold_usage
        )

    def _answer_edited(self, attempt: Attempt, rename: tuple[str, str], idle_s: float) -> None:
        """Answer with a JSON body whose `model` has to change: it is read whole first."""
        self._send_body(attempt, attempt.read_all(self._config.router.max_event_bytes, idle_s), rename)

    def _answer_whole(self, attempt: Attempt, rename: tuple[str, str] | None) -> None:
        """Answer with a body that came in one read together with its head, as short ones do."""
        body = attempt.rest
        attempt.release()
        self._send_body(attempt, body, rename if b"json" in attempt.head.content_type else None)

    def _send_body(self, attempt: Attempt, body: bytes, rename: tuple[str, str] | None) -> None:
        exchange = self._exchange
        exchange.first_at = time.monotonic()
        self._take_usage(usage_in(body))
        if rename is not None:
            body = request_body.rename_model(body, *rename)
        exchange.is_answered = True
        exchange.is_stream = False
        exchange.status = attempt.head.status
        if not exchange.head.http11:
            self._connection.close_after = True
        self._connection.send(self._client_head(attempt, b"content-length: %d\r\n" % len(body)) + body)

    def _relay(
        self,
        attempt: Attempt,
        request: RequestBody,
        timeouts: Timeouts,
        *,
        is_events: bool,
        rename: tuple[str, str] | None,
        withhold_usage: bool,
    ) -> None:
        exchange, connection, head = self._exchange, self._connection, attempt.head
        framing = head.framing
        http11 = exchange.head.http11
        if not http11:
            connection.close_after = True
        sse, tap = self._readers(is_events=is_events, rename=rename, withhold_usage=withhold_usage)
        if framing.kind is FramingKind.NONE:
            lines = b"" if head.status == 204 else b"content-length: 0\r\n"
        elif framing.kind is FramingKind.LENGTH and sse is None:
            lines = b"content-length: %d\r\n" % framing.length
        else:
            lines = b"transfer-encoding: chunked\r\n" if http11 else b""
        first_token_s = _or_forever(timeouts.first_token) + self._prefill_s(timeouts, request)
        ping = self._config.router.stream_ping
        relay = Relay(
            connection,
            attempt.upstream,
            framing,
            b"" if self._is_open else self._client_head(attempt, lines),
            RelayDeadlines(
                first_byte=attempt.sent_at + first_token_s if request.stream else FOREVER,
                total=exchange.received_at + _or_forever(timeouts.total),
                idle_s=_or_forever(timeouts.idle),
                write_s=self._config.client.write,
                ping_s=ping.interval if is_events and ping.mode != "off" else FOREVER,
            ),
            client_http11=http11,
            sse=sse,
            tap=tap,
            ping=self._ping() if is_events and ping.mode != "off" else b"",
            ends_with_done=exchange.head.path in _USAGE_ROUTES,
        )
        if self._watched is not None:
            self._watched.relay = relay
        exchange.is_answered = True
        exchange.status = head.status
        exchange.is_stream = is_events
        is_done = False
        try:
            end = relay.run(attempt.rest, is_empty=framing.kind is FramingKind.NONE)
            is_done = True
        finally:
            if not is_done:
                attempt.upstream.close()
        exchange.first_at = relay.first_at
        self._take_usage(sse.usage if sse is not None else tap.usage() if tap is not None else None)
        self._finish_relay(relay, end, attempt)

    def _readers(
        self, *, is_events: bool, rename: tuple[str, str] | None, withhold_usage: bool
    ) -> tuple[SseRelay | None, UsageTap | None]:
        """Return what reads the body on its way: one for an event stream, another for anything else."""
        if not is_events:
            return None, UsageTap()
        max_event_bytes = self._config.router.max_event_bytes
        return SseRelay(withhold_usage=withhold_usage, rename=rename, max_event_bytes=max_event_bytes), None

    def _finish_relay(self, relay: Relay, end: RelayEnd, attempt: Attempt) -> None:
        exchange = self._exchange
        if end is RelayEnd.COMPLETE:
            attempt.release()
            return
        attempt.upstream.close()
        exchange.outcome = OUTCOMES.get(end, "stream_broken")
        if end is RelayEnd.CLIENT_GONE:
            exchange.status = 499
            phase = "streaming" if relay.first_at else "waiting"
            self._dispatcher._accountant.count(
                definitions.CLIENT_GONE, exchange.model or definitions.UNKNOWN, phase
            )
        else:
            exchange.reason = end.value
            self._dispatcher._accountant.count(
                definitions.UPSTREAM_ERRORS, exchange.pool or definitions.UNKNOWN, end.value
            )
        if relay.failure is not None:
            _log.error("relay_failed", exc_info=relay.failure, extra={"request_id": exchange.request_id})
        # The client's side was ended short (or by an error event): nothing may follow on this connection.
        self._connection.close_after = True

    def _take_usage(self, usage: Usage | None) -> None:
        if usage is not None:
            exchange = self._exchange
            exchange.prompt_tokens = usage.prompt_tokens
            exchange.completion_tokens = usage.completion_tokens
            exchange.cached_tokens = usage.cached_tokens

    def _client_head(self, attempt: Attempt, framing_lines: bytes) -> bytes:
        exchange = self._exchange
        head = attempt.head
        return b"".join(
            (
                b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason),
                headers.client_header_lines(head.headers),
                framing_lines,
                exchange.own_header_lines(),
                b""
                if exchange.head.keep_alive and not self._connection.close_after
                else b"connection: close\r\n",
                b"\r\n",
            )
        )

    # Signs of life while the engine is silent (case B07).

    def _ping(self) -> bytes:
        if self._config.router.stream_ping.mode == "comment":
            # No blank line behind it: some clients take that for an event (TECH section 11).
            return b": ping\n"
        return empty_chunk_event(self._exchange.request_id, self._exchange.model or "")

    def _ping_while_silent(self) -> None:
        data = self._ping()
        http11 = self._exchange.head.http11
        if http11:
            data = b"".join(encode_chunk(data))
        if not self._is_open:
            self._is_open = True
            self._connection.close_after = True
            exchange = self._exchange
            exchange.is_answered = True
            exchange.status = 200
            framing = "transfer-encoding: chunked\r\n" if http11 else ""
            data = (
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                f"cache-control: no-cache\r\n{framing}"
                f"x-request-id: {exchange.request_id}\r\nconnection: close\r\n\r\n"
            ).encode("latin-1") + data
        self._connection.send(data)

    def _end_opened_stream(self, error: errors.ApiError) -> None:
        """The status 200 has been sent with a ping: the error can only follow as an event."""
        exchange = self._exchange
        exchange.outcome, exchange.reason = error.code, error.reason
        event = errors.sse_event(error)
        if exchange.head.http11:
            event = b"".join(encode_chunk(event)) + LAST_CHUNK
        self._connection.send(event)


_USAGE_ROUTES = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Routes whose engines know `stream_options.include_usage`."""


_REJECTIONS = {"band_full": "full", "queue_timeout": "ttl"}
"""Codes of refusals by the names that the metric has for them."""


def _or_forever(seconds: float) -> float:
    return seconds if seconds else FOREVER
