from __future__ import annotations

import json

import pytest

from gateway.core import errors
from gateway.core.errors import from_upstream

JSON = b"application/json"

# STYLE 3.5, row by row: error, status, type, code, reason.
TABLE = [
    (errors.BadJson(7), 400, "invalid_request_error", "invalid_json", "invalid_json"),
    (errors.BadField("n", "no"), 400, "invalid_request_error", "invalid_value", "invalid_value"),
    (
        errors.BadField("n", "no", is_missing=True),
        400,
        "invalid_request_error",
        "missing_field",
        "missing_field",
    ),
    (
        errors.ContextTooLong(),
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "context_length_exceeded",
    ),
    (errors.BadKey(), 401, "invalid_request_error", "invalid_api_key", "invalid_api_key"),
    (errors.NotAllowed("pin_not_allowed"), 403, "permission_error", "pin_not_allowed", "pin_not_allowed"),
    (errors.UnknownModel("x"), 404, "invalid_request_error", "model_not_found", "model_not_found"),
    (errors.UnknownRoute(), 404, "invalid_request_error", "unknown_url", "unknown_url"),
    (
        errors.MethodNotAllowed(["POST"]),
        405,
        "invalid_request_error",
        "method_not_allowed",
        "method_not_allowed",
    ),
    (errors.SlowBody(), 408, "invalid_request_error", "request_timeout", "request_timeout"),
    (errors.Conflict("stale_epoch"), 409, "invalid_request_error", "stale_epoch", "stale_epoch"),
    (errors.BodyTooLarge(9), 413, "invalid_request_error", "body_too_large", "body_too_large"),
    (errors.BadEncoding("br"), 415, "invalid_request_error", "unsupported_encoding", "unsupported_encoding"),
    (errors.RateLimited("requests"), 429, "requests", "rate_limit_exceeded", "rate_limit_requests"),
    (errors.RateLimited("tokens"), 429, "tokens", "rate_limit_exceeded", "rate_limit_tokens"),
    (errors.BudgetExhausted(), 429, "insufficient_quota", "insufficient_quota", "budget_exhausted"),
    (errors.QueueFull(), 503, "server_error", "band_full", "band_full"),
    (errors.Displaced(), 503, "server_error", "displaced", "displaced"),
    (errors.PoolSaturated(), 503, "server_error", "pool_saturated", "pool_saturated"),
    (errors.NoEndpoint("x"), 503, "server_error", "no_endpoint", "no_endpoint"),
    (errors.RunnerStuck(), 503, "server_error", "runner_stuck", "runner_stuck"),
    (errors.ShuttingDown(), 503, "server_error", "shutting_down", "shutting_down"),
    (errors.UpstreamUnreachable(), 503, "server_error", "upstream_unreachable", "upstream_unreachable"),
    (errors.QueueTimeout(), 504, "server_error", "queue_timeout", "queue_timeout"),
    (errors.QueueTimeout(status=503), 503, "server_error", "queue_timeout", "queue_timeout"),
    (errors.UpstreamTimeout(), 504, "server_error", "upstream_timeout", "upstream_timeout"),
    (errors.UpstreamProtocol(), 502, "server_error", "upstream_error", "upstream_error"),
    (errors.UpstreamInterrupted(), 502, "server_error", "upstream_error", "upstream_error"),
    (errors.StreamBroken(), 200, "server_error", "upstream_interrupted", "upstream_interrupted"),
    (errors.ClientGone(), 499, "server_error", "client_gone", "client_gone"),
    (errors.InternalError("req-1"), 500, "server_error", "internal_error", "internal_error"),
]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "reason"), TABLE, ids=[f"{row[3]}_{row[1]}" for row in TABLE]
)
def test_each_error_is_what_the_table_says(
    error: errors.ApiError, status: int, kind: str, code: str, reason: str
) -> None:
    assert (error.status, error.type, error.code, error.reason) == (status, kind, code, reason)
    assert error.status_line.startswith(f"{status} ")
    body = json.loads(error.body())["error"]
    assert (body["type"], body["code"]) == (kind, code)
    assert body["message"] == error.message


@pytest.mark.parametrize("error", [row[0] for row in TABLE], ids=[row[3] for row in TABLE])
def test_429_503_and_504_say_why_and_when_to_retry_and_others_do_not(error: errors.ApiError) -> None:
    body = json.loads(error.body())["error"]
    if error.status in (429, 503, 504):
        assert body["reason"] == error.reason
        assert body["retry_after"] == 1
        assert body["queue"] == {"depth": {}}
        assert error.headers["retry-after"] == "1"
    else:
        assert set(body) == {"message", "type", "param", "code"}
        assert "retry-after" not in error.headers


@pytest.mark.parametrize(
    ("seconds", "sent"),
    [(0, 1), (-3, 1), (0.2, 1), (1.0, 1), (1.01, 2), (17.0, 17), (float("nan"), 1), (1e300, 86400)],
)
def test_retry_after_is_whole_seconds_and_at_least_one(seconds: float, sent: int) -> None:
    error = errors.RateLimited("tokens", retry_after=seconds)
    assert error.headers["retry-after"] == str(sent)
    assert json.loads(error.body())["error"]["retry_after"] == sent


def test_exhausted_budget_tells_clients_not_to_retry() -> None:
    assert errors.BudgetExhausted().headers["x-should-retry"] == "false"


def test_queue_snapshot_is_passed_on() -> None:
    error = errors.QueueFull(queue={"depth": {"gold": 3}})
    assert json.loads(error.body())["error"]["queue"] == {"depth": {"gold": 3}}


def test_method_not_allowed_names_the_methods() -> None:
    assert errors.MethodNotAllowed(["GET", "HEAD"]).headers["allow"] == "GET, HEAD"


def test_sse_event_holds_the_error_and_ends_the_event() -> None:
    event = errors.sse_event(errors.StreamBroken())
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["code"] == "upstream_interrupted"


def test_long_model_names_do_not_flood_the_message() -> None:
    assert len(errors.UnknownModel("m" * 10_000).message) < 300


# What engines send.


def test_b15_openai_shaped_error_of_an_engine_passes_byte_for_byte() -> None:
    body = b'{"error":{"message":"ctx len","type":"BadRequestError","code":400}}'
    error = from_upstream(400, JSON, body)
    assert error.body() == body
    assert (error.status, error.type, error.code) == (400, "BadRequestError", "400")


def test_b15_page_of_a_proxy_becomes_one_error_object_without_its_text() -> None:
    error = from_upstream(502, b"text/html", b"<html>nginx on node17.internal</html>")
    body = json.loads(error.body())
    assert error.status == 502
    assert body["error"]["code"] == "upstream_error"
    assert b"html" not in error.body()
    assert b"node17" not in error.body()


@pytest.mark.parametrize(
    ("body", "message", "code", "param"),
    [
        (
            b'{"object":"error","message":"too long","type":"T","param":"p","code":40303}',
            "too long",
            "40303",
            "p",
        ),
        (b'{"detail":"Not Found"}', "Not Found", "upstream_error", None),
        (
            b'{"detail":[{"loc":["body","n"],"msg":"bad","type":"t"},{"loc":["body"],"msg":"worse"}]}',
            "body.n: bad; body: worse",
            "upstream_error",
            "n",
        ),
        (b'{"error":"model is loading"}', "model is loading", "upstream_error", None),
        (
            b'{"error":{"code":500}}',
            "The model's engine failed with status 500; retry.",
            "upstream_error",
            None,
        ),
        (b'["x"]', "The model's engine failed with status 500; retry.", "upstream_error", None),
        (b"", "The model's engine failed with status 500; retry.", "upstream_error", None),
        (
            b'{"error":{"message":',
            "The model's engine failed with status 500; retry.",
            "upstream_error",
            None,
        ),
        (b'{"detail":[]}', "The model's engine failed with status 500; retry.", "upstream_error", None),
    ],
)
def test_b15_other_shapes_are_wrapped_once(body: bytes, message: str, code: str, param: str | None) -> None:
    error = json.loads(from_upstream(500, JSON, body).body())["error"]
    assert (error["message"], error["code"], error["param"]) == (message, code, param)
    assert isinstance(error["type"], str)


def test_engine_without_a_type_gets_one_by_the_class_of_its_status() -> None:
    assert from_upstream(404, JSON, b"").type == "invalid_request_error"
    assert from_upstream(429, JSON, b"").type == "requests"
    assert from_upstream(500, JSON, b"").type == "server_error"


def test_back_pressure_of_an_engine_keeps_its_members_and_gains_ours() -> None:
    body = b'{"error":{"message":"busy","type":"T","code":"overloaded","extra":1},"more":2}'
    error = from_upstream(503, JSON, body, [(b"Retry-After", b"7")])
    sent = json.loads(error.body())
    assert sent["more"] == 2
    assert sent["error"].items() >= {"message": "busy", "type": "T", "code": "overloaded", "extra": 1}.items()
    assert sent["error"]["retry_after"] == 7
    assert sent["error"]["reason"] == "overloaded"
    assert error.headers["retry-after"] == "7"


@pytest.mark.parametrize("value", [b"Wed, 21 Oct 2026 07:28:00 GMT", b"-1", b"", b"soon"])
def test_retry_after_that_is_not_in_seconds_counts_as_one(value: bytes) -> None:
    assert from_upstream(429, JSON, b"{}", [(b"retry-after", value)]).retry_after == 1


def test_b91_error_of_an_engine_does_not_show_the_name_it_knows_the_model_by() -> None:
    text = 'The model `m-int` does not exist, "m-int" neither; say m-int-2.'
    body = json.dumps({"error": {"message": text, "code": 404}}).encode()
    error = from_upstream(404, JSON, body, rename=("m-int", "chat"))
    assert json.loads(error.body())["error"]["message"] == (
        'The model `chat` does not exist, "chat" neither; say m-int-2.'
    )
