"""A simulated engine for tests: started on a free port, driven over its control path.

def test_...(sim: SimEngine) -> None:          # or sims(3), sims(1, "--max-num-seqs", "4")
    sim.fault("status", "503", count=1)
    ...
    wait_until(lambda: sim.stats()["blocks_in_use"] == 0)
"""

from __future__ import annotations

import base64
import http.client
import json
from dataclasses import dataclass
from typing import Any

from tests.support.processes import Program, Programs

# Fast, so that tests are; what a test measures it sets itself.
_DEFAULTS = ("--port", "0", "--ttft-ms", "1", "--itl-ms", "1")


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A POST that reached the engine, byte for byte."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the last header of that name, in any case."""
        found = [value for key, value in self.headers if key.lower() == name.lower()]
        return found[-1] if found else None

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


class SimEngine:
    """A running `llmgw-sim`; its `Programs` stops it.

    Args:
        programs: the test's fixture.
        flags: of `llmgw-sim`; they win over the defaults here.

    Attributes:
        port: of its API.
        control_port: of `/sim/*`; works also while the engine refuses connections.
        url: of its API, without `/v1`.
    """

    def __init__(self, programs: Programs, *flags: str, host: str = "127.0.0.1") -> None:
        self.program: Program = programs.start("sim", "--host", host, *_DEFAULTS, *flags)
        line = self.program.wait_for_output(r'^\{"event": *"listening".*\}$').group()
        announced = json.loads(line)
        self.host = host
        self.port: int = announced["port"]
        self.control_port: int = announced["control_port"]
        scheme = "https" if "--tls-cert" in flags else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __repr__(self) -> str:
        return f"SimEngine({self.url})"

    def stats(self) -> dict[str, Any]:
        """Return what it counts: received, running, waiting, blocks_in_use, completed, aborted, ..."""
        return self._control("GET", "/sim/stats")

    def seen(self, n: int = 10) -> list[SeenRequest]:
        """Return the last `n` POSTs, oldest first."""
        answer = self._control("GET", f"/sim/requests?n={n}")
        return [
            SeenRequest(
                one["method"],
                one["target"],
                tuple((name, value) for name, value in one["headers"]),
                base64.b64decode(one["body_base64"]),
            )
            for one in answer["requests"]
        ]

    def fault(
        self, kind: str, arg: str | float | None = None, *, count: int | None = None, path: str | None = None
    ) -> None:
        """Set a fault (docs/sim.md lists them).

        Args:
            arg: the kind's own.
            count: how many requests it hits; None: all, until it is cleared.
            path: hits requests whose path begins so, of any method; None: every POST.
        """
        self._control("POST", "/sim/fault", {"kind": kind, "arg": arg, "count": count, "path": path})

    def clear_fault(self, kind: str | None = None) -> None:
        """Take one kind of fault back, or all."""
        self._control("DELETE", f"/sim/fault?kind={kind}" if kind else "/sim/fault")

    def configure(self, **changes: float) -> None:
        """Change ttft_ms, itl_ms, prefill_us_per_token, slow_factor, max_num_seqs or output_tokens."""
        self._control("POST", "/sim/config", changes)

    def reset(self) -> None:
        """Forget faults, counts, seen requests and cached prompts."""
        self._control("POST", "/sim/reset")

    def connect(self, timeout: float = 20.0) -> http.client.HTTPConnection:
        """Return a new connection to its API (without TLS)."""
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def close(self) -> None:
        """Stop it now, as SIGTERM does; not needed at a test's end."""
        self.program.stop()

    def _control(self, method: str, target: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection(self.host, self.control_port, timeout=20.0)
        try:
            connection.request(method, target, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        assert response.status == 200, f"{method} {target}: {response.status} {answer}"
        return answer
