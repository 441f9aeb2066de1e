"""Cases of HTTP itself: paths, framing, IPv6, Expect."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.gateway import Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.raw_engine import RawEngine, RawRequest
from tests.support.scene import Scene, open_scene, request_id
from tests.support.sim import SimEngine
from tests.support.wire import WireClient, chat, request

MODEL = "org/m:7b"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(
        tmp_path_factory.mktemp("scene"), models=("chat-model", MODEL), max_body_bytes=100_000
    ) as made:
        yield made


@pytest.mark.parametrize("written", ["org/m:7b", "org%2Fm%3A7b", "org%2fm:7b", "%6frg/m:7b"])
def test_b31_a_listed_model_is_found_however_its_name_is_written(scene: Scene, written: str):
    with scene.client() as client:
        listed = {each["id"]: each for each in client.ask(method="GET", target="/v1/models").json()["data"]}
        answer = client.ask(method="GET", target=f"/v1/models/{written}")
        assert (answer.status, answer.json()) == (200, listed[MODEL])


@pytest.mark.parametrize(
    "path",
    [
        "../admin",
        "%2e%2e%2fadmin",
        "%2e%2e/%2e%2e/healthz",
        "..%2f..%2freadyz",
        "nope",
        "org%252Fm:7b",
        "org/m",
    ],
)
def test_b31_what_is_not_listed_is_not_found_and_is_never_another_route(scene: Scene, path: str):
    with scene.client() as client:
        answer = client.ask(method="GET", target=f"/v1/models/{path}")
        assert (answer.status, answer.code) == (404, "model_not_found")
        assert client.ask(chat()).status == 200


def test_b31_a_model_with_a_slash_is_served(scene: Scene):
    with scene.client() as client:
        answer = client.ask(chat(MODEL))
        assert (answer.status, answer.json()["model"]) == (200, MODEL)


@pytest.fixture(scope="module")
def raw(scene: Scene) -> Iterator[tuple[RawEngine, str]]:
    """An engine of raw bytes, and the address of a gateway before it."""
    engine = RawEngine()
    try:
        yield engine, scene.gateways([endpoint("raw", engine.url)]).url
    finally:
        engine.close()


FRAMINGS = {
    "chunked": b"Transfer-Encoding: chunked\r\n",
    "length": b"Content-Length: 14\r\n",
    "both": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "close": b"",
}


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("framing", FRAMINGS)
def test_b33_one_framing_reaches_the_client_and_no_hop_by_hop_header(
    raw: tuple[RawEngine, str], framing: str, kind: str
):
    engine, url = raw
    body = b"data: [DONE]\n\n" if kind == "text/event-stream" else b'{"x": 1234567}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind.encode() + b"\r\n" + FRAMINGS[framing]
    head += (
        b"Connection: x-foo, keep-alive\r\nX-Foo: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Proxy-Connection: keep-alive\r\nProxy-Authenticate: Basic\r\nTE: x\r\nTrailer: x-sum\r\n"
        b"Upgrade: h2c\r\nServer: uvicorn\r\nX-Kept: yes\r\n"
    )

    def answer(asked: RawRequest) -> None:
        if framing in ("chunked", "both"):
            asked.send(head + b"\r\ne\r\n" + body + b"\r\n0\r\nX-Sum: 1\r\n\r\n")
        else:
            asked.send(head + b"\r\n" + body)
        if framing == "close":
            asked.close()

    engine.answer = answer
    with WireClient(url) as client:
        got = client.ask(chat(stream=kind == "text/event-stream"))  # fails for a second framing header
        assert (got.status, got.is_whole, got.header("x-kept")) == (200, True, "yes")
        assert got.body == body
        names = {name.lower() for name, _ in got.headers}
        assert not names & {
            "connection", "x-foo", "keep-alive", "proxy-connection", "proxy-authenticate", "te", "trailer",
            "upgrade", "server", "x-sum",
        }  # fmt: skip
        assert client.ask(method="GET", target="/healthz").status == 200


def test_b33_an_http_1_0_client_gets_no_chunks(raw: tuple[RawEngine, str]):
    engine, url = raw
    engine.answer = lambda asked: asked.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\n\r\n"
    )
    with WireClient(url) as client:
        client.send(request(chat()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = client.answer()
        assert answer.all("transfer-encoding") == []
        assert answer.body == b"{}"
        assert client.is_closed()


def test_b37_engine_and_listener_on_ipv6(gateway: Gateways, programs: Programs):
    sim = SimEngine(programs, "--model", "chat-model", host="::1")
    entry = {"model": "chat-model", "url": f"http://[::1]:{sim.port}", "engine": "sim"}
    config = config_for([endpoint("gone", "http://[::1]:1", model="other"), entry])
    gw = gateway(config, listen="[::]:0")
    (url,) = gw.urls
    assert url.startswith("http://[::]:")
    port = url.rpartition(":")[2]
    for place in (f"http://[::1]:{port}", f"http://127.0.0.1:{port}"):
        with WireClient(place) as client:
            for stream in (False, True):
                answer = client.ask(chat(stream=stream))
                assert (answer.status, answer.is_whole) == (200, True)
                assert answer.header("x-llmgw-replica") == f"[::1]:{sim.port}"
    assert {asked.header("host") for asked in sim.seen(4)} == {f"[::1]:{sim.port}"}
    endpoints = {each["id"]: each for each in gw.admin_json("/api/v1/endpoints")["endpoints"]}
    assert endpoints[f"[::1]:{sim.port}"]["state"] == "ready"
    assert gw.metric("llmgw_endpoint_metrics_stale", replica=f"[::1]:{sim.port}") == 0
    assert len(gw.access_lines(replica=f"[::1]:{sim.port}")) == 4


def test_b39_a_client_that_expects_100_continue_gets_it_at_once_and_the_engine_never_sees_it(scene: Scene):
    body = json.dumps(chat()).encode()
    with scene.client() as client:
        for _ in range(3):
            began = time.monotonic()
            client.send(request(body, "Expect: 100-continue")[: -len(body)])
            assert client.answer().status == 100
            # A client that is told nothing sends its body after a second: that is the wait to avoid.
            assert time.monotonic() - began < 0.9
            client.send(body)
            assert client.answer().status == 200
    assert [asked.header("expect") for asked in scene.sim.seen(3)] == [None] * 3


@pytest.mark.parametrize(
    ("target", "length", "status"),
    [("/v1/chat/completions", 100_001, 413), ("/nowhere", 100, 404), ("/v1/models", 100, 405)],
)
def test_b39_an_early_refusal_comes_without_100_and_closes(
    scene: Scene, target: str, length: int, status: int
):
    received, name = scene.sim.stats()["received"], request_id()
    with scene.client() as client:
        head = ("Expect: 100-continue", f"Content-Length: {length}", f"x-request-id: {name}")
        client.send(request(b"", *head, target=target, has_length=False))
        answer = client.answer()
        assert (answer.status, answer.header("connection")) == (status, "close")
        assert client.is_closed()
    assert scene.settled(name)["status"] == status
    assert scene.sim.stats()["received"] == received


def test_b39_connections_stay_in_step_after_refusals(scene: Scene):
    """64 requests over 8 connections, refusals of every kind between them."""
    refusals = [
        (request(b"{"), 400),
        (request(chat("nope")), 404),
        (request(b"x" * 5000, target="/nowhere"), 404),
        (request(b"x" * 5000, target="/v1/models"), 405),
        (request(b"x" * 70_000, method="PUT"), 405),
        (request(chat(), "Content-Encoding: br"), 415),
        (request(method="GET"), 405),
    ]
    clients = [scene.client() for _ in range(8)]
    try:
        for number in range(64):
            client = clients[number % 8]
            wrong, status = refusals[number % len(refusals)]
            client.send(wrong)
            assert client.answer().status == status
            answer = client.ask(chat(), "Expect: 100-continue") if number % 3 == 0 else client.ask(chat())
            if answer.status == 100:
                answer = client.answer()
            assert answer.status == 200
    finally:
        for client in clients:
            client.close()
    scene.wait_idle()
