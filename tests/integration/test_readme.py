"""The README's command lines, run as they are written, in a copy of the checkout.

Only ports, and the names FILE and PID, are replaced. `make demo` is run by tests/engines/test_demo.py; `make
test` and `make check` would run this test again, so make only tells what it would do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bin.engines.process import free_port
from tests.support.processes import ROOT, Program, Programs
from tests.support.wait import wait_until

EXAMPLE = "conf/examples/minimal.yaml"


@dataclass(slots=True)
class Newcomer:
    """Somebody who types what the README says.

    Attributes:
        checkout: a copy; its example configuration has free ports.
        ports: those of the README, and the free ones in their places.
    """

    checkout: Path
    programs: Programs
    ports: dict[str, str]
    typed: list[str] = field(default_factory=list)

    def line(self, beginning: str) -> str:
        """Find the one line of the README's `sh` blocks that begins so."""
        (found,) = [line for line in commands() if line.startswith(beginning)]
        self.typed.append(found)
        return self.adapted(found)

    def adapted(self, text: str) -> str:
        for port, free in self.ports.items():
            text = text.replace(port, free)
        return text

    def environment(self) -> dict[str, str]:
        activated = f"{self.checkout}/.venv/bin:{os.environ['PATH']}"
        # What pip needs is there already; "0" is how its variable spells --no-build-isolation.
        return {**os.environ, "PATH": activated, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}

    def run(self, line: str) -> str:
        """Type a line, wait for its end, and return its output."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.checkout,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, line: str) -> Program:
        """Type a line that stays."""
        command = ["bash", "-c", "exec " + line.removesuffix(" &")]
        return self.programs.start_command(command, cwd=self.checkout, env=self.environment())


def readme_blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )


def commands() -> list[str]:
    """Return the lines of all `sh` blocks, continued ones joined, without comments."""
    text = "".join(readme_blocks("sh")).replace("\\\n", "")
    return [re.sub(r"\s+#.*", "", line) for line in text.splitlines() if line]


@pytest.fixture
def newcomer(tmp_path: Path, programs: Programs) -> Newcomer:
    checkout = tmp_path / "llmgw"
    ignored = (".*", "__pycache__", "node_modules", "*.egg-info", "build", "dist", "tests")
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*ignored))
    ports = {port: str(free_port()) for port in ("8080", "9090", "9001")}
    someone = Newcomer(checkout, programs, ports)
    example = checkout / EXAMPLE
    example.write_text(someone.adapted(example.read_text()))
    return someone


def make_venv(checkout: Path) -> None:
    """Make the README's `.venv`; its packages are those of the tests' own environment, not fetched again."""
    folder = checkout / ".venv"
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{folder}/bin/python" "$@"\n')
    pip.chmod(0o755)


def test_every_line_of_the_readme_works_as_written(newcomer: Newcomer) -> None:
    told = {"make demo": "bin.engines.demo", "make test": "pytest", "make check": "pytest"}
    for target, step in told.items():
        assert step in newcomer.run(newcomer.line(target) + " --dry-run")
    assert newcomer.line("python3 -m venv").endswith(" .venv && . .venv/bin/activate")
    make_venv(newcomer.checkout)
    newcomer.run(newcomer.line("pip install"))

    check = newcomer.line("bin/llmgw-ctl config check FILE").replace("FILE", EXAMPLE)
    newcomer.run(check)
    sim = newcomer.start(newcomer.line("bin/llmgw-sim"))
    sim.wait_for_output('"listening"')
    assert newcomer.line("bin/llmgw-gateway --config FILE") == "bin/llmgw-gateway --config FILE"
    gateway = newcomer.start(newcomer.line("bin/llmgw-gateway --config conf/"))
    gateway.wait_for_output('"worker_serving"', 60)
    gateway.wait_for_output('"endpoint_state_changed"', 60)  # by now workers know where the model is

    streamed = newcomer.run(newcomer.line("curl") + " --silent --show-error --fail")
    assert streamed.count("data: {") > 1
    assert streamed.endswith("data: [DONE]\n\n")
    (client,) = readme_blocks("python")
    (newcomer.checkout / "client.py").write_text(newcomer.adapted(client))
    assert len(newcomer.run("python3 client.py")) > 10

    newcomer.run(newcomer.line("kill -HUP PID").replace("PID", str(gateway.pid)))
    gateway.wait_for_output("config_reloaded")
    newcomer.run(newcomer.line("kill -TERM PID").replace("PID", str(gateway.pid)))
    assert gateway.wait() == 0
    wait_until(lambda: not gateway.processes(), 5, "no process left")

    listen = f"127.0.0.1:{free_port()}"
    plain = newcomer.line("GATEWAY_UPSTREAM_URL=")
    plain = plain.replace("http://vllm:8000", f"http://127.0.0.1:{newcomer.ports['9001']}")
    started = newcomer.start(f"env GATEWAY_LISTEN={listen} LLMGW_ADMIN_LISTEN=127.0.0.1:0 {plain}")
    started.wait_for_output('"worker_serving"', 60)
    assert '"ok":true' in newcomer.run(f"curl --silent --show-error --fail http://{listen}/healthz")
    newcomer.run(f"kill -TERM {started.pid}")
    assert started.wait() == 0

    assert sorted(newcomer.typed) == sorted(commands()), "the README has lines that nobody tried"
