"""What a gateway says afterwards of a request: given back, counted, logged."""

from __future__ import annotations

import json
from typing import Any

from tests.support.gateway import Gateway
from tests.support.wait import wait_until


def in_flight(gateway: Gateway) -> int:
    """Return the requests that all workers have under way at engines."""
    status, body = gateway.get("/healthz")
    assert status == 200
    return int(sum(json.loads(body)["in_flight"].values()))


def wait_idle(gateway: Gateway, timeout: float = 5.0) -> None:
    """Wait until every in-flight count has been given back."""
    wait_until(
        lambda: in_flight(gateway) == 0, timeout, lambda: f"in flight: {in_flight(gateway)}", interval=0.02
    )


def line_of(gateway: Gateway, request_id: str, timeout: float = 5.0) -> dict[str, Any]:
    """Return the access line of a request; there is exactly one."""
    lines = wait_until(
        lambda: gateway.access_lines(request_id=request_id),
        timeout,
        lambda: f"the line of {request_id}:\n{gateway.program.output()[-4000:]}",
    )
    assert len(lines) == 1
    return lines[0]


def settled(gateway: Gateway, request_id: str, timeout: float = 5.0) -> dict[str, Any]:
    """Wait for the end of a request, prove that it gave everything back, and return its line."""
    line = line_of(gateway, request_id, timeout)
    wait_idle(gateway, timeout)
    return line


class Ledger:
    """The metrics as they were, to tell what was counted since."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before = gateway.metrics()

    def grew(self, name: str, **labels: str) -> float:
        """Return by how much the samples of `name` that carry `labels` have grown together."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value - self._before.get(sample, 0.0)
            for sample, value in self._gateway.metrics().items()
            if sample.partition("{")[0] == name and all(label in sample for label in wanted)
        )
