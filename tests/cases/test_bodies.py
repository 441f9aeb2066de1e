"""Cases of request bodies: broken, large, odd in shape, and many at once."""

from __future__ import annotations

import base64
import gzip
import json
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.accounts import settled
from tests.support.gateway import Gateway, endpoint
from tests.support.raw_engine import RawEngine
from tests.support.scene import Scene, open_scene, request_id
from tests.support.scripted_engine import response
from tests.support.wire import Answer, WireClient, chat, request

LIMIT = 21 * 2**20


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    # One core engine holds these prompts: blocks without end, and no model length in the way.
    flags = ("--max-model-len", "100000000", "--kv-blocks", "4000000", "--prefill-us-per-token", "0")
    with open_scene(tmp_path_factory.mktemp("scene"), *flags, max_body_bytes=LIMIT) as made:
        yield made


BROKEN = {
    "cut": (b'{"model":', "invalid_json"),
    "array": (b"[]", "invalid_value"),
    "string": (b'"x"', "invalid_value"),
    "number_as_model": (b'{"model":5}', "invalid_value"),
    "empty": (b"", "invalid_json"),
    "not_utf8": (b'{"model":"chat-model","x":"\xff"}', "invalid_json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_b17_a_body_that_is_no_request_is_refused_here_and_held_against_no_engine(scene: Scene, name: str):
    body, code = BROKEN[name]
    ledger, received, asked = scene.ledger(), scene.sim.stats()["received"], request_id()
    with scene.client() as client:
        answer = client.ask(body, f"x-request-id: {asked}")
        assert (answer.status, answer.code) == (400, code)
        assert answer.error["type"] == "invalid_request_error"
        line = scene.settled(asked)
        assert (line["status"], line["outcome"], line["replica"], line["retries"]) == (400, code, None, 0)
        assert scene.sim.stats()["received"] == received
        assert client.ask(chat()).status == 200
    assert ledger.grew("llmgw_requests_total", status="400", model="unknown") == 1
    assert ledger.grew("llmgw_upstream_errors_total") == 0


def padded(size: int) -> bytes:
    """Return a chat request of exactly so many bytes, most of them an image."""
    start = b'{"model":"chat-model","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image_url",'
    start += b'"image_url":{"url":"data:image/png;base64,'
    end = b'"}},{"type":"text","text":"hi"}]}]}'
    filler = base64.b64encode(bytes(range(256)) * 48)
    fill = size - len(start) - len(end)
    return start + (filler * (fill // len(filler) + 1))[:fill] + end


@pytest.fixture(scope="module")
def raw(scene: Scene) -> Iterator[tuple[RawEngine, Gateway]]:
    """An engine that keeps bodies of any size, and a gateway before it."""
    engine = RawEngine()
    engine.answer = lambda asked: asked.send(response(b"{}", "200 OK", "content-type: application/json"))
    try:
        yield engine, scene.gateways([endpoint("raw", engine.url)], max_body_bytes=LIMIT)
    finally:
        engine.close()


@pytest.mark.parametrize("size", [32_768, 32_769, 2**20, 20 * 2**20, LIMIT])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_b19_a_body_up_to_the_limit_reaches_the_engine_unchanged(
    raw: tuple[RawEngine, Gateway], size: int, coding: str
):
    body, asked = padded(size), request_id()
    engine, gateway = raw
    with WireClient(gateway.url, timeout=60) as client:
        if coding == "length":
            client.send(request(body, f"x-request-id: {asked}"))
        else:
            client.send(
                request(b"", f"x-request-id: {asked}", "Transfer-Encoding: chunked", has_length=False)
            )
            for start in range(0, size, 1_000_003):
                piece = body[start : start + 1_000_003]
                client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            client.send(b"0\r\n\r\n")
        assert client.answer().status == 200
    seen = engine.requests.pop()
    assert seen.body == body
    assert seen.header("content-length") == str(size)
    assert settled(gateway, asked)["status"] == 200
    assert not engine.requests


def test_b19_one_byte_more_is_refused_before_the_body_is_read(scene: Scene):
    ledger, received, asked = scene.ledger(), scene.sim.stats()["received"], request_id()
    with scene.client() as client:
        head = (f"Content-Length: {LIMIT + 1}", f"x-request-id: {asked}")
        client.send(request(b"", *head, has_length=False))
        answer = client.answer()
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert str(LIMIT) in answer.error["message"]
        assert client.is_closed()
    assert scene.settled(asked)["outcome"] == "body_too_large"
    assert ledger.grew("llmgw_requests_total", status="413") == 1
    assert scene.sim.stats()["received"] == received


def test_b19_a_client_that_sends_all_of_a_body_too_large_still_reads_the_answer(scene: Scene):
    with scene.client(timeout=60) as client:
        client.send(request(b"x" * (LIMIT + 2**20)))  # fails if the gateway resets the connection
        assert client.answer().status == 413
    scene.wait_idle()


def test_b19_a_chunked_body_is_refused_where_it_passes_the_limit(scene: Scene):
    received = scene.sim.stats()["received"]
    with scene.client(timeout=60) as client:
        client.send(request(b"", "Transfer-Encoding: chunked", has_length=False))
        piece = b"%x\r\n%b\r\n" % (2**20, b"x" * 2**20)
        for _ in range(LIMIT // 2**20 + 1):
            client.send(piece)
        answer = client.answer()  # the body has no end yet
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert client.is_closed()
    assert scene.sim.stats()["received"] == received
    scene.wait_idle()


def gzipped(scene: Scene, body: bytes, coding: str = "gzip") -> Answer:
    with scene.client(timeout=60) as client:
        answer = client.ask(body, f"Content-Encoding: {coding}")
        assert client.ask(chat()).status == 200, "the connection is out of step"
        return answer


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", "identity"])
def test_a_gzip_body_reaches_the_engine_plain(scene: Scene, coding: str):
    plain = json.dumps(chat(padding="é" * 50_000)).encode()
    received = scene.sim.stats()["received"]
    assert gzipped(scene, plain if coding == "identity" else gzip.compress(plain), coding).status == 200
    seen = scene.sim.seen(2)[0]
    assert scene.sim.stats()["received"] - received == 2
    assert seen.body == plain
    assert seen.header("content-encoding") is None
    assert seen.header("content-length") == str(len(plain))


def test_a_gzip_body_of_several_members_is_whole(scene: Scene):
    plain = json.dumps(chat()).encode()
    assert gzipped(scene, gzip.compress(plain[:20]) + gzip.compress(plain[20:])).status == 200
    assert scene.sim.seen(2)[0].body == plain


PLAIN = json.dumps(chat()).encode()
BAD_GZIP = {
    "cut": gzip.compress(PLAIN)[:-9],
    "without_its_sum": gzip.compress(PLAIN)[:-8],
    "wrong_sum": gzip.compress(PLAIN)[:-8] + bytes(8),
    "trailing_bytes": gzip.compress(PLAIN) + b"x",
    "trailing_half_member": gzip.compress(PLAIN) + gzip.compress(PLAIN)[:12],
    "zlib": zlib.compress(PLAIN),
    "nothing": b"",
}


@pytest.mark.parametrize("name", BAD_GZIP)
def test_a_gzip_body_that_is_not_whole_is_refused(scene: Scene, name: str):
    received = scene.sim.stats()["received"]
    answer = gzipped(scene, BAD_GZIP[name])
    assert (answer.status, answer.code) == (415, "unsupported_encoding")
    assert scene.sim.stats()["received"] - received == 1


def test_a_gzip_bomb_is_refused_at_the_limit_and_holds_nobody_up(scene: Scene):
    bomb = zlib.compressobj(1, wbits=31)
    zeros = bytes(2**20)
    data = b"".join(bomb.compress(zeros) for _ in range(200)) + bomb.flush()
    before = memory(scene.gateway)
    answer = gzipped(scene, data)
    assert (answer.status, answer.code) == (413, "body_too_large")
    # Of 200 MiB no more was unpacked than the limit allows.
    assert memory(scene.gateway) - before < 2 * LIMIT


UNCHANGED: dict[str, tuple[str, Any]] = {
    "token_array": ("/v1/embeddings", {"input": [1, 2, 3]}),
    "token_arrays": ("/v1/embeddings", {"input": [[1, 2, 3], [4]]}),
    "text": ("/v1/embeddings", {"input": "x"}),
    "texts": ("/v1/embeddings", {"input": ["a", "b"]}),
    "prompt_of_tokens": ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1}),
    "prompts_of_tokens": ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1}),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_b87_token_arrays_reach_the_engine_as_they_are(scene: Scene, name: str):
    path, fields = UNCHANGED[name]
    body = json.dumps({**fields, "model": "chat-model"}, separators=(" , ", ":  ")).encode()
    with scene.client() as client:
        answer = client.ask(body, target=path)
        assert answer.status == 200, answer.body
        assert answer.json()["usage"]["prompt_tokens"] > 0
    (seen,) = scene.sim.seen(1)
    assert (seen.target, seen.body) == (path, body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_b21_an_image_of_two_megabytes_reaches_the_engine_unchanged(scene: Scene, path: str):
    body = padded(2 * 2**20).replace(b'"messages"', b'"input"' if path == "/v1/responses" else b'"messages"')
    with scene.client(timeout=30) as client:
        client.send(request(body, target=path))
        client.answer()  # the simulated engine knows no /v1/responses
    (seen,) = scene.sim.seen(1)
    assert (seen.target, seen.body) == (path, body)


IMAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
}
SHAPES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"messages": [IMAGE]},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/audio/speech": {"input": "hello", "voice": "x"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/a-new_route.2/of~mine": {"anything": {"goes": None}},
}


@pytest.mark.parametrize("path", SHAPES)
def test_b89_only_model_is_required_and_every_shape_goes_on_unchanged(scene: Scene, path: str):
    body, asked = json.dumps({**SHAPES[path], "model": "chat-model"}).encode(), request_id()
    with scene.client() as client:
        answer = client.ask(body, f"x-request-id: {asked}", target=path)
    (seen,) = scene.sim.seen(1)
    assert (seen.target, seen.body) == (path, body)
    line = scene.settled(asked)
    assert (line["replica"], line["model"], line["status"]) == ("e0", "chat-model", answer.status)
    if answer.status == 200 and "usage" in answer.json():
        assert line["prompt_tokens"] == answer.json()["usage"].get("prompt_tokens")


def memory(gateway: Gateway) -> int:
    """Return the resident bytes of all workers."""
    return sum(process.memory_info().rss for process in gateway.processes("workers"))


def test_b23_many_large_bodies_all_complete_and_memory_comes_back(scene: Scene):
    """Scaled down: 200 requests of 1 MiB, 20 at once, 50 ms each at the engine."""
    scene.sim.configure(ttft_ms=50)
    body = request(padded(2**20))

    def ask(count: int) -> list[int]:
        with scene.client(timeout=60) as client:
            statuses = []
            for _ in range(count):
                client.send(body)
                statuses.append(client.answer().status)
            return statuses

    ask(2)
    before = memory(scene.gateway)
    with ThreadPoolExecutor(20) as pool:
        statuses = [status for part in pool.map(ask, [10] * 20) for status in part]
    assert statuses == [200] * 200
    scene.wait_idle()
    assert memory(scene.gateway) <= 1.3 * before + 50 * 2**20
    scene.sim.configure(ttft_ms=1)
    began = time.monotonic()
    with scene.client() as client:
        assert client.ask(chat()).status == 200
    assert time.monotonic() - began < 1.0
