"""A real coordinator on a segment of its own, with the test in the launcher's place."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from conf import load as conf_load
from conf.schema import Auth, Config, Endpoint, Log, Model, Router
from shm import segment as shm_segment
from shm.layout import Sizes
from shm.segment import Segment
from tests.support.processes import Program, Programs
from tests.support.wait import wait_until


def config_of(endpoints: Sequence[Endpoint], **keys: Any) -> Config:
    """Return a configuration with quick scrapes and every model that `endpoints` name."""
    names = dict.fromkeys(endpoint.model for endpoint in endpoints)
    defaults = {
        "admin_listen": "127.0.0.1:0",
        "auth": Auth(enabled=False),
        "log": Log(format="json"),
        "router": Router(scrape_interval=0.1),
    }
    return Config(
        models=tuple(Model(name=name) for name in names), endpoints=tuple(endpoints), **(defaults | keys)
    )


class RunningCoordinator:
    """A segment, and a coordinator on it.

    Attributes:
        segment: attached here, as by the launcher.
        admin_url: of its admin listener.
    """

    def __init__(self, programs: Programs, config: Config, sizes: Sizes | None = None) -> None:
        self._programs = programs
        directory = Path(tempfile.mkdtemp(prefix="llmgw-test-", dir="/dev/shm"))
        directory.rmdir()
        self.segment = Segment.create(directory, sizes or Sizes(worker_slots=8))
        self.publish(config)
        self.start()

    def start(self, *arguments: str, pass_fds: Sequence[int] = ()) -> None:
        """Start it, also again on the same segment, and wait until it serves.

        Args:
            arguments: further ones.
            pass_fds: file descriptors that it inherits.
        """
        whole = ("--segment", str(self.segment.directory), *arguments)
        self.program: Program = self._programs.start("coordinator", *whole, pass_fds=pass_fds)
        line = self.program.wait_for_output(r'^\{.*"event":"coordinator_started".*\}$')
        self.admin_url = f"http://{json.loads(line[0])['admin_listen'][0]}"

    def publish(self, config: Config) -> int:
        """Publish a configuration, as the launcher does at a reload; return its generation."""
        return self.segment.publish_config(conf_load.encode(config))

    def reload(self, config: Config) -> None:
        """Publish a configuration and wait until it is in force."""
        generation = self.publish(config)
        wait_until(
            lambda: self.log_lines("config_taken_up", generation=generation),
            10,
            lambda: f"generation {generation}:\n{self.program.output()[-4000:]}",
        )

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        os.kill(self.program.pid, signal.SIGKILL)
        self.program.wait()

    @property
    def process(self) -> psutil.Process:
        """The process."""
        return psutil.Process(self.program.pid)

    def get(self, path: str, method: str = "GET") -> tuple[int, Mapping[str, str], bytes]:
        """Ask the admin listener; return status, headers (lower case) and body."""
        request = urllib.request.Request(self.admin_url + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, _lower(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _lower(error.headers), error.read()

    def endpoints(self) -> dict[str, dict[str, Any]]:
        """Return the endpoints as the API shows them, by id."""
        status, _, body = self.get("/api/v1/endpoints")
        assert status == 200, body
        return {endpoint["id"]: endpoint for endpoint in json.loads(body)["endpoints"]}

    def wait_state(self, endpoint: str, state: str, reason: str = "") -> dict[str, Any]:
        """Wait until an endpoint is in a state, for a reason, and return how it is shown."""

        def look() -> dict[str, Any] | None:
            view = self.endpoints()[endpoint]
            return view if (view["state"], view["reason"]) == (state, reason) else None

        found = wait_until(look, 15, lambda: f"{endpoint} {state} {reason}: {self.endpoints()}")
        assert found is not None
        return found

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return `/metrics` as Prometheus' own parser reads it."""
        status, _, body = self.get("/metrics")
        assert status == 200, body
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float | None:
        """Return one sample; None if it is not there."""
        return self.samples().get((name, frozenset(labels.items())))

    def log_lines(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of an event that carry `fields`."""
        lines = [json.loads(line) for line in self.program.output().splitlines() if line.startswith("{")]
        return [line for line in lines if {**fields, "event": event}.items() <= line.items()]

    def close(self) -> None:
        """Stop it and remove the segment; exit code 0 is part of every test."""
        try:
            if self.program.returncode is None:
                code = self.program.stop()
                assert code == 0, self.program.output()
        finally:
            self.segment.close()
            shm_segment.remove(self.segment.directory)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
