"""The control path of the simulated engine, `/sim/*`: what tests ask and order."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import orjson

from agent.sim.app import App, make_timing
from agent.sim.connection import Connection
from agent.sim.errors import EngineError
from agent.sim.faults import FaultError, make_fault
from agent.sim.http import Request
from agent.sim.reply import Envelope, respond
from agent.sim.requests import decode


class Control:
    """Answers `/sim/*` on behalf of an `App`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._routes: dict[tuple[str, str], Callable[[Request], dict[str, Any]]] = {
            ("GET", "/sim/stats"): self._get_stats,
            ("GET", "/sim/requests"): self._get_requests,
            ("GET", "/sim/fault"): self._get_faults,
            ("POST", "/sim/fault"): self._post_fault,
            ("DELETE", "/sim/fault"): self._delete_fault,
            ("POST", "/sim/reset"): self._post_reset,
            ("POST", "/sim/config"): self._post_config,
        }

    def on_request(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        """Answer; 404 tells what there is, 400 what is wrong."""
        route = self._routes.get((request.method, request.path))
        if route is None:
            known = ", ".join(" ".join(one) for one in self._routes)
            respond(connection, 404, envelope, orjson.dumps({"detail": f"There are {known}"}))
            return
        try:
            answer = route(request)
        except (FaultError, EngineError) as error:
            respond(connection, 400, envelope, orjson.dumps({"detail": str(error)}))
            return
        respond(connection, 200, envelope, orjson.dumps(answer))

    def _get_stats(self, request: Request) -> dict[str, float]:
        app, engine = self._app, self._app.engine
        counts = engine.counts
        return {
            "received": app.received,
            "refused": app.refused,
            "running": engine.running,
            "waiting": engine.waiting,
            "hung": app.hung,
            "blocks_in_use": engine.pool.in_use,
            "blocks_idle": engine.pool.idle,
            "num_blocks": engine.pool.num_blocks,
            "completed": counts.completed,
            "aborted": counts.aborted,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "generation_tokens": counts.generation_tokens,
            "max_running_seen": counts.max_running_seen,
            "max_waiting_seen": counts.max_waiting_seen,
            "connections_open": len(app.connections),
            "connections_accepted": app.accepted,
        }

    def _get_requests(self, request: Request) -> dict[str, Any]:
        wanted = parse_qs(request.target.partition("?")[2]).get("n", ["10"])[0]
        if not wanted.isdigit():
            raise FaultError(f"n: {wanted!r} is no number")
        kept = list(self._app.kept)[-int(wanted) :] if int(wanted) else []
        return {
            "requests": [
                {
                    "method": one.method,
                    "target": one.target,
                    "headers": [
                        [name.decode("latin-1"), value.decode("latin-1")] for name, value in one.headers
                    ],
                    "body_bytes": len(one.body),
                    "body_sha256": hashlib.sha256(one.body).hexdigest(),
                    "body_base64": base64.b64encode(one.body).decode(),
                }
                for one in kept
            ]
        }

    def _get_faults(self, request: Request) -> dict[str, Any]:
        return {
            "faults": [
                {
                    "kind": fault.kind.value,
                    "arg": fault.arg,
                    "count": fault.left,
                    "path": fault.path,
                    "hits": fault.hits,
                }
                for fault in self._app.faults
            ]
        }

    def _post_fault(self, request: Request) -> dict[str, Any]:
        body = decode(request.body)
        unknown = body.keys() - {"kind", "arg", "count", "path"}
        if unknown:
            raise FaultError(f"unknown {', '.join(sorted(unknown))}; allowed: kind, arg, count, path")
        left = body.get("count")
        if left is not None and not isinstance(left, int):
            raise FaultError(f"count: {left!r} is no number")
        arg = body.get("arg")
        self._app.set_fault(
            make_fault(
                str(body.get("kind")), None if arg is None else str(arg), left, str(body.get("path") or "")
            )
        )
        return self._get_faults(request)

    def _delete_fault(self, request: Request) -> dict[str, Any]:
        kind = parse_qs(request.target.partition("?")[2]).get("kind", [""])[0]
        self._app.clear_faults(make_fault(kind).kind if kind else None)
        return self._get_faults(request)

    def _post_reset(self, request: Request) -> dict[str, float]:
        self._app.clear_faults()
        self._app.reset()
        return self._get_stats(request)

    def _post_config(self, request: Request) -> dict[str, float]:
        app, engine, limits = self._app, self._app.engine, self._app.settings.limits
        timing = engine.timing
        config = {
            "ttft_ms": timing.ttft_s * 1e3,
            "prefill_us_per_token": timing.prefill_s_per_token * 1e6,
            "itl_ms": timing.itl_s * 1e3,
            "slow_factor": timing.slow_factor,
            "max_num_seqs": engine.max_num_seqs,
            "output_tokens": limits.output_tokens,
        }
        changes = decode(request.body)
        for name, value in changes.items():
            if name not in config:
                raise FaultError(f"unknown {name}; allowed: {', '.join(config)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise FaultError(f"{name}: {value!r} is no number from 0 on")
            config[name] = value
        engine.timing = make_timing(
            ttft_ms=config["ttft_ms"],
            prefill_us_per_token=config["prefill_us_per_token"],
            itl_ms=config["itl_ms"],
            slow_factor=config["slow_factor"],
        )
        engine.resize(max(1, int(config["max_num_seqs"])), time.monotonic())
        limits = replace(limits, output_tokens=max(1, int(config["output_tokens"])))
        app.settings = replace(app.settings, limits=limits)
        return config
