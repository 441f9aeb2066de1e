"""The admin listener: metrics, and what there is to see of the instance. Read-only so far.

    GET /metrics              Prometheus' text format
    GET /healthz              the coordinator answers
    GET /api/v1/status        version, processes, endpoints by state
    GET /api/v1/endpoints     every endpoint with its figures
    GET /api/v1/load          who runs and who waits, by pool, model and band

Errors have the shape that clients get elsewhere (gateway.core.errors). A path that is not there becomes no
label and no log line above DEBUG: scanners come by (B83).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

import falcon
import msgspec

from coordinator.admin import exposition
from coordinator.admin.views import EndpointsView, HealthView, View
from coordinator.fleet import Fleet
from gateway.core.errors import ApiError, InternalError, MalformedRequest, MethodNotAllowed, UnknownRoute

LOG = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


class UnknownAdminRoute(UnknownRoute):
    """No such path on this listener."""

    default_message = (
        "This URL is not known here; try /metrics, /api/v1/status, /api/v1/endpoints or /api/v1/load."
    )


class Page:
    """Something to GET that a function makes."""

    def __init__(self, content_type: str, make: Callable[[], bytes]) -> None:
        """Serve what `make` returns."""
        self._content_type = content_type
        self._make = make

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Answer with the page as it is now."""
        resp.content_type = self._content_type
        resp.data = self._make()


def make_app(fleet: Fleet) -> falcon.App[falcon.Request, falcon.Response]:
    """Return the WSGI application.

    Args:
        fleet: what to show.
    """
    page = exposition.Exposition(fleet).page

    def json(make: Callable[[], View]) -> Page:
        return Page(falcon.MEDIA_JSON, lambda: _encode(make()))

    app = falcon.App()
    app.add_route("/metrics", Page(exposition.CONTENT_TYPE, page))
    app.add_route("/healthz", json(HealthView))
    app.add_route("/api/v1/status", json(fleet.status))
    app.add_route("/api/v1/endpoints", json(lambda: EndpointsView(endpoints=fleet.endpoints())))
    app.add_route("/api/v1/load", json(fleet.load))
    app.add_error_handler(Exception, _on_exception)
    app.add_error_handler(falcon.HTTPError, _on_http_error)
    return app


def _on_http_error(
    _req: falcon.Request, resp: falcon.Response, exc: falcon.HTTPError, _params: dict[str, str]
) -> None:
    if isinstance(exc, falcon.HTTPNotFound):
        error: ApiError = UnknownAdminRoute()
    elif isinstance(exc, falcon.HTTPMethodNotAllowed):
        error = MethodNotAllowed(("GET",))
    else:
        error = MalformedRequest(exc.description or exc.title)
    _send(resp, error)


def _on_exception(
    req: falcon.Request, resp: falcon.Response, _exc: Exception, _params: dict[str, str]
) -> None:
    request_id = uuid.uuid4().hex
    LOG.exception("admin_request_failed", extra={"request_id": request_id, "path": req.path})
    _send(resp, InternalError(request_id))


def _send(resp: falcon.Response, error: ApiError) -> None:
    resp.status = error.status_line
    resp.content_type = falcon.MEDIA_JSON
    resp.set_headers(error.headers)
    resp.data = error.body()
