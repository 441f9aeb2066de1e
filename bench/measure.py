"""Run one scenario against one target: start fresh engines and the gateway, load them, read what it cost."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.scenarios import ENGINE_DEFAULTS, Scenario, Settings
from bench.targets import MODEL, Site, Target
from bin.engines.process import Process, free_port

ENGINE_COUNT = 3
_WARM_UP: Settings = {"conc": 16, "requests": 400, "secs": 3, "tokens": 8, "max_secs": 15}


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def read(cls, values: Mapping[str, float]) -> Latency:
        """Take it from what the load generator prints, which has -1 for nothing."""
        return cls(*(values[key] if values[key] >= 0 else None for key in ("p50", "p90", "p99")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario, one target, one round.

    Attributes:
        ok: requests answered in full.
        errors: kinds of failures and how many.
        requests_per_s: that were answered in full.
        events_per_s: SSE events that clients read.
        total_ms: from the start of a request to its end.
        ttft_ms: to its first event.
        cpu_s: of the whole gateway, launcher and coordinator included; 0 for none.
        cpu_us_per_request, cpu_us_per_event: the same by work done; None where none was.
        peak_bytes: resident memory, added up over the processes.
        pss_bytes: memory after the load, shared pages counted once.
        aborted: clients that went away.
        reached: requests that reached an engine.
        cancelled_1s: of these, the engines gave up within a second.
        left_4s: still at an engine after 4 s.
        others_cpu_s: CPU that other programs took meanwhile.
        wall_s: seconds it took.
    """

    target: str
    scenario: str
    round: int
    ok: int
    errors: Mapping[str, int]
    requests_per_s: float
    events_per_s: float
    seconds: float
    total_ms: Latency
    ttft_ms: Latency
    cpu_s: float
    cpu_us_per_request: float | None
    cpu_us_per_event: float | None
    peak_bytes: int
    pss_bytes: int
    aborted: int
    reached: int
    cancelled_1s: int | None
    left_4s: int | None
    others_cpu_s: float
    wall_s: float

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left at least 7/8 of the machine to the measurement."""
        return self.others_cpu_s <= self.wall_s * (os.cpu_count() or 1) / 8


class Engines:
    """Fake engines on free ports."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.addresses: list[str] = []
        self._processes: list[Process] = []
        try:
            for number in range(1, ENGINE_COUNT + 1):
                port = free_port()
                command = [str(program), "engine", f"port={port}", f"model={MODEL}"]
                process = Process(f"engine {number}", command, folder / f"engine-{number}.log")
                self._processes.append(process)
                process.wait_http(f"http://127.0.0.1:{port}/health", 5)
                self.addresses.append(f"127.0.0.1:{port}")
        except BaseException:
            self.close()
            raise

    def prepare(self, settings: Settings) -> None:
        """Set how they behave, and forget what they counted."""
        query = "&".join(f"{key}={value}" for key, value in {**ENGINE_DEFAULTS, **settings}.items())
        self._ask(f"/sim/config?{query}")
        self._ask("/sim/reset")

    def counts(self) -> dict[str, int]:
        """Return what they counted, added up."""
        answers = self._ask("/sim/stats")
        return {key: sum(answer[key] for answer in answers) for key in answers[0]}

    def is_idle(self, within_s: float = 3.0) -> bool:
        """Tell whether they have nothing to do, or will within `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            counts = self.counts()
            if counts["running"] + counts["waiting"] == 0:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all of them."""
        return sum(machine.cpu_s(process.pid) for process in self._processes)

    def close(self) -> None:
        """Stop them."""
        for process in self._processes:
            process.stop()

    def _ask(self, path: str) -> list[Any]:
        answers = []
        for address in self.addresses:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as response:
                answers.append(json.load(response))
        return answers


class Bench:
    """Fresh engines and a fresh, warm gateway.

    Raises:
        EngineError: something did not start; nothing stays.
    """

    def __init__(self, program: Path, target: Target, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.target = target
        self._program = program
        self.engines = Engines(program, folder)
        self._gateway: Process | None = None
        self._addresses: Sequence[str] = self.engines.addresses
        try:
            if target.start is not None:
                self._start(target, Site(folder, free_port(), (free_port(), free_port()), self._addresses))
            self.engines.prepare({})
            for stream in (0, 1):
                self._load({**_WARM_UP, "stream": stream, "seed": 99})
        except BaseException:
            self.close()
            raise

    def _start(self, target: Target, site: Site) -> None:
        assert target.start is not None
        # Nothing of the caller's but the path: other gateways read all kinds of variables.
        environment = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        environment |= {"HOME": str(site.folder), "TMPDIR": str(site.folder), **target.environment}
        command = target.start(site)
        self._gateway = Process(
            target.name, command, site.folder / "log", environment=environment, folder=site.folder
        )
        self._addresses = [f"127.0.0.1:{site.port}"]
        self._gateway.wait_http(f"http://{self._addresses[0]}{target.health}", target.start_s)

    def run(self, name: str, scenario: Scenario, round_number: int) -> Row:
        """Measure one scenario."""
        pid = self._gateway.pid if self._gateway else None
        self.engines.prepare(scenario.engine)
        started = time.monotonic()
        gateway_before, engines_before, busy_before = machine.cpu_s(pid), self.engines.cpu_s, machine.busy_s()
        own_before = sum(os.times()[:2])
        with machine.PeakMemory(pid) as memory:
            result, load_cpu_s = self._load(scenario.load)
        gateway_s = machine.cpu_s(pid) - gateway_before
        known_s = (
            gateway_s + self.engines.cpu_s - engines_before + load_cpu_s + sum(os.times()[:2]) - own_before
        )
        others_s = machine.busy_s() - busy_before - known_s
        ended = time.monotonic()
        cancelled = left = None
        if scenario.is_abort:
            # A second after the last client went, and then long enough for late ones.
            time.sleep(max(0.0, 1.0 - max(0.0, result["since_last_abort_ms"]) / 1000))
            cancelled = self.engines.counts()["aborted"]
            time.sleep(3)
        counts = self.engines.counts()
        if scenario.is_abort:
            left = counts["running"] + counts["waiting"]
        return Row(
            target=self.target.name,
            scenario=name,
            round=round_number,
            ok=result["ok"],
            errors=result["error_kinds"],
            requests_per_s=result["rps"],
            events_per_s=result["eps"],
            seconds=result["secs"],
            total_ms=Latency.read(result["lat_ms"]),
            ttft_ms=Latency.read(result["ttft_ms"]),
            cpu_s=gateway_s,
            cpu_us_per_request=gateway_s * 1e6 / result["ok"] if result["ok"] else None,
            cpu_us_per_event=gateway_s * 1e6 / counts["events"] if counts["events"] else None,
            peak_bytes=memory.peak_bytes,
            pss_bytes=machine.pss_bytes(pid),
            aborted=result["aborted"],
            reached=counts["requests"],
            cancelled_1s=cancelled,
            left_4s=left,
            others_cpu_s=max(0.0, others_s),
            wall_s=ended - started,
        )

    def close(self) -> None:
        """Stop the gateway, then the engines."""
        if self._gateway:
            self._gateway.stop(5)
        self.engines.close()

    def _load(self, settings: Settings) -> tuple[Any, float]:
        command = [str(self._program), "load", f"target={','.join(self._addresses)}", f"model={MODEL}"]
        command += [f"{key}={value}" for key, value in settings.items()]
        command += [f"header={header}" for header in self.target.headers]
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return json.loads(done.stdout), used
