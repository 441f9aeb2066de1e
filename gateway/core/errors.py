"""Every error a client can get: status, type, code, and the bytes of its body.

Rules:
    - This is the only module that knows status codes. Others raise a class; the boundary asks it for
      `status_line`, `headers` and `body()`.
    - The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. With 429, 503 and 504 it also
      has `reason`, `retry_after` (whole seconds, at least 1) and `queue`, and `Retry-After` is sent.
    - A message tells the person what to do next. It names no internal host, path or class, and never holds
      the text of an exception.
    - An error body of an engine that is OpenAI-shaped goes on as it is, byte for byte. Any other is wrapped
      once, and what is not JSON is replaced: it may be a page of a proxy that names hosts.

Source: STYLE section 3.5 for the table; the recordings in tests/corpus/engines for what engines send.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import ClassVar

import orjson

from conf.errors import LlmgwError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_RETRYABLE = frozenset((429, 503, 504))
"""Statuses whose body says why and for how long."""
_RETRY_AFTER_MAX_S = 24 * 3600
_NO_QUEUE: Mapping[str, object] = {"depth": {}}

Headers = Sequence[tuple[bytes, bytes]]


class ApiError(LlmgwError):
    """What a client gets instead of an answer; abstract.

    Attributes:
        status: HTTP status.
        type: OpenAI's class of error.
        code: machine-readable, a closed set except for `UpstreamStatus`.
        reason: what `code` leaves open; equal to it where it leaves nothing open.
        param: the request's field that is at fault.
        message: for people.
        retry_after: whole seconds until a retry makes sense; None where the status does not call for it.
        headers: to be sent with it, spelled in lower case.
        queue: waiters of the pool, `{"depth": {band: count}}`.
    """

    status: int = 500
    type: str = SERVER_ERROR
    code: str = "internal_error"
    default_message: ClassVar[str] = "The gateway failed to answer this request."

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        reason: str | None = None,
        retry_after: float | None = None,
        queue: Mapping[str, object] | None = None,
    ) -> None:
        self.message = self.default_message if message is None else message
        self.param = param
        self.reason = reason or self.code
        self.queue = _NO_QUEUE if queue is None else queue
        self.retry_after: int | None = None
        self.headers: dict[str, str] = {}
        if self.status in _RETRYABLE:
            self.retry_after = _whole_seconds(1.0 if retry_after is None else retry_after)
            self.headers["retry-after"] = str(self.retry_after)
        super().__init__(self.message)

    @property
    def status_line(self) -> str:
        """The status with its phrase, as HTTP and WSGI spell it."""
        return _status_line(self.status)

    def body(self) -> bytes:
        """Serialise the error in OpenAI's shape."""
        error: dict[str, object] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.retry_after is not None:
            error["reason"] = self.reason
            error["retry_after"] = self.retry_after
            error["queue"] = self.queue
        return orjson.dumps({"error": error})


def _whole_seconds(seconds: float) -> int:
    """Round up to what `Retry-After` can say."""
    if not seconds > 1.0:  # also NaN
        return 1
    if seconds >= _RETRY_AFTER_MAX_S:
        return _RETRY_AFTER_MAX_S
    return int(-(-seconds // 1))


def _status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Status"


# The request is at fault.


class BadJson(ApiError):
    """The body is not JSON.

    Attributes:
        position: byte of the body at which it stops being JSON, from 0.
    """

    status = 400
    type = INVALID_REQUEST
    code = "invalid_json"

    def __init__(self, position: int, problem: str = "it is malformed") -> None:
        self.position = position
        super().__init__(f"The request body is not valid JSON: {problem} at byte {position}.")


class BadField(ApiError):
    """A field is missing or has a value that cannot be used."""

    status = 400
    type = INVALID_REQUEST
    code = "invalid_value"

    def __init__(self, param: str | None, message: str, *, is_missing: bool = False) -> None:
        if is_missing:
            self.code = "missing_field"
        super().__init__(message, param=param)


class MalformedRequest(ApiError):
    """The HTTP request itself is broken, or asks for something HTTP allows and this server refuses."""

    status = 400
    type = INVALID_REQUEST
    code = "malformed_request"
    default_message = "The HTTP request is malformed."

    def __init__(self, message: str | None = None, *, status: int = 400) -> None:
        self.status = status
        super().__init__(message)


class HeadTooLarge(ApiError):
    """Request line and headers are longer than the limits."""

    status = 431
    type = INVALID_REQUEST
    code = "headers_too_large"
    default_message = "The request headers are too large; send fewer or shorter ones."


class ContextTooLong(ApiError):
    """The prompt does not fit into the model's context."""

    status = 400
    type = INVALID_REQUEST
    code = "context_length_exceeded"
    default_message = "The prompt is longer than the model's context; shorten it."


class BadKey(ApiError):
    """No key, an unknown key, or one that is disabled or expired."""

    status = 401
    type = INVALID_REQUEST
    code = "invalid_api_key"
    default_message = "The API key is missing or not valid; send a valid one as 'Authorization: Bearer ...'."


class NotAllowed(ApiError):
    """The key may not do this."""

    status = 403
    type = "permission_error"
    code = "route_not_allowed"
    default_message = "This API key is not allowed to do this."

    def __init__(self, code: str, message: str | None = None) -> None:
        self.code = code
        super().__init__(message)


class UnknownModel(ApiError):
    """No model of this name is configured, or the key may not know of it."""

    status = 404
    type = INVALID_REQUEST
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        shown = model if len(model) <= 128 else model[:128] + "…"
        message = f"The model '{shown}' does not exist; GET /v1/models lists those that do."
        super().__init__(message, param="model")


class UnknownRoute(ApiError):
    """No such path."""

    status = 404
    type = INVALID_REQUEST
    code = "unknown_url"
    default_message = "This URL is not known; check the path and the base URL of your client."


class MethodNotAllowed(ApiError):
    """The path exists for other methods."""

    status = 405
    type = INVALID_REQUEST
    code = "method_not_allowed"

    def __init__(self, allowed: Iterable[str]) -> None:
        methods = ", ".join(filter(None, allowed))
        super().__init__(f"This method is not allowed here; use {methods or 'another one'}.")
        self.headers["allow"] = methods


class SlowBody(ApiError):
    """The client took too long to send its request."""

    status = 408
    type = INVALID_REQUEST
    code = "request_timeout"
    default_message = "The request did not arrive in time; send it again."


class Conflict(ApiError):
    """The admin API cannot do this in the present state."""

    status = 409
    type = INVALID_REQUEST
    code = "in_use"
    default_message = "This conflicts with the present state."

    def __init__(self, code: str, message: str | None = None) -> None:
        self.code = code
        super().__init__(message)


class BodyTooLarge(ApiError):
    """The request body is longer than `max_body_bytes`."""

    status = 413
    type = INVALID_REQUEST
    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is too large; at most {limit_bytes} bytes are accepted.")


class BadEncoding(ApiError):
    """A content encoding other than gzip, or gzip that is broken."""

    status = 415
    type = INVALID_REQUEST
    code = "unsupported_encoding"

    def __init__(self, encoding: str) -> None:
        if encoding == "gzip":
            message = "The request body cannot be decompressed as gzip."
        else:
            message = "This content encoding is not supported; send the body plain or with gzip."
        super().__init__(message)


# The request may be repeated later.


class RateLimited(ApiError):
    """A rate limit is used up; `reason` says which."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    default_message = "The rate limit is reached; retry after the time given."

    def __init__(self, kind: str, message: str | None = None, *, retry_after: float | None = None) -> None:
        """Refuse for a limit of a `kind`: `requests` or `tokens`."""
        self.type = kind
        super().__init__(message, reason=f"rate_limit_{kind}", retry_after=retry_after)


class BudgetExhausted(ApiError):
    """The budget is spent; clients are told not to retry by themselves."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    default_message = "The budget is used up; ask for a larger one or wait for the next period."

    def __init__(self, message: str | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(message, reason="budget_exhausted", retry_after=retry_after)
        self.headers["x-should-retry"] = "false"


class QueueFull(ApiError):
    """The queue of the band is full."""

    status = 503
    code = "band_full"
    default_message = "Too many requests of this priority are waiting; retry after the time given."


class Displaced(ApiError):
    """A request of a higher band took the place in the queue."""

    status = 503
    code = "displaced"
    default_message = "Requests of a higher priority took the place of this one; retry after the time given."


class PoolSaturated(ApiError):
    """The pool is saturated, and this band has no queue."""

    status = 503
    code = "pool_saturated"
    default_message = "All capacity for this model is in use; retry after the time given."


class NoEndpoint(ApiError):
    """No endpoint of the model can take the request."""

    status = 503
    code = "no_endpoint"

    def __init__(self, model: str, *, retry_after: float | None = None) -> None:
        super().__init__(
            f"The model '{model}' has no endpoint that can serve it now; retry later.",
            retry_after=retry_after,
        )


class RunnerStuck(ApiError):
    """The only endpoint of the model makes no progress."""

    status = 503
    code = "runner_stuck"
    default_message = "The model's engine makes no progress; retry later."


class ShuttingDown(ApiError):
    """This instance takes no more requests."""

    status = 503
    code = "shutting_down"
    default_message = "The gateway is shutting down; retry, and another instance will answer."


class QueueTimeout(ApiError):
    """The request waited in the queue until its time was over."""

    status = 504
    code = "queue_timeout"
    default_message = "The request waited too long for capacity; retry after the time given."

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int = 504,
        retry_after: float | None = None,
        queue: Mapping[str, object] | None = None,
    ) -> None:
        """Refuse; `status` is 503 in plain proxy mode."""
        self.status = status
        super().__init__(message, retry_after=retry_after, queue=queue)


# The engine is at fault.


class UpstreamError(ApiError):
    """An engine failed this request before a byte reached the client; abstract.

    `core.retry` decides what follows.
    """


class UpstreamUnreachable(UpstreamError):
    """No connection, or it broke before a byte of the response came."""

    status = 503
    code = "upstream_unreachable"
    default_message = "The model's engine cannot be reached; retry after the time given."


class UpstreamTimeout(UpstreamError):
    """The engine did not answer in time."""

    status = 504
    code = "upstream_timeout"
    default_message = "The model's engine did not answer in time; retry, or send a shorter request."


class UpstreamProtocol(UpstreamError):
    """What the engine sent is not an HTTP response."""

    status = 502
    code = "upstream_error"
    default_message = "The model's engine sent an answer that cannot be understood."


class UpstreamInterrupted(UpstreamError):
    """A body that had to be read whole broke off."""

    status = 502
    code = "upstream_error"
    default_message = "The model's engine broke off its answer; retry."


class UpstreamStatus(UpstreamError):
    """The engine answered with an error of its own; made by `from_upstream`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
        raw: bytes | None = None,
    ) -> None:
        """Take over an engine's error.

        Args:
            status: the engine's.
            message: the engine's, or ours where it has none.
            error_type: the engine's, else by the class of the status.
            code: the engine's as a string, else `upstream_error`.
            param: the engine's.
            retry_after: seconds the engine asked for.
            raw: the body to send, where the engine's own can be kept.
        """
        self.status = status
        self.type = error_type
        self.code = code
        self._raw = raw
        super().__init__(message, param=param, retry_after=retry_after)

    def body(self) -> bytes:
        """Return the engine's own body where it has OpenAI's shape, else an object made from it."""
        return super().body() if self._raw is None else self._raw


class StreamBroken(ApiError):
    """The engine failed after the first byte; sent as an SSE event, since the status is out."""

    status = 200
    code = "upstream_interrupted"
    default_message = "The model's engine broke off its answer; what has arrived is incomplete."


class InternalError(ApiError):
    """What nobody foresaw; the log has the rest under the request's id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The gateway failed to answer this request; report the request id {request_id}.")


class ClientGone(ApiError):
    """The client left: nobody is there to get this; 499 is for the log."""

    status = 499
    code = "client_gone"
    default_message = "The client closed the connection."

    @property
    def status_line(self) -> str:
        """The status with the phrase nginx made customary."""
        return "499 Client Closed Request"


def sse_event(error: ApiError) -> bytes:
    """Serialise an error as an event of a stream whose status has been sent.

    OpenAI's clients raise on a `data:` object with a member `error`, whatever the event's name.
    """
    return b"data: " + error.body() + b"\n\n"


# An engine's own errors.

_QUOTED = rb"""([`'"]|\\")"""


def from_upstream(
    status: int,
    content_type: bytes,
    body: bytes,
    headers: Headers = (),
    *,
    rename: tuple[str, str] | None = None,
) -> UpstreamStatus:
    """Make a client's error of an engine's error response.

    Args:
        status: 400 or above.
        content_type: as the engine spelled it; b"" if it sent none.
        body: whole body, decoded of its framing.
        headers: the response's headers; `Retry-After` is taken from them.
        rename: (name the engine knows the model by, name the client asked for): the first does not
            reach the client where it stands in quotes.

    Returns:
        The error with the engine's status. Its body is the engine's bytes if they are OpenAI-shaped, with
        `reason`, `retry_after` and `queue` added for 429, 503 and 504; flat (SGLang), FastAPI and plain
        string errors are wrapped once; anything else gives way to a message of ours.
    """
    retry_after = _engine_retry_after(headers)
    if rename is not None and rename[0] != rename[1]:
        body = _without_served_name(body, *rename)
    parsed = _parse_object(content_type, body)
    inner = parsed.get("error") if parsed is not None else None
    if parsed is not None and isinstance(inner, dict) and isinstance(inner.get("message"), str):
        error = _wrapped(status, inner, retry_after)
        error._raw = body
        if status in _RETRYABLE:
            error._raw = _with_retry_members(parsed, inner, error)
        return error
    if parsed is not None:
        found = _loose_error(parsed)
        if found is not None:
            return _wrapped(status, found, retry_after)
    message = f"The model's engine refused this request with status {status}."
    if status >= 500:
        message = f"The model's engine failed with status {status}; retry."
    return UpstreamStatus(
        status, message, error_type=_type_of(status), code="upstream_error", retry_after=retry_after
    )


def _parse_object(content_type: bytes, body: bytes) -> dict[str, object] | None:
    """Decode a JSON object; None for what is none, whatever the content type says."""
    if not body or body[:1] == b"<":
        return None
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _loose_error(parsed: dict[str, object]) -> dict[str, object] | None:
    """Find the error in an object that is not OpenAI-shaped."""
    inner = parsed.get("error")
    if isinstance(parsed.get("message"), str):
        return parsed  # SGLang: {"object": "error", "message", "type", "param", "code"}
    if isinstance(inner, str) and inner:  # {"error": "text", "error_type": ...}
        return {
            "message": inner,
            "type": parsed.get("error_type") or parsed.get("type"),
            "code": parsed.get("code"),
        }
    detail = parsed.get("detail")  # FastAPI: text, or a list of {"loc", "msg", "type"}
    if isinstance(detail, str) and detail:
        return {"message": detail}
    if isinstance(detail, dict) and isinstance(detail.get("message"), str):
        return detail
    if isinstance(detail, list):
        texts = [_validation_text(item) for item in detail if isinstance(item, dict)]
        if texts:
            return {"message": "; ".join(texts), "param": _validation_param(detail)}
    return None


def _validation_text(item: dict[str, object]) -> str:
    location = item.get("loc")
    where = ".".join(map(str, location)) if isinstance(location, list) else ""
    return f"{where}: {item.get('msg')}" if where else str(item.get("msg"))


def _validation_param(detail: list[object]) -> str | None:
    first = detail[0]
    location = first.get("loc") if isinstance(first, dict) else None
    if not isinstance(location, list):
        return None
    return ".".join(str(part) for part in location if part != "body") or None


def _wrapped(status: int, error: dict[str, object], retry_after: float | None) -> UpstreamStatus:
    code, param, kind = error.get("code"), error.get("param"), error.get("type")
    return UpstreamStatus(
        status,
        str(error["message"]),
        error_type=kind if isinstance(kind, str) and kind else _type_of(status),
        code=str(code) if isinstance(code, str | int) and code != "" else "upstream_error",
        param=param if isinstance(param, str) else None,
        retry_after=retry_after,
    )


def _type_of(status: int) -> str:
    if status == 429:
        return "requests"
    return INVALID_REQUEST if status < 500 else SERVER_ERROR


def _with_retry_members(parsed: dict[str, object], inner: dict[str, object], error: UpstreamStatus) -> bytes:
    """Add what clients of this gateway find in every 429, 503 and 504; the engine's own members stay."""
    added = {"reason": error.reason, "retry_after": error.retry_after, "queue": error.queue}
    return orjson.dumps({**parsed, "error": {**inner, **{k: v for k, v in added.items() if k not in inner}}})


def _engine_retry_after(headers: Headers) -> float | None:
    for name, value in headers:
        if name.lower() == b"retry-after" and value.isdigit():
            return float(value[:9])
    return None


def _without_served_name(body: bytes, served: str, requested: str) -> bytes:
    """Replace the engine's name of the model where it stands in quotes: "The model `x` does not exist"."""
    name = orjson.dumps(served)[1:-1]
    if name not in body:
        return body
    shown = orjson.dumps(requested)[1:-1]
    return re.sub(_QUOTED + re.escape(name) + rb"\1", lambda m: m.group(1) + shown + m.group(1), body)
