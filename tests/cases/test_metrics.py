"""Cases of metrics: labels, engines' own names, and usage of zero."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator

import pytest

from tests.support.gateway import Gateways, endpoint
from tests.support.raw_engine import RawEngine, RawRequest
from tests.support.scene import Scene, open_scene, request_id
from tests.support.scripted_engine import ScriptedEngine, models, response
from tests.support.wait import wait_until
from tests.support.wire import WireClient, chat


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(tmp_path_factory.mktemp("scene")) as made:
        yield made


def test_b83_scanners_make_no_series(scene: Scene):
    rng = random.Random(83)
    print("seed 83")
    with scene.client() as client:
        for model in ("chat-model", "nope"):  # what ordinary traffic makes
            client.ask(chat(model))
        client.ask(method="GET", target="/nothing")
        client.ask(method="BREW", target="/nothing")
        before = set(scene.gateway.metrics())
        total = scene.gateway.metric("llmgw_requests_total")
        for _ in range(500):
            word = "".join(
                rng.choices(string.ascii_letters + string.digits + "-_.~%25/", k=rng.randint(1, 40))
            )
            prefix = rng.choice(("/", "/v1/", "/v1/models/", "/v1/chat/", "/admin/"))
            method = rng.choice(
                ("GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PROPFIND", word.upper()[:8])
            )
            method = "".join(letter for letter in method if letter.isalpha()) or "GET"
            method = method if 3 <= len(method) <= 20 else "GET"
            assert client.ask(method=method, target=prefix + word).status in (200, 404, 405)
        for _ in range(50):
            assert client.ask({"model": "".join(rng.choices(string.ascii_letters, k=12))}).status == 404
    assert scene.gateway.metric("llmgw_requests_total") == total + 550
    new = set(scene.gateway.metrics()) - before
    labels = {sample for sample in new if "_bucket" not in sample}
    assert len(labels) <= 6, labels  # statuses of the two models that stand for all
    models_seen = {part for sample in new for part in sample.split('"') if part in ("unknown", "unmatched")}
    assert models_seen <= {"unknown", "unmatched"}
    assert all('model="unknown"' in sample or 'model="unmatched"' in sample for sample in new), new


ZERO = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_b59_a_usage_of_zero_is_a_usage(gateway: Gateways, stream: bool):
    engine = RawEngine()

    def answer(asked: RawRequest) -> None:
        if stream:
            chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "x"}}]}
            events = [chunk, {**chunk, "choices": [], "usage": ZERO}]
            body = (
                b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n"
            )
            asked.send(response(body, "200 OK", "content-type: text/event-stream"))
        else:
            body = json.dumps({"object": "chat.completion", "choices": [], "usage": ZERO}).encode()
            asked.send(response(body, "200 OK", "content-type: application/json"))

    engine.answer = answer
    try:
        gw = gateway([endpoint("raw", engine.url)])
        asked = request_id()
        with WireClient(gw.url) as client:
            assert client.ask(chat(stream=stream), f"x-request-id: {asked}").status == 200
        wait_until(lambda: gw.access_lines(request_id=asked), 5)
        (line,) = gw.access_lines(request_id=asked)
        assert (line["prompt_tokens"], line["completion_tokens"]) == (0, 0)
        assert gw.metric("llmgw_tokens_total") == 0
    finally:
        engine.close()


def vllm(kv: str | None, waiting: str = "0", *, label: str = 'engine="0"', more: str = "") -> bytes:
    """Return metrics in vLLM's shape; `kv` is the name of the cache metric."""
    lines = [
        f"vllm:num_requests_waiting{{{label}}} {waiting}",
        f"vllm:num_requests_running{{{label}}} 1",
        more,
        *([f"vllm:{kv}{{{label}}} 0.5"] if kv else []),
    ]
    return response("\n".join(filter(None, lines)).encode() + b"\n")


ENGINES = {
    "old_names": vllm("gpu_cache_usage_perc"),
    "new_names": vllm("kv_cache_usage_perc"),
    "no_kv": vllm(None),
    "two_ranks": vllm(
        "kv_cache_usage_perc",
        "3",
        more='vllm:num_requests_waiting{engine="1"} 4\nvllm:num_requests_running{engine="1"} 5\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.7',
    ),
    "junk": response(
        b"# HELP vllm:num_requests_waiting \xff\x00 junk\nvllm:num_requests_waiting +Inf\nx{ 1\n"
    ),
}


def test_b85_engines_with_other_metric_names_are_understood_or_told(gateway: Gateways):
    engines = {name: ScriptedEngine() for name in ENGINES}
    for name, engine in engines.items():
        engine.script("/metrics", ENGINES[name])
        engine.script("/v1/models", models(name))
    try:
        entries = [endpoint(name, each.url, model=name, engine="vllm") for name, each in engines.items()]
        gw = gateway(entries)
        wait_until(lambda: gw.metric("llmgw_endpoint_up") == len(ENGINES), 15, lambda: str(gw.metrics()))
        wait_until(
            lambda: gw.log_lines(event="metric_contract_violated", replica="junk"), 10, gw.program.output
        )

        def shown(replica: str, name: str) -> float | None:
            samples = {
                sample: value for sample, value in gw.metrics().items() if f'replica="{replica}"' in sample
            }
            return next((value for sample, value in samples.items() if sample.startswith(name + "{")), None)

        for name in ("old_names", "new_names"):
            assert shown(name, "llmgw_endpoint_kv_usage_ratio") == 0.5
        assert shown("no_kv", "llmgw_endpoint_kv_usage_ratio") is None
        assert shown("no_kv", "llmgw_endpoint_running") == 1
        assert shown("two_ranks", "llmgw_endpoint_waiting") == 7
        assert shown("two_ranks", "llmgw_endpoint_running") == 6
        assert shown("two_ranks", "llmgw_endpoint_kv_usage_ratio") == pytest.approx(0.6)
        assert shown("junk", "llmgw_endpoint_contract_violated") == 1
        assert not shown("new_names", "llmgw_endpoint_contract_violated")
        states = {each["id"]: each["state"] for each in gw.admin_json("/api/v1/endpoints")["endpoints"]}
        # Usable, all of them; the one that cannot be read is judged by what is in flight.
        assert states == dict.fromkeys(ENGINES, "ready") | {"junk": "stale"}
        assert len(gw.log_lines(event="metric_contract_violated", replica="junk", level="warning")) == 3
    finally:
        for engine in engines.values():
            engine.refuse()
