"""`make demo`, as a newcomer and a careless one runs it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bin.engines.llamacpp import LlamaCpp
from tests.support.engines import require
from tests.support.processes import ROOT
from tests.support.wait import wait_until

MARK = "DEMO_TEST_MARK"
UP = "Ctrl-C stops everything."
pytestmark = pytest.mark.timeout(240)


class Demo:
    """A running demo, and everything it started: processes that inherited a variable of ours.

    Attributes:
        log: file with its output.
        folder: of its configuration, unless `arguments` name another one.
    """

    def __init__(self, folder: Path, *arguments: str, stdin: int = subprocess.PIPE) -> None:
        self.log = folder / "output"
        self.folder = folder / "demo"
        self._segment_file = self.folder / "state" / "segment"  # gone once the gateway was stopped well
        self._mark = secrets.token_hex(8)
        command = [sys.executable, "-m", "bin.engines.demo", "--folder", str(self.folder), *arguments]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text()

    def wait_up(self) -> None:
        """Wait until it has shown its request and stays."""

        def is_up() -> bool:
            assert self.process.poll() is None, self.output()
            return UP in self.output()

        wait_until(is_up, 120, self.output)

    def end(self, timeout: float = 30) -> int:
        """Wait for its end; return its exit code."""
        return self.process.wait(timeout)

    def others(self) -> list[psutil.Process]:
        """Return the live processes it started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != self.process.pid and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def close(self) -> None:
        """End what is left, and fail if that was more than the demo itself."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        try:
            wait_until(
                lambda: not self.others(), 15, lambda: f"nothing left: {self.others()}\n{self.output()}"
            )
        finally:
            for process in self.others():
                process.kill()
            if self.process.stdin is not None:
                self.process.stdin.close()
            if self._segment_file.exists():
                shutil.rmtree(self._segment_file.read_text().strip(), ignore_errors=True)


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.close()


@pytest.fixture(scope="module")
def lasting_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo with simulated engines, for all tests that leave it as it is."""
    demo = Demo(tmp_path_factory.mktemp("lasting"), "--engine", "sim")
    try:
        demo.wait_up()
        yield demo
    finally:
        demo.process.terminate()
        demo.end()
        demo.close()


@pytest.fixture
def sim_demo(demos: list[Demo], tmp_path: Path) -> Demo:
    """A demo with simulated engines that stays until the test ends it."""
    demo = Demo(tmp_path, "--engine", "sim")
    demos.append(demo)
    demo.wait_up()
    return demo


def run_once(demos: list[Demo], folder: Path, engine: str) -> str:
    """Run a demo to the end of its request; return its output."""
    demo = Demo(folder, "--engine", engine, "--once")
    demos.append(demo)
    assert demo.end(200) == 0, demo.output()
    return demo.output()


def test_a_request_is_served_and_shown_with_its_headers(lasting_demo: Demo) -> None:
    output = lasting_demo.output().lower()
    assert "http/1.1 200" in output
    for header in ("x-request-id: ", "x-llmgw-replica: sim-", "x-llmgw-served-model: sim-model"):
        assert header in output


def test_the_real_engine_serves_the_tiny_model(demos: list[Demo], tmp_path: Path) -> None:
    require(LlamaCpp().install)
    assert "x-llmgw-replica: llamacpp-1" in run_once(demos, tmp_path, "tiny").lower()


def test_the_real_engine_serves_the_real_model_and_names_its_licence(
    demos: list[Demo], tmp_path: Path
) -> None:
    require(lambda: LlamaCpp().install(gemma=True))
    output = run_once(demos, tmp_path, "llamacpp")
    assert "x-llmgw-served-model: gemma3-270m" in output.lower()
    assert "Gemma Terms of Use" in output


def test_it_says_how_to_call_it(lasting_demo: Demo) -> None:
    output = lasting_demo.output()
    assert "curl -N http://127.0.0.1:" in output
    assert "from openai import OpenAI" in output


def test_the_curl_line_it_shows_works(lasting_demo: Demo) -> None:
    lines = lasting_demo.output().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  curl "))
    command = "\n".join(lines[start : start + 2])
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True)
    assert "data: [DONE]" in done.stdout


def test_the_python_lines_it_shows_work(lasting_demo: Demo) -> None:
    _, _, shown = lasting_demo.output().partition("(pip install openai):\n")
    program = textwrap.dedent(shown.partition("Models: ")[0])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_every_process(sim_demo: Demo, number: signal.Signals) -> None:
    sim_demo.process.send_signal(number)
    assert sim_demo.end() == 0
    assert not sim_demo.others()


def test_the_end_of_standard_input_stops_every_process(sim_demo: Demo) -> None:
    assert sim_demo.process.stdin is not None
    sim_demo.process.stdin.close()
    assert sim_demo.end() == 0
    assert not sim_demo.others()


def test_a_terminal_that_closes_stops_every_process(demos: list[Demo], tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    demo = Demo(tmp_path, "--engine", "sim", stdin=theirs)
    demos.append(demo)
    os.close(theirs)
    demo.wait_up()
    os.close(ours)
    assert demo.end() == 0
    assert not demo.others()


def test_a_killed_demo_leaves_no_process(sim_demo: Demo) -> None:
    assert sim_demo.others()
    sim_demo.process.kill()
    sim_demo.end()
    wait_until(lambda: not sim_demo.others(), 15, lambda: f"nothing left: {sim_demo.others()}")


def test_the_end_of_the_gateway_ends_the_demo(sim_demo: Demo) -> None:
    launcher = next(
        process for process in sim_demo.others() if "bin/llmgw-gateway" in " ".join(process.cmdline())
    )
    launcher.kill()
    assert sim_demo.end() == 1
    assert "The gateway ended by itself" in sim_demo.output()


def test_a_second_demo_in_the_same_folder_is_refused(
    lasting_demo: Demo, demos: list[Demo], tmp_path: Path
) -> None:
    second = Demo(tmp_path, "--engine", "sim", "--once", "--folder", str(lasting_demo.folder))
    demos.append(second)
    assert second.end() == 1
    assert f"(process {lasting_demo.process.pid}); stop it first." in second.output()


def test_a_taken_port_is_named_and_another_one_used(demos: list[Demo], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # somebody else has it, which is as good
            taken.bind(("127.0.0.1", 8080))
            taken.listen()
        output = run_once(demos, tmp_path, "sim")
    assert "Port 8080 is taken; the gateway gets port" in output
