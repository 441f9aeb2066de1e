"""A real gateway for tests: `bin/llmgw-gateway` with its workers and its coordinator, on free ports.

Rules:
    - A gateway has a configuration file and a `state_dir` of its own below the test's temporary folder.
    - Ports are chosen by the kernel; the launcher writes them to `state_dir/addresses.json`.
    - `close()` proves that the gateway left nothing: no process of its session, no folder in shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.processes import Program, Programs
from tests.support.wait import wait_until

SEGMENTS = Path("/dev/shm")


def endpoint(identifier: str, url: str, *, model: str = "chat-model", **keys: Any) -> dict[str, Any]:
    """Return one entry of `endpoints` for a configuration; `keys` are further keys of it."""
    return {"id": identifier, "model": model, "url": url, "engine": "sim", **keys}


def config_for(endpoints: Iterable[Mapping[str, Any]], **keys: Any) -> dict[str, Any]:
    """Return a configuration that serves `endpoints`, with every model that they name.

    Args:
        keys: top-level keys that replace the defaults of tests: one worker, quick scrapes, no keys.
    """
    listed = [dict(entry) for entry in endpoints]
    names = dict.fromkeys(entry["model"] for entry in listed)
    return {
        "workers": 1,
        "auth": {"enabled": False},
        "router": {"scrape_interval": "200ms"},
        "models": [{"name": name} for name in names],
        "endpoints": listed,
        **keys,
    }


class Gateway:
    """A gateway process tree, from the start of its launcher to the proof that it is gone.

    Attributes:
        program: the launcher.
        config_file: read again by `reload()`.
        url: `http://host:port` of the first client address.
        admin_url: the same of the admin listener.
        segment: its folder in shared memory.
    """

    def __init__(self, programs: Programs, folder: Path, config: Mapping[str, Any], env: Mapping[str, str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file = folder / "llmgw.yaml"
        self.state_dir = folder / "state"
        self._programs = programs
        self._env = dict(env)
        self._segments: list[Path] = []
        self._killed = False
        self.write_config(config)
        self.start()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration file; addresses and `state_dir` are the fixture's unless given."""
        whole = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "state_dir": str(self.state_dir)}
        self.config_file.write_text(yaml.safe_dump(whole | dict(config), sort_keys=False))

    def start(self, timeout: float = 30.0) -> None:
        """Start the launcher, also again after `stop()` or `kill()`, and wait until it is ready."""
        (self.state_dir / "addresses.json").unlink(missing_ok=True)
        self._killed = False
        self.program: Program = self._programs.start("gateway", *self._arguments(), env=self._env)
        addresses: Any = wait_until(self._read_addresses, timeout, self._why("its addresses"))
        self.urls = tuple(f"http://{address}" for address in addresses["listen"])
        self.url = self.urls[0]
        self.admin_url = f"http://{addresses['admin']}"
        self.segment = Path((self.state_dir / "segment").read_text().strip())
        self._segments.append(self.segment)
        self.wait_ready(timeout)

    @property
    def base_url(self) -> str:
        """What OpenAI's clients want as `base_url`."""
        return f"{self.url}/v1"

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self.program.pid

    def processes(self, kind: str | None = None) -> list[psutil.Process]:
        """Return the live processes of the tree.

        Args:
            kind: only those started as `boot.py <kind>`: `workers` (gunicorn's parent and every worker) or
                `coordinator`.
        """
        return [
            process for process in self.program.processes() if kind is None or kind in process.cmdline()[1:4]
        ]

    def get(self, path: str, *, admin: bool = False, timeout: float = 5.0) -> tuple[int, bytes]:
        """GET a path of the client listener (or of the admin one) and return status and body.

        Raises:
            OSError: nobody answered.
        """
        base = self.admin_url if admin else self.url
        try:
            with urllib.request.urlopen(base + path, timeout=timeout) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def is_ready(self) -> bool:
        """Tell whether `/readyz` answers 200."""
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until requests can be served."""
        wait_until(lambda: self._alive() and self.is_ready(), timeout, self._why("/readyz"), interval=0.05)

    def admin_json(self, path: str) -> Any:
        """Return the decoded body of a path of the admin listener."""
        status, body = self.get(path, admin=True)
        assert status == 200, f"{path}: {status} {body[:500]!r}"
        return json.loads(body)

    def metrics(self) -> dict[str, float]:
        """Return the samples of `/metrics`: `name{labels}` as written, and its value."""
        status, body = self.get("/metrics", admin=True)
        assert status == 200, f"/metrics: {status}"
        lines = (line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines if name}

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of `name` that carry `labels`; 0 where there is none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == name and all(label in sample for label in wanted)
        )

    def log_lines(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the JSON lines written so far whose keys have the values of `fields`."""
        found = []
        for line in self.program.output().splitlines():
            if line.startswith("{") and line.endswith("}"):
                entry = json.loads(line)
                if fields.items() <= entry.items():
                    found.append(entry)
        return found

    def access_lines(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of requests (they alone have `duration_ms`) that carry `fields`."""
        return [line for line in self.log_lines(**fields) if "duration_ms" in line]

    def reload(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration and tell the launcher; does not wait until it is in force."""
        self.write_config(config)
        self.program.signal(signal.SIGHUP)

    def stop(self, timeout: float = 20.0) -> int:
        """Drain and end it (SIGTERM); return the exit code."""
        return self.program.stop(timeout)

    def kill(self) -> None:
        """Kill the launcher alone (SIGKILL). Its segment may then stay until the next start."""
        self._killed = True
        os.kill(self.pid, signal.SIGKILL)
        self.program.wait()

    def kill_all(self) -> None:
        """Kill every process of it at once (SIGKILL)."""
        self._killed = True
        self.program.kill_session()

    def close(self) -> None:
        """Stop it and prove that nothing is left.

        Raises:
            AssertionError: a process had to be killed, or a folder in shared memory stayed.
        """
        try:
            if self.program.returncode is None:
                self.stop()
            wait_until(
                lambda: not self.program.processes(),
                5.0,
                lambda: f"no process left: {self.program.processes()}",
            )
        finally:
            self.program.kill_session()
        left = [segment for segment in self._segments if segment.exists()]
        for segment in left:
            _remove(segment)
        assert self._killed or not left, f"the gateway left {left}:\n{self.program.output()}"

    def _arguments(self) -> tuple[str, ...]:
        return "--config", str(self.config_file)

    def _alive(self) -> bool:
        assert self.program.returncode is None, f"{self.program!r} ended:\n{self.program.output()}"
        return True

    def _read_addresses(self) -> Any:
        self._alive()
        try:
            return json.loads((self.state_dir / "addresses.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _why(self, what: str) -> Any:
        return lambda: f"{what} of {self.program!r}:\n{self.program.output()[-8000:]}"


class PlainGateway(Gateway):
    """A gateway in plain proxy mode: no configuration file, only variables."""

    def __init__(self, programs: Programs, folder: Path, upstream: str, variables: Mapping[str, str]) -> None:
        """Start one in front of `upstream`; `variables` are further ones."""
        env = {
            "GATEWAY_UPSTREAM_URL": upstream,
            "GATEWAY_LISTEN": "127.0.0.1:0",
            "LLMGW_ADMIN_LISTEN": "127.0.0.1:0",
            "LLMGW_STATE_DIR": str(folder / "state"),
            **variables,
        }
        super().__init__(programs, folder, {}, env)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """There is none."""

    def access_lines(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of requests (they alone have no `level`) that carry `fields`."""
        return [line for line in self.log_lines(**fields) if "level" not in line]

    def load(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return requests under way and requests that wait, by pool."""
        health = json.loads(self.get("/healthz")[1])
        return health["in_flight"], health["queued"]

    def _arguments(self) -> tuple[str, ...]:
        return ()


class Gateways:
    """Starts gateways and answers for their end; the fixture `gateway` is one of these.

    Call it with a configuration (a mapping as the YAML file has it), or with a list of entries for
    `endpoints`, which `config_for` completes.
    """

    def __init__(self, programs: Programs, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._started: list[Gateway] = []

    def __call__(
        self,
        config: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        env: Mapping[str, str] | None = None,
        **keys: Any,
    ) -> Gateway:
        """Start a gateway and wait until it is ready.

        Args:
            env: added to the environment of the launcher.
            keys: top-level keys of the configuration that replace those of `config`.
        """
        whole = {**config, **keys} if isinstance(config, Mapping) else config_for(config, **keys)
        folder = self._folder / f"gateway-{len(self._started)}"
        started = Gateway(self._programs, folder, whole, env or {})
        self._started.append(started)
        return started

    def plain(self, upstream: str, **variables: str) -> PlainGateway:
        """Start a gateway in plain proxy mode in front of the URL `upstream`, and wait until it is ready."""
        folder = self._folder / f"gateway-{len(self._started)}"
        started = PlainGateway(self._programs, folder, upstream, variables)
        self._started.append(started)
        return started

    def close(self) -> None:
        """Close every gateway; all of them, also when one complains."""
        complaints = []
        for started in reversed(self._started):
            try:
                started.close()
            except AssertionError as error:
                complaints.append(str(error))
        assert not complaints, "\n".join(complaints)


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
