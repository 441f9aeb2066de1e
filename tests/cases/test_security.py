"""Cases of secrets: whose credentials go where, what is logged, and what a client can put into a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support.gateway import Gateways, endpoint
from tests.support.processes import Programs
from tests.support.scene import Scene, open_scene, request_id
from tests.support.sim import SimEngine
from tests.support.wire import PATH, WireClient, chat, request

ENGINE_KEY = "ENG-0123456789abcdef"
CLIENT_SECRETS = (
    "Authorization: Bearer CLIENT-SECRET-1",
    "x-api-key: CLIENT-SECRET-2",
    "api-key: CLIENT-SECRET-3",
    "Cookie: session=CLIENT-SECRET-4",
    "Proxy-Authorization: Basic CLIENT-SECRET-5",
    "x-goog-api-key: CLIENT-SECRET-6",
)
ROUTES = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "chat-model", "prompt": "go", "max_tokens": 1},
    "/v1/embeddings": {"model": "chat-model", "input": "go"},
    "/v1/rerank": {"model": "chat-model", "query": "q", "documents": ["a"]},
    "/v1/score": {"model": "chat-model", "text_1": "a", "text_2": "b"},
    "/tokenize": {"model": "chat-model", "prompt": "go"},
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(tmp_path_factory.mktemp("scene")) as made:
        yield made


def test_b27_every_route_drops_the_clients_credentials_and_adds_the_engines_key(
    gateway: Gateways, programs: Programs
):
    sim = SimEngine(programs, "--model", "chat-model", "--api-key", ENGINE_KEY)
    gw = gateway([endpoint("e0", sim.url, api_key=ENGINE_KEY)], log={"level": "debug"})
    with WireClient(gw.url) as client:
        for path, body in ROUTES.items():
            answer = client.ask(body, *CLIENT_SECRETS, target=path)
            assert answer.status == 200, (path, answer.body)
            (seen,) = sim.seen(1)
            assert seen.target == path
            credentials = [value for name, value in seen.headers if name.lower() == "authorization"]
            assert credentials == [f"Bearer {ENGINE_KEY}"]
            assert "CLIENT-SECRET" not in repr(seen.headers)
            assert ENGINE_KEY not in repr(answer) + answer.body.decode()
        # The gateway's own list of models needs no engine; the coordinator's look at the engine's list does.
        assert client.ask(method="GET", target="/v1/models").status == 200
    assert gw.admin_json("/api/v1/endpoints")["endpoints"][0]["state"] == "ready"
    # An engine that refuses its key: its error must not tell the key either.
    sim.fault("status", "401")
    with WireClient(gw.url) as client:
        assert ENGINE_KEY not in client.ask(chat()).body.decode()
    places = {
        "logs": gw.program.output(),
        "metrics": gw.get("/metrics", admin=True)[1].decode(),
        "endpoints": gw.get("/api/v1/endpoints", admin=True)[1].decode(),
        "status": gw.get("/api/v1/status", admin=True)[1].decode(),
        "command lines": " ".join(" ".join(process.cmdline()) for process in gw.processes()),
        "environments": " ".join(str(process.environ()) for process in gw.processes()),
    }
    for place, text in places.items():
        assert "CLIENT-SECRET" not in text, place
        assert ENGINE_KEY not in text, place
    for file in gw.segment.iterdir():
        assert file.stat().st_mode & 0o077 == 0, f"{file} holds the key and is for its owner alone"


def test_b27_an_engine_without_a_key_gets_no_authorization_at_all(scene: Scene):
    with scene.client() as client:
        for path, body in ROUTES.items():
            assert client.ask(body, *CLIENT_SECRETS, target=path).status == 200
            (seen,) = scene.sim.seen(1)
            assert seen.header("authorization") is None
            assert "CLIENT-SECRET" not in repr(seen.headers)


def test_headers_named_in_connection_end_here_but_cannot_remove_what_the_gateway_needs(scene: Scene):
    with scene.client() as client:
        lines = ("X-Private: 1", "Connection: keep-alive, x-private, content-length, host, x-request-id")
        asked = request_id()
        assert client.ask(chat(), *lines, f"x-request-id: {asked}").status == 200
    (seen,) = scene.sim.seen(1)
    assert seen.header("x-private") is None
    assert seen.header("x-request-id") == asked
    assert seen.header("connection") is None


BAD_IDS = {
    "percent": b"a%0d%0aFAKE",
    "too_long": b"a" * 8000,
    "129_bytes": b"a" * 129,
    "space": b"a b",
    "quote": b'a"b',
    "braces": b'{"event":"request"}',
    "high_byte": b"a\xe9b",
    "next_line": b"a\xc2\x85b",
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_b29_an_unfit_request_id_is_replaced_everywhere(scene: Scene, name: str):
    unfit = BAD_IDS[name]
    before = len(scene.gateway.access_lines())
    with scene.client() as client:
        client.send(request(chat(), "x-request-id: " + unfit.decode("latin-1")))
        answer = client.answer()
    given = answer.header("x-request-id")
    assert given is not None
    assert re.fullmatch(r"req-[0-9a-f]{32}", given)
    (seen,) = scene.sim.seen(1)
    assert seen.header("x-request-id") == given
    assert scene.settled(given)["status"] == 200
    assert len(scene.gateway.access_lines()) == before + 1


@pytest.mark.parametrize("control", [b"\x1b[2J", b"\x00", b"\r", b"\n", b"\x7f"])
def test_b29_control_bytes_in_a_request_id_are_refused_and_never_logged(scene: Scene, control: bytes):
    before = scene.gateway.program.log.stat().st_size
    with scene.client() as client:
        client.send(request(chat()).replace(b"\r\n", b"\r\nx-request-id: a" + control + b"b\r\n", 1))
        answer = client.answer()
        assert (answer.status, answer.code) == (400, "malformed_request")
        given = answer.header("x-request-id")
    assert given is not None
    assert scene.settled(given)["status"] == 400
    written = scene.gateway.program.log.read_bytes()[before:]
    assert control.replace(b"\n", b"\x0b") not in written.replace(b"}\n", b"}")
    assert [json.loads(line)["request_id"] for line in written.splitlines()] == [given]


@pytest.mark.parametrize("fit", ["a", "A-b_c.d:e/f=g+h@i", "a" * 128, "019d3b1e-7a2b-7000-8000-0123456789ab"])
def test_b29_a_fit_request_id_is_kept_everywhere(scene: Scene, fit: str):
    with scene.client() as client:
        assert client.ask(chat(), f"x-request-id: {fit}").header("x-request-id") == fit
    assert scene.settled(fit)["request_id"] == fit


def test_b29_two_request_ids_are_none(scene: Scene):
    with scene.client() as client:
        answer = client.ask(chat(), "x-request-id: one", "x-request-id: two")
    assert str(answer.header("x-request-id")).startswith("req-")


FIELDS = {
    "ts", "level", "logger", "event", "process", "pid", "instance", "request_id", "method", "path",
    "upstream", "priority", "tenant", "surface", "user", "model", "served_model", "status", "outcome",
    "reason", "band",
    "pool", "replica", "queue_ms", "ttft_ms", "upstream_ms", "duration_ms", "streamed", "prompt_tokens",
    "completion_tokens", "cached_tokens", "bytes_out", "retries",
}  # fmt: skip


def test_every_request_has_one_line_with_the_same_fields_whatever_became_of_it(scene: Scene):
    asked = [request_id() for _ in range(7)]
    with scene.client() as client:
        client.ask(chat(), f"x-request-id: {asked[0]}")
        client.ask(chat(stream=True), f"x-request-id: {asked[1]}")
        client.ask(b"{", f"x-request-id: {asked[2]}")
        client.ask(chat("nope"), f"x-request-id: {asked[3]}")
        client.ask(f"x-request-id: {asked[4]}".encode(), f"x-request-id: {asked[4]}", target="/nowhere")
        client.ask(b"", f"x-request-id: {asked[5]}", method="GET", target="/v1/models")
        scene.sim.fault("status", "400", count=1)
        client.ask(chat(), f"x-request-id: {asked[6]}")
    statuses = [200, 200, 400, 404, 404, 200, 400]
    lines = [scene.settled(each) for each in asked]
    assert [line["status"] for line in lines] == statuses
    for line in lines:
        assert line.keys() == FIELDS, line.keys() ^ FIELDS
    assert lines[1]["streamed"]
    assert lines[1]["ttft_ms"] > 0


def test_a_log_has_no_bodies_and_a_client_cannot_write_lines_of_its_own(scene: Scene):
    forged = '"}\\n{"event":"request","request_id":"forged"}'
    prompt = "SECRET-PROMPT-1"
    body = {**chat(messages=[{"role": "user", "content": prompt}]), "user": "u"}
    before = scene.gateway.program.log.stat().st_size
    with scene.client() as client:
        answer = client.ask(
            body, f"x-user-id: {forged}", "x-tenant-id: a\x85b\xe2\x80\xa8c", "x-priority: \x9b31m"
        )
        assert answer.status == 200
        words = answer.json()["choices"][0]["message"]["content"]
        client.ask({"model": prompt + forged})
        client.ask(body, target=f"/{forged}".replace(" ", ""))
        client.ask(prompt.encode())
        asked = request_id()
        client.ask(method="GET", target="/last")
        client.ask(chat(), f"x-request-id: {asked}")
    scene.settled(asked)
    written = scene.gateway.program.log.read_bytes()[before:].decode()
    assert prompt not in written
    assert len(words) > 3
    assert words not in written
    # Whatever a reader takes for a line end: as many lines as requests, each a request's.
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["event"] for line in lines] == ["request"] * 6
    assert "forged" not in {line["request_id"] for line in lines}
    assert all(character.isprintable() or character == "\n" for character in written)


def test_errors_name_no_host_no_path_and_no_class(scene: Scene):
    """What an engine that cannot be reached, breaks off or talks nonsense makes of the answer."""
    port = str(scene.sim.port)
    for fault in ("reset", "garbage", "refuse"):
        scene.sim.fault(fault)
        with scene.client() as client:
            answer = client.ask(chat())
        scene.sim.clear_fault()
        assert answer.status in (502, 503)
        text = answer.body.decode()
        for secret in (port, "127.0.0.1", "e0", "urllib3", "Error", "Traceback", "/work", ".py"):
            assert secret not in text.replace("server_error", ""), (fault, secret, text)
    scene.gateway.wait_ready()
    assert PATH
