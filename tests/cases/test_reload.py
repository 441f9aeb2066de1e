"""Reload (SIGHUP) and stop (SIGTERM) of a real gateway under requests."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from tests.support.accounts import Ledger, settled, wait_idle
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.scene import request_id
from tests.support.sim import SimEngine
from tests.support.wait import wait_until
from tests.support.wire import Answer, WireClient, chat, request

ITL_MS = 20


@pytest.fixture
def sim(programs: Programs) -> SimEngine:
    return SimEngine(programs, "--model", "chat-model", "--model", "second", "--itl-ms", str(ITL_MS))


@pytest.fixture
def other(programs: Programs) -> SimEngine:
    return SimEngine(programs, "--model", "chat-model", "--model", "second", "--itl-ms", str(ITL_MS))


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    """Close the connections of a test, also where it failed."""
    with ExitStack() as stack:
        Stream.stack = stack
        yield


class Stream:
    """A stream under way.

    Attributes:
        stack: closes its connection at the end of the test.
    """

    stack: ClassVar[ExitStack]

    def __init__(self, gateway: Gateway, *, seconds: float, model: str = "chat-model") -> None:
        self.request_id = request_id()
        self.tokens = int(seconds * 1000 / ITL_MS)
        self.client = self.stack.enter_context(WireClient(gateway.url, timeout=20))
        body = chat(model, stream=True, max_tokens=self.tokens, ignore_eos=True)
        self.client.send_request(body, f"x-request-id: {self.request_id}")
        assert self.client.head()[0] == 200
        self._pieces = [self.client.read_until(b"\n\n")]

    def finish(self) -> bytes:
        """Read to the end; return everything behind the head as it was on the wire, chunk sizes included."""
        with self.client:
            try:
                return b"".join(self._pieces) + self.client.read_until(b"\r\n0\r\n\r\n")
            except EOFError as end:
                return b"".join(self._pieces) + bytes(end.args[0])

    def is_whole(self) -> bool:
        """Read to the end and tell whether every token and the mark of the end have come."""
        data = self.finish()
        return data.count(b'"content":') >= self.tokens and data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def ask(gateway: Gateway, model: str = "chat-model", *headers: str) -> Answer:
    with WireClient(gateway.url) as client:
        return client.ask(chat(model), *headers)


def reload(gateway: Gateway, config: dict[str, Any], event: str = "config_reloaded") -> list[dict[str, Any]]:
    """Reload, wait for what the launcher says to it, and return those lines."""
    before = len(gateway.log_lines(event=event))
    gateway.reload(config)
    wait_until(lambda: len(gateway.log_lines(event=event)) > before, 10, gateway.program.output)
    return gateway.log_lines(event=event)[before:]


def in_force(condition: Callable[[], bool]) -> None:
    wait_until(condition, 5, "the new configuration in force")


BROKEN = {
    "not_yaml": "models: [",
    "unknown_key": "endpointz: []\nauth: {enabled: false}\n",
    "endpoint_of_no_model": "auth: {enabled: false}\nendpoints: [{id: a, model: nope, url: 'http://h:1'}]\n",
    "empty": "",
}


def test_a_broken_file_changes_nothing_and_says_why(gateway: Gateways, sim: SimEngine):
    gw = gateway([endpoint("e0", sim.url)])
    stream = Stream(gw, seconds=2)
    good = gw.config_file.read_text()
    ledger = Ledger(gw)
    for number, text in enumerate([*BROKEN.values(), None]):
        before = len(gw.log_lines(event="config_refused"))
        if text is None:
            gw.config_file.unlink()
        else:
            gw.config_file.write_text(text)
        gw.program.signal(signal.SIGHUP)
        wait_until(lambda before=before: len(gw.log_lines(event="config_refused")) > before, 10)
        (first, *_) = gw.log_lines(event="config_refused")[before:]
        assert str(gw.config_file) in first["problem"]
        assert ask(gw).status == 200
        wait_until(lambda n=number: ledger.grew("llmgw_config_reloads_total", outcome="refused") == n + 1, 5)
    said = " ".join(line["problem"] for line in gw.log_lines(event="config_refused"))
    assert 'did you mean "endpoints"?' in said
    assert "llmgw.yaml:2: endpoints[0].model" in said
    assert stream.is_whole()
    assert ledger.grew("llmgw_config_reloads_total", outcome="ok") == 0
    assert not gw.log_lines(event="configuration_taken_up")
    gw.config_file.write_text(good)
    assert reload_unchanged(gw)["changed"] == []


def reload_unchanged(gateway: Gateway) -> dict[str, Any]:
    before = len(gateway.log_lines(event="config_reloaded"))
    gateway.program.signal(signal.SIGHUP)
    wait_until(lambda: len(gateway.log_lines(event="config_reloaded")) > before, 10)
    return gateway.log_lines(event="config_reloaded")[-1]


def test_an_added_endpoint_model_and_alias_serve_and_no_stream_is_dropped(
    gateway: Gateways, sim: SimEngine, other: SimEngine
):
    first = endpoint("e0", sim.url)
    gw = gateway([first], workers=2)
    streams = [Stream(gw, seconds=4) for _ in range(4)]
    assert ask(gw, "second").code == "model_not_found"
    config = config_for(
        [first, endpoint("e1", other.url), endpoint("s0", other.url, model="second")], workers=2
    )
    config["models"][0]["aliases"] = ["gpt-4o-mini"]
    (told,) = reload(gw, config)
    assert {"endpoints[e1]", "endpoints[s0]", "models[second]", "models[chat-model].aliases"} <= set(
        told["changed"]
    )
    # In force in both workers: each answers some of these, on connections of their own.
    in_force(lambda: all(ask(gw, "second").status == 200 for _ in range(8)))
    in_force(lambda: all(ask(gw, "gpt-4o-mini").status == 200 for _ in range(8)))
    # The streams of before run on e0, so the new one is the least loaded.
    in_force(lambda: ask(gw).header("x-llmgw-replica") == "e1")
    with WireClient(gw.url) as client:
        listed = [each["id"] for each in client.ask(method="GET", target="/v1/models").json()["data"]]
        assert listed == ["chat-model", "gpt-4o-mini", "second"]
    assert all(stream.is_whole() for stream in streams)
    wait_idle(gw)
    assert {settled(gw, stream.request_id)["outcome"] for stream in streams} == {"ok"}


def test_a_removed_endpoint_finishes_its_streams_and_gets_nothing_new(
    gateway: Gateways, sim: SimEngine, other: SimEngine
):
    kept, removed = endpoint("kept", other.url), endpoint("removed", sim.url)
    gw = gateway([removed])
    streams = [Stream(gw, seconds=3) for _ in range(4)]
    reload(gw, config_for([kept]))
    in_force(lambda: ask(gw).header("x-llmgw-replica") == "kept")
    received = sim.stats()["received"]
    for _ in range(10):
        assert ask(gw).header("x-llmgw-replica") == "kept"
    assert sim.stats()["received"] == received
    assert sim.stats()["running"] == 4
    assert all(stream.is_whole() for stream in streams)
    lines = [settled(gw, stream.request_id) for stream in streams]
    assert {(line["outcome"], line["replica"]) for line in lines} == {("ok", "removed")}
    wait_until(lambda: sim.stats()["connections_open"] == 0, 10, lambda: str(sim.stats()))
    assert [each["id"] for each in gw.admin_json("/api/v1/endpoints")["endpoints"]] == ["kept"]
    # The name comes back with another address: nothing of the old one is used.
    reload(gw, config_for([endpoint("removed", other.url), endpoint("kept", other.url)]))
    in_force(lambda: {ask(gw).header("x-llmgw-replica") for _ in range(8)} == {"kept", "removed"})
    assert sim.stats()["received"] == received


def test_a_removed_model_is_not_found_while_its_streams_finish(gateway: Gateways, sim: SimEngine):
    entries = [endpoint("e0", sim.url), endpoint("s0", sim.url, model="second")]
    gw = gateway(entries)
    stream = Stream(gw, seconds=3, model="second")
    reload(gw, config_for(entries[:1]))
    in_force(lambda: ask(gw, "second").status == 404)
    assert ask(gw, "second").code == "model_not_found"
    assert stream.is_whole()


def test_a_changed_timeout_holds_for_new_requests_and_spares_running_ones(gateway: Gateways, sim: SimEngine):
    gw = gateway([endpoint("e0", sim.url)])
    stream = Stream(gw, seconds=3)
    # Shorter than this engine takes from the request to the end of a long answer.
    timeouts = {"total": "1s"}
    reload(
        gw, config_for([endpoint("e0", sim.url)], router={"scrape_interval": "200ms", "timeouts": timeouts})
    )
    wait_until(lambda: gw.log_lines(event="configuration_taken_up", process="worker"), 5)
    late = Stream(gw, seconds=3)
    assert b"[DONE]" not in late.finish()
    assert stream.is_whole()
    assert settled(gw, late.request_id)["reason"] == "upstream_timeout"


def test_a_changed_body_limit_holds_for_the_next_connection(gateway: Gateways, sim: SimEngine):
    gw = gateway([endpoint("e0", sim.url)])
    body = json.dumps(chat(padding="x" * 2000)).encode()
    with WireClient(gw.url) as client:
        assert client.ask(body).status == 200
    reload(gw, config_for([endpoint("e0", sim.url)], max_body_bytes=1000))
    wait_until(lambda: gw.log_lines(event="configuration_taken_up", process="worker"), 5)
    with WireClient(gw.url) as client:
        assert client.ask(body).status == 413


def test_keys_that_need_a_restart_are_told_and_left_as_they_are(gateway: Gateways, sim: SimEngine):
    gw = gateway([endpoint("e0", sim.url)])
    config = config_for([endpoint("e0", sim.url)], workers=3, max_connections=7, listen="127.0.0.1:1")
    (told,) = reload(gw, config, "config_needs_restart")
    assert told["keys"] == ["listen", "max_connections", "workers"]
    assert told["level"] == "warning"
    assert ask(gw).status == 200
    assert len([p for p in gw.processes("workers") if p.ppid() != gw.pid]) == 1


def test_many_reloads_in_a_row_drop_nothing(gateway: Gateways, sim: SimEngine, other: SimEngine):
    both = [endpoint("e0", sim.url), endpoint("e1", other.url)]
    gw = gateway(both, workers=2)
    stream, statuses = Stream(gw, seconds=4), []
    for number in range(12):
        reload(gw, config_for(both[: 1 + number % 2], workers=2))
        statuses += [ask(gw).status for _ in range(5)]
    assert statuses == [200] * 60
    assert stream.is_whole()
    wait_idle(gw)


# Stopping.


def test_while_it_drains_it_is_not_ready_refuses_requests_and_finishes_streams(
    gateway: Gateways, sim: SimEngine
):
    gw = gateway([endpoint("e0", sim.url)], workers=2)
    streams = [Stream(gw, seconds=4) for _ in range(4)]
    idle = [Stream.stack.enter_context(WireClient(gw.url)) for _ in range(6)]
    for client in idle[:3]:
        assert client.ask(chat()).status == 200
    busy = Stream.stack.enter_context(WireClient(gw.url))
    busy.send_request(chat(max_tokens=100, ignore_eos=True))
    wait_until(lambda: sim.stats()["running"] == 5, 5)
    received = sim.stats()["received"]
    gw.program.signal(signal.SIGTERM)
    assert [client.is_closed() for client in idle] == [True] * 6
    wait_until(lambda: gw.get("/readyz")[0] == 503, 5)
    for _ in range(8):  # whichever worker is asked
        assert json.loads(gw.get("/readyz")[1]) == {"ready": False, "reason": "shutting_down"}
    wait_until(lambda: len(gw.log_lines(event="worker_draining")) == 2, 5)
    assert gw.get("/healthz")[0] == 200
    for _ in range(6):
        answer = ask(gw)
        assert (answer.status, answer.code, answer.header("connection")) == (503, "shutting_down", "close")
        assert answer.error["reason"] == "shutting_down"
        assert int(str(answer.header("retry-after"))) >= 1
    assert busy.answer().status == 200
    assert busy.is_closed()
    assert all(stream.is_whole() for stream in streams)
    assert gw.program.wait() == 0
    assert sim.stats()["received"] == received
    lines = gw.access_lines()
    assert len([line for line in lines if line["outcome"] == "ok"]) == 3 + 1 + 4
    assert len([line for line in lines if line["outcome"] == "shutting_down"]) == 6
    assert sim.stats()["blocks_in_use"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_gateway_stops_promptly_with_code_0(
    gateway: Gateways, sim: SimEngine, number: signal.Signals
):
    gw = gateway([endpoint("e0", sim.url)], workers=2, drain_timeout="60s")
    assert ask(gw).status == 200
    with WireClient(gw.url) as half:
        half.send(b"POST /v1/ch")
        idle = WireClient(gw.url)
        began = time.monotonic()
        gw.program.signal(number)
        assert idle.is_closed()
        half.close()
        assert gw.program.wait() == 0
        assert time.monotonic() - began < 5
        idle.close()


def test_a_request_already_sent_when_it_begins_to_drain_is_answered(gateway: Gateways, sim: SimEngine):
    """Never a connection closed over a request: it is served, or told that the gateway stops."""
    gw = gateway([endpoint("e0", sim.url)], workers=2)
    clients = [Stream.stack.enter_context(WireClient(gw.url)) for _ in range(20)]
    for client in clients:
        assert client.ask(method="GET", target="/healthz").status == 200
    workers = [process for process in gw.processes("workers") if process.ppid() != gw.pid]
    # Requests and the order to stop wait together for workers that run on.
    for worker in workers:
        worker.suspend()
    for client in clients:
        client.send_request(chat())
    gw.program.signal(signal.SIGTERM)
    wait_until(lambda: gw.log_lines(event="gateway_stopping"), 5)
    for worker in workers:
        worker.resume()
    assert {client.answer().status for client in clients} <= {200, 503}
    assert gw.program.wait() == 0
    assert len(gw.access_lines(path="/v1/chat/completions")) == 20


def test_streams_that_outlast_the_drain_time_end_with_an_error_event(gateway: Gateways, sim: SimEngine):
    gw = gateway([endpoint("e0", sim.url)], drain_timeout="1s")
    stream = Stream(gw, seconds=60)
    whole = WireClient(gw.url)
    whole.send_request(chat(max_tokens=3000, ignore_eos=True))
    half = WireClient(gw.url)
    half.send(request(b"x" * 100)[:-50])
    wait_until(lambda: sim.stats()["running"] == 2, 5)
    began = time.monotonic()
    gw.program.signal(signal.SIGTERM)
    data = stream.finish()
    assert b"[DONE]" not in data
    assert b'"code":"shutting_down"' in data
    with whole, half:
        assert (answer := whole.answer()).status == 503
        assert answer.code == "shutting_down"
        assert (answer := half.answer()).status == 503
        assert answer.code == "shutting_down"
    assert gw.program.wait() == 0
    assert 0.9 < time.monotonic() - began < 8
    assert settled_after_stop(gw, stream.request_id)["reason"] == "shutting_down"
    wait_until(lambda: sim.stats()["blocks_in_use"] == 0, 5, lambda: str(sim.stats()))


def settled_after_stop(gateway: Gateway, asked: str) -> dict[str, Any]:
    (line,) = gateway.access_lines(request_id=asked)
    return line


def test_the_drain_time_can_be_lengthened_by_a_reload(gateway: Gateways, sim: SimEngine):
    """gunicorn kills workers by a limit of its own that it reads at the start."""
    gw = gateway([endpoint("e0", sim.url)], drain_timeout="1s")
    reload(gw, config_for([endpoint("e0", sim.url)], drain_timeout="60s"))
    wait_until(lambda: gw.log_lines(event="configuration_taken_up", process="worker"), 5)
    stream = Stream(gw, seconds=13)
    gw.program.signal(signal.SIGTERM)
    assert stream.is_whole()
    assert gw.program.wait() == 0
