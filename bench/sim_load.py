"""What the simulated engine costs, without a gateway; prints figures and budgets, fails above them.

    python -m bench.sim_load

A thousand streams of 20 ms a token have to be well within one core, or a test of the gateway measures the
engine. The kernel's part (about 7 us for each send on loopback) is in the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.peerbench.build import build

ROOT = Path(__file__).resolve().parents[1]
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load.

    Attributes:
        name: for the table.
        flags: of the engine.
        settings: of the load generator.
        counted: what the engine counts, by which its CPU is divided.
        budget_us: CPU for each of them.
    """

    name: str
    flags: tuple[str, ...]
    settings: tuple[str, ...]
    counted: str
    budget_us: float


LOADS = (
    Load(
        "token, 1000 streams at 20 ms",
        ("--ttft-ms", "50", "--itl-ms", "20", "--max-num-seqs", "1000"),
        ("stream=1", "conc=1000", "requests=1000", "tokens=300", "ramp_ms=1000"),
        "generation_tokens",
        12.0,
    ),
    Load(
        "plain request, 2 KB",
        ("--ttft-ms", "0", "--itl-ms", "0"),
        ("conc=16", "requests=10000", "tokens=32", "prompt_bytes=2000"),
        "completed",
        80.0,
    ),
)


def main() -> int:
    """Measure all loads; return 1 if one is over its budget or has errors.

    The best of several rounds counts: others on the machine can only add.
    """
    program = build(ROOT / ".cache" / "bench")
    is_good = True
    for load in LOADS:
        rounds = [_measure(program, load) for _ in range(_ROUNDS)]
        cost = min(cost for cost, _ in rounds)
        errors = sum(errors for _, errors in rounds)
        verdict = "ok" if cost <= load.budget_us and not errors else "OVER"
        is_good &= verdict == "ok"
        print(f"{load.name:32} {cost:6.1f} us CPU  budget {load.budget_us:5.1f}  errors {errors}  {verdict}")
    return 0 if is_good else 1


def _measure(program: Path, load: Load) -> tuple[float, int]:
    """Return microseconds of CPU per counted thing, and errors."""
    command = [
        sys.executable,
        str(ROOT / "bin" / "boot.py"),
        "sim",
        "--port",
        "0",
        "--model",
        "sim",
        *load.flags,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            ports = json.loads(engine.stdout.readline())
            before = machine.cpu_s(engine.pid)
            done = subprocess.run(
                [program, "load", f"target=127.0.0.1:{ports['port']}", *load.settings],
                capture_output=True,
                text=True,
                check=True,
            )
            spent = machine.cpu_s(engine.pid) - before
            with urllib.request.urlopen(f"http://127.0.0.1:{ports['control_port']}/sim/stats") as answer:
                counted = json.load(answer)[load.counted]
        finally:
            engine.terminate()
    seen = json.loads(done.stdout)
    return spent / counted * 1e6, seen["issued"] - seen["ok"]


if __name__ == "__main__":
    sys.exit(main())
