"""The client API as falcon sees it: one table of routes, one error serializer."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import falcon
import orjson

from gateway.core import errors
from gateway.dispatch import Dispatcher
from gateway.exchange import Exchange
from gateway.routing import Routing
from gateway.server import EXCHANGE_KEY

_log = logging.getLogger(__name__)

_RELAYED_PATH = re.compile(r"/v1(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
"""Paths that may go to an engine: no dot segments, nothing that two parsers read differently."""

RELAYED_PATHS = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
)
"""Routes to engines that need no pattern; vLLM and SGLang serve the last two outside of /v1."""


class Relayed:
    """Everything that is sent on to an engine: `POST` with a `model` in its JSON body."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        exchange: Exchange = req.env[EXCHANGE_KEY]
        if exchange.head.path not in RELAYED_PATHS:
            # falcon looks at the decoded path and forgives slashes; the engine gets the path as written.
            raise errors.UnknownRoute()
        if exchange.failure is not None:
            raise exchange.failure
        self._dispatcher.run(exchange)

    def sink(self, req: falcon.Request, resp: falcon.Response, **_: str) -> None:
        exchange: Exchange = req.env[EXCHANGE_KEY]
        if not _RELAYED_PATH.fullmatch(exchange.head.path):
            raise errors.UnknownRoute()
        if req.method != "POST":
            raise errors.MethodNotAllowed(["POST"])
        self._dispatcher.run(exchange)


class Proxied:
    """Everything that plain proxy mode relays: `POST` and `GET` below /v1 and /synthesis/v1."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def sink(self, req: falcon.Request, resp: falcon.Response, **_: str) -> None:
        exchange: Exchange = req.env[EXCHANGE_KEY]
        if exchange.failure is not None:
            raise exchange.failure
        if not _RELAYED_PATH.fullmatch(exchange.head.path.removeprefix("/synthesis")):
            raise errors.UnknownRoute()
        if exchange.head.method not in ("GET", "POST"):
            raise errors.MethodNotAllowed(["GET", "POST"])
        self._dispatcher.run(exchange)


class Models:
    """The models of the configuration and their aliases, in OpenAI's shape."""

    def __init__(self, routing: Callable[[], Routing]) -> None:
        self._routing = routing
        self._created = int(time.time())

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        data = [self._describe(name) for name in self._routing().model_names]
        resp.data = orjson.dumps({"object": "list", "data": data})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, model_id: str) -> None:
        if model_id not in self._routing().model_names:
            raise errors.UnknownModel(model_id)
        resp.data = orjson.dumps(self._describe(model_id))

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "llmgw"}


class Health:
    """`/healthz`: the process answers. `/readyz`: it can serve a request."""

    def __init__(self, routing: Callable[[], Routing], is_draining: Callable[[], bool]) -> None:
        self._routing = routing
        self._is_draining = is_draining

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        routing = self._routing()
        health: dict[str, object] = {
            "ok": True,
            "in_flight": routing.in_flight_by_pool(),
            "queued": routing.queued_by_pool(),
        }
        if stuck := routing.stuck():
            health["runner_stuck"] = stuck
        resp.data = orjson.dumps(health)

    def on_get_ready(self, req: falcon.Request, resp: falcon.Response) -> None:
        reason = "shutting_down" if self._is_draining() else self._routing().why_not_ready()
        if reason is not None:
            resp.status = falcon.HTTP_503
        resp.data = orjson.dumps({"ready": reason is None, "reason": reason})


def make_app(
    dispatcher: Dispatcher, routing: Callable[[], Routing], is_draining: Callable[[], bool]
) -> falcon.App[falcon.Request, falcon.Response]:
    """Build the client API.

    Args:
        dispatcher: runs requests that go to an engine.
        routing: returns what is configured and known now.
        is_draining: whether this worker is shutting down.
    """
    app = _bare_app(routing, is_draining)
    relayed, models = Relayed(dispatcher), Models(routing)
    for path in RELAYED_PATHS:
        app.add_route(path, relayed)
    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{model_id:path}", models, suffix="one")
    app.add_sink(relayed.sink, prefix="/v1/")
    return app


def make_plain_app(
    dispatcher: Dispatcher, routing: Callable[[], Routing], is_draining: Callable[[], bool]
) -> falcon.App[falcon.Request, falcon.Response]:
    """Build the client API of plain proxy mode; arguments as for `make_app`."""
    app = _bare_app(routing, is_draining)
    proxied = Proxied(dispatcher)
    for prefix in ("/v1/", "/synthesis/v1/"):
        app.add_sink(proxied.sink, prefix=prefix)
    return app


def _bare_app(
    routing: Callable[[], Routing], is_draining: Callable[[], bool]
) -> falcon.App[falcon.Request, falcon.Response]:
    app = falcon.App(media_type="application/json")
    health = Health(routing, is_draining)
    app.add_route("/healthz", health)
    app.add_route("/readyz", health, suffix="ready")
    app.add_error_handler(errors.ApiError, _write_api_error)
    app.add_error_handler(falcon.HTTPError, _write_falcon_error)
    app.add_error_handler(Exception, _write_unexpected)
    return app


def _write_api_error(req: falcon.Request, resp: falcon.Response, ex: errors.ApiError, params: Any) -> None:
    exchange: Exchange = req.env[EXCHANGE_KEY]
    exchange.outcome, exchange.reason = ex.code, ex.reason
    resp.status = ex.status_line
    resp.content_type = "application/json"
    resp.data = ex.body()
    for name, value in ex.headers.items():
        resp.set_header(name, value)


def _write_falcon_error(
    req: falcon.Request, resp: falcon.Response, ex: falcon.HTTPError, params: Any
) -> None:
    if req.method not in falcon.COMBINED_METHODS:
        _write_api_error(req, resp, errors.MethodNotAllowed([]), params)
    elif ex.status_code == 404:
        _write_api_error(req, resp, errors.UnknownRoute(), params)
    elif ex.status_code == 405:
        allowed = dict(ex.headers or {}).get("Allow", "")
        _write_api_error(req, resp, errors.MethodNotAllowed(allowed.split(", ")), params)
    else:
        _write_api_error(req, resp, errors.MalformedRequest(ex.title or "", status=ex.status_code), params)


def _write_unexpected(req: falcon.Request, resp: falcon.Response, ex: Exception, params: Any) -> None:
    """The boundary: what nobody foresaw becomes a 500 that says nothing of it, and a traceback in the log."""
    exchange: Exchange = req.env[EXCHANGE_KEY]
    _log.error("request_failed", exc_info=ex, extra={"request_id": exchange.request_id})
    _write_api_error(req, resp, errors.InternalError(exchange.request_id), params)
