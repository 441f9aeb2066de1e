"""The admin listener of a real coordinator, and llmgw-ctl in front of it."""

from __future__ import annotations

import json
import random
import socket
import string
from collections.abc import Iterator

import pytest

from conf.schema import Endpoint
from coordinator.ctl.main import main as ctl
from shm.rows import WorkerSlot
from tests.support.coordinator import RunningCoordinator, config_of
from tests.support.processes import Programs
from tests.support.scripted_engine import ScriptedEngine
from tests.support.wait import wait_until


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine()
    yield made
    made.refuse()


@pytest.fixture
def coordinator(programs: Programs, engine: ScriptedEngine) -> Iterator[RunningCoordinator]:
    endpoint = Endpoint(id="node1-a", model="chat-model", url=engine.url, pool="gpu")
    made = RunningCoordinator(programs, config_of([endpoint], instance="host-1"))
    made.wait_state("node1-a", "ready")
    yield made
    made.close()


def address_of(coordinator: RunningCoordinator) -> tuple[str, int]:
    host, _, port = coordinator.admin_url.removeprefix("http://").partition(":")
    return host, int(port)


def test_status_tells_version_processes_and_endpoints(coordinator: RunningCoordinator) -> None:
    status, headers, body = coordinator.get("/api/v1/status")
    answer = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert (answer["instance"], answer["phase"], answer["inflight"]) == ("host-1", "running", 0)
    assert answer["endpoints_by_state"]["ready"] == 1
    assert [(each["kind"], each["pid"]) for each in answer["processes"]] == [
        ("coordinator", coordinator.program.pid)
    ]


def test_metrics_have_prometheus_content_type(coordinator: RunningCoordinator) -> None:
    status, headers, _ = coordinator.get("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")


def test_healthz_answers_without_looking_at_endpoints(
    coordinator: RunningCoordinator, engine: ScriptedEngine
) -> None:
    engine.refuse()
    coordinator.wait_state("node1-a", "down", "refused")
    status, _, body = coordinator.get("/healthz")
    assert (status, json.loads(body)) == (200, {"ok": True})


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/models", 404, "unknown_url"),
        ("GET", "/api/v1/endpoints/node1-a/x", 404, "unknown_url"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("DELETE", "/api/v1/endpoints", 405, "method_not_allowed"),
    ],
)
def test_errors_have_the_shape_that_clients_know(
    coordinator: RunningCoordinator, method: str, path: str, status: int, code: str
) -> None:
    got, headers, body = coordinator.get(path, method)
    error = json.loads(body)["error"]
    assert (got, headers["content-type"]) == (status, "application/json")
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, None)


def test_b83_paths_of_scanners_become_no_series_and_no_log_lines(coordinator: RunningCoordinator) -> None:
    rng = random.Random(83)
    before = set(coordinator.samples())
    lines = len(coordinator.program.output().splitlines())
    for _ in range(500):
        path = "/" + "".join(rng.choices(string.ascii_letters + "./%_-", k=rng.randint(1, 40)))
        status, _, _ = coordinator.get(path, rng.choice(["GET", "POST", "PUT", "OPTIONS", "TRACE"]))
        assert status in (400, 404, 405), path
    assert set(coordinator.samples()) == before
    assert len(coordinator.program.output().splitlines()) == lines


def test_garbage_on_the_admin_port_harms_nobody(coordinator: RunningCoordinator) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\x00" * 10_000, b"GET / HTTP/1.1\r\n" * 2000):
        with socket.create_connection(address_of(coordinator), timeout=10) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            try:
                while client.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    assert coordinator.get("/healthz")[0] == 200
    lines = [json.loads(line) for line in coordinator.program.output().splitlines()]
    assert {line["event"] for line in lines} == {"coordinator_started", "endpoint_state_changed"}


def test_client_that_sends_nothing_keeps_nobody_waiting(coordinator: RunningCoordinator) -> None:
    with socket.create_connection(address_of(coordinator)) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert coordinator.get("/metrics")[0] == 200


def test_open_connection_does_not_hold_up_the_end(coordinator: RunningCoordinator) -> None:
    with socket.create_connection(address_of(coordinator)) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(1024).startswith(b"HTTP/1.1 200 ")
        assert coordinator.program.stop(timeout=5.0) == 0


def test_listener_of_the_parent_is_served_and_outlives_the_coordinator(
    programs: Programs, engine: ScriptedEngine, coordinator: RunningCoordinator
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        coordinator.program.stop()
        fds = ("--fds", str(listener.fileno()))
        coordinator.start(*fds, pass_fds=(listener.fileno(),))
        assert coordinator.admin_url.endswith(f":{listener.getsockname()[1]}")
        coordinator.kill()
        # The kernel takes the connection, and the next life answers it.
        with socket.create_connection(listener.getsockname(), timeout=20) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            coordinator.start(*fds, pass_fds=(listener.fileno(),))
            assert client.recv(1024).startswith(b"HTTP/1.1 200 ")
    finally:
        listener.close()


def test_ctl_endpoints_shows_what_a_person_asks(
    coordinator: RunningCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl(["endpoints", "--admin", coordinator.admin_url], {}) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["ENDPOINT", "MODEL", "POOL", "ENGINE", "STATE"]
    words = row.split()
    assert words[:5] + words[6:] == ["node1-a", "chat-model", "gpu", "vllm", "ready", "0", "2", "3", "25%"]


def test_ctl_endpoints_says_why_one_is_down(
    coordinator: RunningCoordinator, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refuse()
    coordinator.wait_state("node1-a", "down", "refused")
    assert ctl(["endpoints"], {"LLMGW_ADMIN": coordinator.admin_url}) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("refused")


def test_ctl_json_is_the_body_of_the_api(
    coordinator: RunningCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl(["endpoints", "--json", "--admin", coordinator.admin_url], {})
    shown = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in shown["endpoints"]] == ["node1-a"]
    assert shown["endpoints"][0].keys() == coordinator.endpoints()["node1-a"].keys()


def test_ctl_status_is_good_only_while_requests_can_be_served(
    coordinator: RunningCoordinator, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["status", "--admin", coordinator.admin_url]
    assert ctl(words, {}) == 1, "no worker runs"
    worker = WorkerSlot.claim(coordinator.segment)
    assert ctl(words, {}) == 0
    engine.refuse()
    coordinator.wait_state("node1-a", "down", "refused")
    assert ctl(words, {}) == 1, "no endpoint can be used"
    worker.release()
    assert "endpoints: 1 down" in capsys.readouterr().out


def test_ctl_takes_another_server_for_what_it_is(
    coordinator: RunningCoordinator, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl(["status", "--admin", engine.url], {}) == 2
    assert "another version, or not llmgw's" in capsys.readouterr().err


def test_program_llmgw_ctl_runs(coordinator: RunningCoordinator, programs: Programs) -> None:
    program = programs.start("ctl", "endpoints", env={"LLMGW_ADMIN": coordinator.admin_url})
    assert program.wait() == 0
    wait_until(lambda: "node1-a" in program.output())
