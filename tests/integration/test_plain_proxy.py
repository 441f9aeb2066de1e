"""Plain proxy mode: set up by the environment alone; four workers, and an engine that the test plays.

Connections fall to any of the workers, so that order and cap hold for all of them or not at all.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gateway import Gateways, PlainGateway
from tests.support.processes import Programs
from tests.support.raw_engine import JSON_HEAD, LAST_CHUNK, SSE_HEAD, RawEngine, RawRequest, chunk, event
from tests.support.sim import SimEngine
from tests.support.wait import wait_until

CHAT = "/v1/chat/completions"
FIELDS = [
    "ts",
    "method",
    "path",
    "upstream",
    "priority",
    "tenant",
    "surface",
    "user",
    "model",
    "status",
    "queue_ms",
    "upstream_ms",
    "streamed",
]


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    """An engine that the test plays itself."""
    engine = RawEngine()
    yield engine
    engine.close()


def start(gateway: Gateways, upstream: str, **variables: str) -> PlainGateway:
    """Start a gateway of four workers."""
    return gateway.plain(upstream, **{"LLMGW_WORKERS": "4", **variables})


def ask(
    plain: PlainGateway, name: str, *, path: str = CHAT, body: bytes | None = None, **headers: str
) -> http.client.HTTPConnection:
    """Send a request whose `model` is `name`; the answer is read by who wants it."""
    connection = http.client.HTTPConnection(plain.url.removeprefix("http://"), timeout=20)
    written = {key.replace("_", "-"): value for key, value in headers.items()}
    connection.request("POST", path, json.dumps({"model": name}).encode() if body is None else body, written)
    return connection


def ask_queued(plain: PlainGateway, name: str, **headers: str) -> http.client.HTTPConnection:
    """Send a request and wait until it waits."""
    before = plain.load()[1]["default"]
    connection = ask(plain, name, **headers)
    wait_until(lambda: plain.load()[1]["default"] == before + 1, 5.0, f"{name} to wait")
    return connection


def answer(request: RawRequest, body: bytes = b"{}") -> None:
    """Answer a request as an engine does, and keep its connection."""
    request.send(JSON_HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    request.finish()


def name_of(request: RawRequest) -> Any:
    """Return the `model` of a request that reached the engine."""
    return json.loads(request.body)["model"]


def read(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    """Return status and body of the answer."""
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def test_a_gateway_without_a_file_relays_bodies_and_answers_as_they_are(
    gateway: Gateways, engine: RawEngine
) -> None:
    plain = start(gateway, engine.url)
    bodies = [
        b'{"model": "m",\n "x": [1.50, "\\u00e9"]}',
        b"[1, 2]",
        b"not JSON",
        b"\x00\xff",
        b"",
        b'{"input": "no model"}',
    ]
    for body in bodies:
        connection = ask(plain, "", body=body, path="/v1/some/route?a=1&b=%20")
        request = engine.next_request()
        assert request.head.startswith(b"POST /v1/some/route?a=1&b=%20 HTTP/1.1\r\n")
        assert request.body == body
        answer(request, b"\xffwhatever\x00")
        assert read(connection) == (200, b"\xffwhatever\x00")


@pytest.mark.parametrize("status", ["400 Bad Request", "429 Too Many Requests", "500 Oops", "503 Busy"])
def test_an_error_of_the_upstream_passes_with_its_body(
    gateway: Gateways, engine: RawEngine, status: str
) -> None:
    plain = start(gateway, engine.url, LLMGW_WORKERS="1")
    connection = ask(plain, "m")
    request = engine.next_request()
    request.send(f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\nodd!".encode())
    request.finish()
    assert read(connection) == (int(status[:3]), b"odd!")
    assert len(engine.requests) == 1


def test_a_stream_passes_piece_by_piece(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url)
    connection = ask(plain, "m")
    request = engine.next_request()
    request.send(SSE_HEAD + chunk(b"data: half of an ev"))
    response = connection.getresponse()
    assert response.read1() == b"data: half of an ev"
    request.send(chunk(b"ent\n\n") + LAST_CHUNK)
    assert response.read() == b"ent\n\n"
    request.finish()
    connection.close()


def test_a_stream_that_breaks_does_not_look_whole(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url)
    connection = ask(plain, "m")
    request = engine.next_request()
    request.send(SSE_HEAD + chunk(event("a")))
    response = connection.getresponse()
    assert response.read1() == event("a")
    request.close()
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    connection.close()


def test_the_cap_holds_over_all_workers_and_is_used_up(gateway: Gateways, programs: Programs) -> None:
    sim = SimEngine(programs, "--model", "m", "--max-num-seqs", "64", "--output-tokens", "4", "--itl-ms", "5")
    plain = start(gateway, sim.url, GATEWAY_MAX_CONCURRENT="4")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    connections = [ask(plain, "m", body=body) for _ in range(80)]
    assert [read(connection)[0] for connection in connections] == [200] * 80
    assert sim.stats()["max_running_seen"] == 4
    assert plain.load() == ({"default": 0}, {"default": 0})


def test_sixteen_run_at_a_time_unless_told_otherwise(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url)
    connections = [ask(plain, "m") for _ in range(20)]
    running = [engine.next_request() for _ in range(16)]
    wait_until(lambda: plain.load() == ({"default": 16}, {"default": 4}), 5.0, "four to wait")
    assert len(engine.requests) == 16
    for request in running:
        answer(request)
    for _ in range(4):
        answer(engine.next_request())
    assert [read(connection)[0] for connection in connections] == [200] * 20


def test_background_never_passes_interactive_and_each_class_keeps_its_order(
    gateway: Gateways, engine: RawEngine
) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1")
    first = ask(plain, "first")
    running = engine.next_request()
    waiting = [
        ask_queued(plain, "b1", X_Priority="background", X_Tenant_Id="one"),
        ask_queued(plain, "i1", X_Tenant_Id="one"),
        ask_queued(plain, "b2", X_Priority="Background", X_Tenant_Id="two"),
        ask_queued(plain, "i2", X_Priority="planning", X_Tenant_Id="one"),
        ask_queued(plain, "i3", X_Tenant_Id="one"),
        ask_queued(plain, "i4", X_Priority="synthesis", X_Tenant_Id="two"),
        ask_queued(plain, "b3", X_Priority="background", X_Tenant_Id="two"),
    ]
    order = []
    for _ in waiting:
        answer(running)
        running = engine.next_request()
        order.append(name_of(running))
    answer(running)
    assert order == ["i1", "i2", "i3", "i4", "b1", "b2", "b3"]
    assert [read(connection)[0] for connection in (first, *waiting)] == [200] * 8


def test_a_slot_is_kept_until_the_stream_has_ended(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1")
    first = ask(plain, "a", body=b'{"model": "a", "stream": true}')
    running = engine.next_request()
    running.send(SSE_HEAD + chunk(event("x")))
    response = first.getresponse()
    assert response.read1()
    second = ask_queued(plain, "b")
    running.send(chunk(event("y")))
    assert response.read1()
    assert plain.load() == ({"default": 1}, {"default": 1})
    running.send(LAST_CHUNK)
    running.finish()
    response.read()
    request = engine.next_request()
    assert name_of(request) == "b"
    answer(request)
    assert read(second)[0] == 200
    first.close()
    lines = wait_until(lambda: two_lines(plain), 5.0, "two lines")
    by_model = {line["model"]: line for line in lines}
    assert by_model["a"]["streamed"] is True
    assert by_model["b"]["queue_ms"] > 0
    assert by_model["b"]["streamed"] is False


def two_lines(plain: PlainGateway) -> list[dict[str, Any]]:
    """Return the lines of requests once there are two."""
    lines = plain.access_lines()
    return lines if len(lines) == 2 else []


@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_slot_is_given_back_when_the_upstream_breaks(
    gateway: Gateways, engine: RawEngine, how: str
) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1")
    first = ask(plain, "a")
    running = engine.next_request()
    second = ask_queued(plain, "b")
    getattr(running, how)()
    status, body = read(first)
    assert status == 503
    assert json.loads(body)["error"]["code"] == "upstream_unreachable"
    answer(engine.next_request())
    assert read(second)[0] == 200


def test_an_upstream_that_is_away_is_tried_again_by_the_next_request(
    gateway: Gateways, programs: Programs
) -> None:
    sim = SimEngine(programs, "--model", "m")
    plain = start(gateway, sim.url)
    sim.fault("refuse")
    assert read(ask(plain, "m"))[0] == 503
    sim.clear_fault("refuse")
    assert read(ask(plain, "m", body=b'{"model":"m","messages":[]}'))[0] != 503
    assert plain.is_ready()


def test_a_client_that_leaves_the_queue_takes_no_slot(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1")
    first = ask(plain, "a")
    running = engine.next_request()
    ask_queued(plain, "gone").close()
    wait_until(lambda: plain.load()[1]["default"] == 0, 5.0, "the waiter to leave")
    last = ask_queued(plain, "b")
    answer(running)
    request = engine.next_request()
    assert name_of(request) == "b"
    answer(request)
    assert [read(first)[0], read(last)[0]] == [200, 200]
    (line,) = wait_until(lambda: plain.access_lines(status=499), 5.0, "its line")
    assert line["model"] == "gone"
    assert line["upstream_ms"] == 0
    assert line["queue_ms"] > 0


def test_who_waits_too_long_gets_a_503(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1", GATEWAY_QUEUE_TIMEOUT_S="0.3")
    first = ask(plain, "a")
    running = engine.next_request()
    late = ask(plain, "b", X_Priority="background")
    response = late.getresponse()
    error = json.loads(response.read())["error"]
    assert response.status == 503
    assert response.headers["retry-after"] == str(error["retry_after"])
    assert (error["code"], error["reason"], error["type"]) == (
        "queue_timeout",
        "queue_timeout",
        "server_error",
    )
    assert set(error["queue"]["depth"]) == {"interactive", "background"}
    late.close()
    answer(running)
    assert read(first)[0] == 200
    (line,) = wait_until(lambda: plain.access_lines(status=503), 5.0, "its line")
    assert line["queue_ms"] >= 300
    assert (line["upstream"], line["priority"], line["upstream_ms"]) == ("default", "background", 0)
    assert len(engine.requests) == 1


def test_synthesis_goes_to_its_own_upstream_with_its_own_key_and_slots(
    gateway: Gateways, engine: RawEngine
) -> None:
    other = RawEngine()
    plain = start(
        gateway,
        engine.url,
        GATEWAY_MAX_CONCURRENT="1",
        GATEWAY_SYNTHESIS_UPSTREAM_URL=f"{other.url}/base",
        GATEWAY_SYNTHESIS_API_KEY="sk-ours",
        GATEWAY_SYNTHESIS_MAX_CONCURRENT="1",
    )
    local = ask(plain, "a", Authorization="Bearer sk-client", X_Api_Key="sk-client")
    at_local = engine.next_request()
    assert b"sk-" not in at_local.head
    remote = ask(plain, "s", path="/synthesis/v1/chat/completions?x=1", Authorization="Bearer sk-client")
    at_remote = other.next_request()
    assert at_remote.head.startswith(b"POST /base/v1/chat/completions?x=1 HTTP/1.1\r\n")
    assert at_remote.header("authorization") == "Bearer sk-ours"
    assert b"sk-client" not in at_remote.head
    assert plain.load() == ({"default": 1, "synthesis": 1}, {"default": 0, "synthesis": 0})
    answer(at_local)
    answer(at_remote)
    assert [read(local)[0], read(remote)[0]] == [200, 200]
    assert "sk-" not in plain.program.output()
    (line,) = wait_until(lambda: plain.access_lines(path="/synthesis/v1/chat/completions"), 5.0, "its line")
    assert line["upstream"] == "synthesis"
    other.close()


def test_without_a_second_upstream_its_path_is_unknown(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url)
    assert read(ask(plain, "s", path="/synthesis/v1/chat/completions"))[0] == 404
    assert read(ask(plain, "s", path="/tokenize"))[0] == 404
    assert read(ask(plain, "s", path="/v1/../metrics"))[0] == 404
    assert not engine.requests


def test_a_list_of_models_does_not_wait_for_a_slot(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1")
    first = ask(plain, "a")
    running = engine.next_request()
    status, body = plain.get("/v1/models")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "chat-model")
    answer(running)
    assert read(first)[0] == 200


def test_a_request_is_one_line_with_the_fields_of_this_mode_and_no_others(
    gateway: Gateways, engine: RawEngine
) -> None:
    plain = start(gateway, engine.url)
    connection = ask(
        plain, "m", X_Priority="background", X_Tenant_Id="t1", X_Surface="staff", X_User_Id="u1", X_Other="o"
    )
    answer(engine.next_request())
    assert read(connection)[0] == 200
    bare = ask(plain, "", body=b"{}")
    answer(engine.next_request())
    assert read(bare)[0] == 200
    plain.get("/healthz")
    lines = wait_until(lambda: two_lines(plain), 5.0, "two lines")
    full, empty = sorted(lines, key=lambda line: line["model"] is None)
    assert [list(line) for line in lines] == [FIELDS, FIELDS]
    numbers = {"ts", "queue_ms", "upstream_ms"}
    assert {key: value for key, value in full.items() if key not in numbers} == {
        "method": "POST",
        "path": CHAT,
        "upstream": "default",
        "priority": "background",
        "tenant": "t1",
        "surface": "staff",
        "user": "u1",
        "model": "m",
        "status": 200,
        "streamed": False,
    }
    assert full["queue_ms"] == 0
    assert full["upstream_ms"] > 0
    assert (empty["priority"], empty["tenant"], empty["model"]) == ("interactive", None, None)


def test_health_shows_what_runs_and_what_waits(gateway: Gateways, engine: RawEngine) -> None:
    plain = start(gateway, engine.url, GATEWAY_MAX_CONCURRENT="1")
    first = ask(plain, "a")
    running = engine.next_request()
    second = ask_queued(plain, "b")
    status, body = plain.get("/healthz")
    assert (status, json.loads(body)) == (
        200,
        {"ok": True, "in_flight": {"default": 1}, "queued": {"default": 1}},
    )
    answer(running)
    answer(engine.next_request())
    assert [read(first)[0], read(second)[0]] == [200, 200]


def test_an_upstream_is_asked_for_nothing_but_what_clients_ask_for(
    gateway: Gateways, programs: Programs
) -> None:
    sim = SimEngine(programs, "--model", "m")
    plain = start(gateway, sim.url, LLMGW_ROUTER__SCRAPE_INTERVAL="20ms")
    sim.fault("status", "500", path="/health")
    assert read(ask(plain, "m", body=b'{"model":"m","messages":[{"role":"user","content":"x"}]}'))[0] == 200
    (view,) = plain.admin_json("/api/v1/endpoints")["endpoints"]
    assert (view["state"], view["is_usable"], view["scrape_age_s"]) == ("unknown", True, None)


def test_variables_that_are_wrong_are_named(programs: Programs) -> None:
    program = programs.start(
        "gateway", env={"GATEWAY_UPSTREAM_URL": "engine:8000", "GATEWAY_MAX_CONCURRENT": "many"}
    )
    assert program.wait() == 2
    assert "GATEWAY_UPSTREAM_URL: needs to begin with http://" in program.output()
    assert "GATEWAY_MAX_CONCURRENT: needs a whole number" in program.output()
