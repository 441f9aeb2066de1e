"""What a real coordinator sees of engines that are well, ill, restarting and gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conf.schema import Config, Endpoint
from shm.endpoints import EndpointState, EndpointTable
from shm.layout import StatField
from tests.support.coordinator import RunningCoordinator, config_of
from tests.support.processes import Programs
from tests.support.scripted_engine import (
    METRICS,
    ScriptedEngine,
    close,
    drip,
    hang,
    models,
    reset,
    response,
)
from tests.support.wait import wait_until

CORPUS = Path(__file__).parents[1] / "corpus" / "metrics"
Start = Callable[[Config], RunningCoordinator]


@pytest.fixture
def start(programs: Programs) -> Iterator[Start]:
    running: list[RunningCoordinator] = []

    def start_one(config: Config) -> RunningCoordinator:
        running.append(RunningCoordinator(programs, config))
        return running[-1]

    yield start_one
    for each in running:
        each.close()


@pytest.fixture
def engines() -> Iterator[Callable[[], ScriptedEngine]]:
    made: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        made.append(ScriptedEngine())
        return made[-1]

    yield make
    for each in made:
        each.refuse()


@pytest.fixture
def engine(engines: Callable[[], ScriptedEngine]) -> ScriptedEngine:
    return engines()


def endpoint(engine: ScriptedEngine, name: str = "e1", **keys: str) -> Endpoint:
    return Endpoint(id=name, model="chat-model", url=engine.url, **keys)


def test_ready_engine_is_published_with_its_figures(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")
    table = EndpointTable(coordinator.segment)
    record = table.by_id["e1"]
    stats = table.stats(record.slot)
    assert (stats.state, stats.waiting, stats.running, stats.kv) == (EndpointState.READY, 2, 3, 0.25)
    assert coordinator.metric("llmgw_endpoint_metrics_stale", replica="e1") == 0


def test_key_of_an_endpoint_goes_to_its_engine_and_nowhere_else(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of([endpoint(engine, api_key="secret-of-the-engine")]))
    coordinator.wait_state("e1", "ready")
    assert all(b"authorization: Bearer secret-of-the-engine" in head for head in engine.heads)
    shown = [coordinator.get(path)[2] for path in ("/api/v1/endpoints", "/api/v1/status", "/metrics")]
    assert b"secret-of-the-engine" not in b"".join([*shown, coordinator.program.output().encode()])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(response(b"oops", "500 Internal Server Error"), "metrics_status", id="500"),
        pytest.param(hang, "metrics_timeout", id="hangs"),
        pytest.param(drip, "metrics_timeout", id="drips"),
        pytest.param(reset, "metrics_broken", id="resets"),
        pytest.param(close, "metrics_broken", id="closes"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "metrics_broken", id="is_not_http"),
        pytest.param(response(b"<html>no metrics</html>"), "contract_violated", id="is_a_page"),
    ],
)
def test_b67_endpoint_without_metrics_is_stale_and_stays_usable(
    start: Start, engine: ScriptedEngine, script: object, reason: str
) -> None:
    engine.script("/metrics", script)  # type: ignore[arg-type]
    coordinator = start(config_of([endpoint(engine)]))
    view = coordinator.wait_state("e1", "stale", reason)
    assert view["is_usable"]
    assert coordinator.metric("llmgw_endpoint_metrics_stale", replica="e1") == 1
    assert coordinator.metric("llmgw_endpoint_up", replica="e1") == 1


def test_b67_stale_endpoint_keeps_its_last_figures_and_recovers(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")
    engine.script("/metrics", response(b"", "500 Internal Server Error"))
    stale = coordinator.wait_state("e1", "stale", "metrics_status")
    engine.script("/metrics", response(METRICS))
    coordinator.wait_state("e1", "ready")
    assert (stale["waiting"], stale["running"], stale["kv_usage_ratio"]) == (2, 3, 0.25)


def test_b85_engines_with_other_names_ranks_gaps_and_nonsense(
    start: Start, engines: Callable[[], ScriptedEngine]
) -> None:
    base = b"vllm:num_requests_waiting 4\nvllm:num_requests_running 1\n"
    texts = {
        "old-names": base + b"vllm:gpu_cache_usage_perc 0.5\n",
        "new-names": base + b"vllm:kv_cache_usage_perc 0.5\n",
        "no-kv": base,
        "two-ranks": (
            b'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 3\n'
            b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 0\n'
            b'vllm:kv_cache_usage_perc{engine="0"} 0.75\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
        ),
        "nonsense": (
            b"# HELP\n# HELP vllm:num_requests_waiting\n# TYPE \xff\n{}\n"
            b"vllm:num_requests_waiting +Inf\nvllm:num_requests_running NaN\nvllm:kv_cache_usage_perc x\n"
        ),
    }
    listed = []
    for name, text in texts.items():
        one = engines()
        one.script("/metrics", response(text))
        listed.append(endpoint(one, name))
    coordinator = start(config_of(listed))
    for name in ("old-names", "new-names", "two-ranks"):
        view = coordinator.wait_state(name, "ready")
        assert (view["waiting"], view["running"], view["kv_usage_ratio"]) == (4, 1, 0.5), name
    no_kv = coordinator.wait_state("no-kv", "ready")
    assert (no_kv["waiting"], no_kv["kv_usage_ratio"]) == (4, None)
    nonsense = coordinator.wait_state("nonsense", "stale", "contract_violated")
    assert nonsense["is_usable"]
    assert set(nonsense["violated_fields"]) == {"waiting", "running", "kv_usage"}
    assert coordinator.metric("llmgw_endpoint_contract_violated", replica="no-kv", field="kv_usage") == 1


def test_contract_violation_is_logged_once_and_once_when_it_clears(
    start: Start, engine: ScriptedEngine
) -> None:
    engine.script("/metrics", response(b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"))
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")
    asked = engine.count("/metrics")
    wait_until(lambda: engine.count("/metrics") >= asked + 5)
    engine.script("/metrics", response(METRICS))
    wait_until(lambda: coordinator.log_lines("metric_contract_restored", replica="e1"))
    begun = coordinator.log_lines("metric_contract_violated", replica="e1")
    assert [line["level"] for line in begun] == ["warning"]
    assert coordinator.metric("llmgw_contract_violations_total", field="kv_usage") >= 5  # type: ignore[operator]


def test_b103_restarting_engine_is_down_until_its_model_is_listed(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")
    engine.refuse()
    coordinator.wait_state("e1", "down", "refused")
    engine.script("/v1/models", models())
    engine.listen()
    coordinator.wait_state("e1", "down", "no_model_loaded")
    asked = engine.count("/v1/models")
    wait_until(lambda: engine.count("/v1/models") >= asked + 3)
    assert coordinator.metric("llmgw_endpoint_up", replica="e1") == 0
    engine.script("/v1/models", models("chat-model"))
    coordinator.wait_state("e1", "ready")


def test_b103_refused_connection_takes_an_endpoint_out_with_one_look(
    start: Start, engine: ScriptedEngine
) -> None:
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")
    engine.refuse()
    assert coordinator.wait_state("e1", "down", "refused")["failures"] >= 1
    changes = coordinator.log_lines("endpoint_state_changed", replica="e1")
    assert [(line["before"], line["state"]) for line in changes] == [("unknown", "ready"), ("ready", "down")]


@pytest.mark.parametrize(
    ("path", "script", "reason"),
    [
        pytest.param("/health", response(b"", "503 Service Unavailable"), "unhealthy", id="unhealthy"),
        pytest.param("/v1/models", models("other"), "model_not_listed", id="other_model"),
        pytest.param("/v1/models", response(b"", "401 Unauthorized"), "key_refused", id="key_refused"),
        pytest.param("/health", hang, "timeout", id="hangs"),
        pytest.param("/health", b"garbage\r\n\r\n", "broken", id="garbage"),
    ],
)
def test_engine_that_cannot_serve_is_down_and_says_why(
    start: Start, engine: ScriptedEngine, path: str, script: object, reason: str
) -> None:
    engine.script(path, script)  # type: ignore[arg-type]
    coordinator = start(config_of([endpoint(engine)]))
    assert not coordinator.wait_state("e1", "down", reason)["is_usable"]


def test_host_without_a_name_is_down_after_three_looks(start: Start) -> None:
    nowhere = Endpoint(id="e1", model="chat-model", url="http://nowhere.invalid:9001")
    coordinator = start(config_of([nowhere]))
    coordinator.wait_state("e1", "down", "unreachable")


def test_kept_connection_that_an_engine_closed_costs_no_state(start: Start, engine: ScriptedEngine) -> None:
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")

    def answer_and_close(connection: object) -> None:
        connection.sendall(response(METRICS))  # type: ignore[attr-defined]
        close(connection)  # type: ignore[arg-type]

    engine.script("/metrics", answer_and_close)
    asked = engine.count("/metrics")
    wait_until(lambda: engine.count("/metrics") >= asked + 5)
    assert [line["state"] for line in coordinator.log_lines("endpoint_state_changed")] == ["ready"]


def test_stuck_engine_delays_no_other(start: Start, engines: Callable[[], ScriptedEngine]) -> None:
    stuck, well = engines(), engines()
    stuck.script("/health", hang)
    coordinator = start(config_of([endpoint(stuck, "stuck"), endpoint(well, "well")]))
    coordinator.wait_state("well", "ready")
    asked = well.count("/metrics")
    wait_until(lambda: well.count("/metrics") >= asked + 5)
    assert coordinator.endpoints()["stuck"]["scrape_age_s"] is None


def test_metrics_are_served_while_every_endpoint_is_dead(start: Start, engine: ScriptedEngine) -> None:
    engine.refuse()
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "down", "refused")
    assert coordinator.metric("llmgw_endpoint_up", replica="e1") == 0
    assert coordinator.metric("llmgw_replicas", model="chat-model", state="down") == 1
    assert coordinator.metric("llmgw_scrapes_total", outcome="failed") >= 1  # type: ignore[operator]


def test_recording_of_a_loaded_vllm_is_read_as_prometheus_would(start: Start, engine: ScriptedEngine) -> None:
    engine.script("/metrics", response((CORPUS / "vllm_0.32_under_load.txt").read_bytes()))
    coordinator = start(config_of([endpoint(engine)]))
    coordinator.wait_state("e1", "ready")
    assert coordinator.metric("llmgw_endpoint_waiting", replica="e1") == 8
    table = EndpointTable(coordinator.segment)
    assert table.stat(table.by_id["e1"].slot, StatField.NUM_BLOCKS) == 160
