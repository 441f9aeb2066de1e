"""Engines for tests: the simulated one and the real llama.cpp, started under the care of `Programs`."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from typing import Any

import pytest

from bin.engines.environment import EngineError
from bin.engines.llamacpp import TINY, LlamaCpp
from bin.engines.process import free_port
from tests.support.processes import Program, Programs
from tests.support.wait import wait_until

# Per kind: what it works on, and what waits inside it.
_LOAD_METRICS = {
    "sim": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "llamacpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
}


class Engine:
    """An engine that answers.

    Attributes:
        kind: `engine` of an endpoint in the configuration.
        served_model: the name it knows its model by.
        url: without `/v1`.
    """

    def __init__(self, program: Program, kind: str, url: str, served_model: str) -> None:
        self.program = program
        self.kind = kind
        self.url = url
        self.served_model = served_model

    def __repr__(self) -> str:
        return f"Engine({self.kind!r}, {self.url!r})"

    def wait_ready(self, timeout: float) -> None:
        """Wait until it is healthy."""

        def is_healthy() -> bool:
            assert self.program.returncode is None, f"{self!r} ended:\n{self.program.output()[-4000:]}"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                    return bool(response.status == 200)
            except OSError:
                return False

        wait_until(is_healthy, timeout, lambda: f"{self!r}:\n{self.program.output()[-4000:]}")

    def endpoint(self, identifier: str = "engine-1", model: str = "chat-model") -> dict[str, Any]:
        """Return its entry for `endpoints` of a configuration."""
        return {
            "id": identifier,
            "model": model,
            "url": self.url,
            "engine": self.kind,
            "served_model": self.served_model,
        }

    def load(self) -> int:
        """Return how many requests it has, those in its own queue included."""
        names = _LOAD_METRICS[self.kind]
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return sum(
            int(float(line.rpartition(" ")[2])) for line in lines if re.split("[{ ]", line)[0] in names
        )

    def wait_idle(self, within: float = 1.0) -> None:
        """Fail unless it has nothing to do within so many seconds."""
        wait_until(lambda: self.load() == 0, within, f"nothing to do at {self!r}")

    def set_fault(self, kind: str, arg: str | None = None, count: int | None = None) -> None:
        """Have a simulated engine fail; see `agent.sim.faults`."""
        self.control("POST", "/sim/fault", {"kind": kind, "arg": arg, "count": count})

    def clear_faults(self) -> None:
        """Have a simulated engine behave."""
        self.control("DELETE", "/sim/fault")

    def control(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask a simulated engine's control path; return the decoded answer."""
        content = json.dumps({key: value for key, value in (body or {}).items() if value is not None})
        request = urllib.request.Request(self.url + path, method=method, data=content.encode())
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.loads(response.read() or b"null")


def start_sim(programs: Programs, *flags: str, model: str = "sim-model") -> Engine:
    """Start a simulated engine on a free port.

    Args:
        flags: of `llmgw-sim`.
    """
    program = programs.start("sim", "--port", "0", "--model", model, *flags)
    match = program.wait_for_output(r'^\{"event": ?"listening".*\}$')
    port = json.loads(match[0])["port"]
    return Engine(program, "sim", f"http://127.0.0.1:{port}", model)


def start_llamacpp(programs: Programs, *flags: str) -> Engine:
    """Start the real llama.cpp with the tiny random model, two slots; answers may be longer than its context.

    Args:
        flags: of llama-server.
    """
    llamacpp = LlamaCpp()
    require(llamacpp.install)
    port = free_port()
    program = programs.start_command(
        llamacpp.command(TINY, port, "--threads", "1", "--context-shift", *flags)
    )
    engine = Engine(program, "llamacpp", f"http://127.0.0.1:{port}", TINY.served_name)
    engine.wait_ready(30)
    return engine


def require(install: Any) -> None:
    """Install an engine; where that is impossible, fail on CI, and skip elsewhere with the reason."""
    try:
        install()
    except EngineError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no engine on this machine: {error}")
