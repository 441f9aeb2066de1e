"""Cases of event streams, by their numbers: what operators of other gateways have hit, and what is right."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.support.accounts import Ledger, line_of, settled, wait_idle
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.raw_engine import (
    DONE,
    JSON_HEAD,
    LAST_CHUNK,
    SSE_HEAD,
    RawEngine,
    RawRequest,
    chunk,
    event,
)
from tests.support.sim import SimEngine
from tests.support.sse_reference import data_of_events
from tests.support.stand import Stand

ONE = event("one")
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}\n\n'


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    engine = RawEngine()
    yield engine
    engine.close()


def end(request: RawRequest) -> None:
    """End a chunked stream as it should."""
    request.send(chunk(DONE) + LAST_CHUNK)
    request.finish()


# B01, B03, B05, B11: bytes and events.


def test_b01_text_cut_inside_a_character_arrives_unchanged_and_is_counted(stand: Stand) -> None:
    stream = event("北京🙂") + event("é") + USAGE
    call = stand.call(stream_options={"include_usage": True})
    request = stand.next_request(call)
    request.send(SSE_HEAD)
    for byte in chunk(stream):
        request.send(bytes([byte]))
    end(request)
    received = call.client.read_all()
    assert received == stream + DONE
    assert "\ufffd" not in received.decode()
    line = stand.settled(call)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 2)
    assert line["ttft_ms"] > 0
    assert stand.ledger.grew("llmgw_ttft_seconds_count", model="chat-model") == 1


def test_b03_event_of_megabytes_arrives_unchanged_and_the_next_one_too(
    gateway: Gateways, engine: RawEngine
) -> None:
    running = gateway([endpoint("e", engine.url)])
    size = 4 * 2**20
    huge = b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"%b"}}]}}]}\n\n' % (
        b"a" * size
    )
    before = peak_memory(running)
    with RawClient(running.url) as client:
        client.post(chat(), headers={"x-request-id": "huge"})
        request = engine.next_request()
        request.send(SSE_HEAD + chunk(huge))
        assert client.read_until(len(huge)) == huge
        request.send(chunk(ONE))
        assert client.read_until(len(huge) + len(ONE)) == huge + ONE
        end(request)
        assert client.read_all() == huge + ONE + DONE
    assert settled(running, "huge")["bytes_out"] > size
    assert peak_memory(running) - before < 5 * size


def peak_memory(gateway: Gateway) -> int:
    """Return the highest resident size that any worker has had, in bytes."""
    peaks = []
    for process in gateway.processes("workers"):
        try:
            with open(f"/proc/{process.pid}/status") as status:
                peaks.append(int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024)  # type: ignore[index]
        except (FileNotFoundError, psutil.NoSuchProcess):
            continue
    return max(peaks)


def test_b05_error_behind_half_an_event_is_an_event_of_its_own(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE) + chunk(b'data: {"choices":[{"del'))
    call.client.read_until(len(ONE))
    request.close()
    data = data_of_events(call.client.read_all())
    events = [json.loads(one) for one in data]  # no event with broken JSON
    assert [sorted(one) for one in events] == [["choices", "object"], ["error"]]
    assert events[1]["error"]["code"] == "upstream_interrupted"
    assert stand.settled(call)["outcome"] == "stream_broken"


def test_b11_read_of_several_events_and_a_half_loses_nothing(stand: Stand) -> None:
    three = event("one") + event("two") + event("three")
    four = event("four")
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(three + four[:30]))
    assert call.client.read_until(len(three)) == three
    request.send(chunk(four[30:]))
    assert call.client.read_until(len(three + four)) == three + four
    end(request)
    assert call.client.read_all() == three + four + DONE


# B07: signs of life while the engine says nothing. (In the admission queue: with the admission layer.)

PING_S = 0.15


def pinging(gateway: Gateways, engine: RawEngine, mode: str, **router: Any) -> Gateway:
    ping = {"mode": mode, "interval": f"{PING_S * 1000:.0f}ms"}
    return gateway([endpoint("e", engine.url)], router={"stream_ping": ping, **router})


def without_pings(payload: bytes, mode: str) -> tuple[bytes, int]:
    """Return the payload without pings, and how many there were."""
    pattern = rb": ping\n" if mode == "comment" else rb'data: \{"id":"life[^\n]*"choices":\[\]\}\n\n'
    return re.subn(pattern, b"", payload)


@dataclass(frozen=True, slots=True)
class Pinging:
    """A gateway that pings its clients, and its engine."""

    mode: str
    gateway: Gateway
    engine: RawEngine


@pytest.fixture(scope="module", params=["comment", "chunk"])
def lasting_pinger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pinging]:
    """One gateway for all tests of a mode."""
    folder = tmp_path_factory.mktemp(request.param)
    programs = Programs(folder)
    gateways = Gateways(programs, folder)
    engine = RawEngine()
    try:
        yield Pinging(request.param, pinging(gateways, engine, request.param), engine)
    finally:
        engine.close()
        gateways.close()
        programs.close()


@pytest.fixture
def pinger(lasting_pinger: Pinging) -> Iterator[Pinging]:
    """A gateway that pings, in each mode; a test must leave nothing under way."""
    yield lasting_pinger
    assert not lasting_pinger.engine.drop_unseen()
    wait_idle(lasting_pinger.gateway)


@pytest.mark.parametrize("http10", [False, True])
def test_b07_silent_engine_is_bridged_by_pings(pinger: Pinging, http10: bool) -> None:
    mode, request_id = pinger.mode, f"life-{http10}"
    with RawClient(pinger.gateway.url) as client:
        client.post(chat(), headers={"x-request-id": request_id}, http10=http10)
        request = pinger.engine.next_request()
        # While the engine is silent, before its head and behind it, and between two events.
        pings = 0
        for part in (SSE_HEAD, chunk(ONE), chunk(ONE)):
            wanted = pings + 3
            while pings < wanted:
                received, pings = without_pings(client.read_until(len(client.payload) + 1), mode)
            request.send(part)
        end(request)
        received, _ = without_pings(client.read_all(), mode)
        assert received == ONE + ONE + DONE
        assert client.status == 200
        assert client.header("content-type") == "text/event-stream; charset=utf-8"
        # Comments are no events; chunks are, and clients that look at choices[0] can take them.
        data = data_of_events(bytes(client.payload))
        assert len(data) == 3 + (pings if mode == "chunk" else 0)
    line = settled(pinger.gateway, request_id)
    assert (line["status"], line["outcome"]) == (200, "ok")
    assert line["ttft_ms"] > 6 * PING_S * 1000  # a ping is no token


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "upstream_unreachable"),
        (b"garbage\r\n\r\n", "upstream_error"),
        (b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n", "upstream_error"),
        (JSON_HEAD + b"content-length: 2\r\n\r\n{}", "upstream_error"),
    ],
    ids=["closed", "garbage", "status", "no-stream"],
)
def test_b07_error_behind_a_ping_is_an_event(
    pinger: Pinging, answer: bytes, code: str, request: pytest.FixtureRequest
) -> None:
    request_id = "life-" + request.node.callspec.id
    ledger = Ledger(pinger.gateway)
    with RawClient(pinger.gateway.url) as client:
        client.post(chat(), headers={"x-request-id": request_id})
        asked = pinger.engine.next_request()
        client.read_until(1)
        asked.send(answer)
        asked.close()
        received, pings = without_pings(client.read_all(), pinger.mode)
        assert pings >= 1
        (data,) = data_of_events(received)
        assert json.loads(data)["error"]["code"] == code
        assert client.is_closed()
    line = settled(pinger.gateway, request_id)
    assert (line["status"], line["outcome"], line["retries"]) == (200, code, 0)
    assert ledger.grew("llmgw_upstream_errors_total") == 1


def test_b07_engine_that_stays_silent_ends_with_an_event_if_pinged_and_with_504_if_not(
    gateway: Gateways, engine: RawEngine
) -> None:
    for mode in ("comment", "off"):
        running = pinging(gateway, engine, mode, timeouts={"first_token": "500ms"})
        with RawClient(running.url) as client:
            client.post(chat(), headers={"x-request-id": "life"})
            engine.next_request()
            if mode == "off":
                assert client.status == 504
                assert client.error()["code"] == "upstream_timeout"
            else:
                assert client.status == 200
                received, pings = without_pings(client.read_all(), mode)
                assert pings >= 1
                assert json.loads(data_of_events(received)[0])["error"]["code"] == "upstream_timeout"
        assert settled(running, "life")["outcome"] == "upstream_timeout"


def test_b07_without_pings_a_refusal_is_a_proper_503(stand: Stand) -> None:
    call = stand.call()
    stand.next_request(call).close()
    assert call.client.status == 503
    error = call.client.error()
    assert error["reason"] == "upstream_unreachable"
    assert call.client.header("retry-after") == str(error["retry_after"])
    assert stand.settled(call)["status"] == 503


def test_b07_answers_that_are_no_stream_get_no_pings(pinger: Pinging) -> None:
    with RawClient(pinger.gateway.url) as client:
        client.post(chat(stream=False))
        request = pinger.engine.next_request()
        time.sleep(PING_S * 3)  # nothing is to happen in this time
        request.send(JSON_HEAD + b"content-length: 2\r\n\r\n{}")
        request.finish()
        assert client.read_all() == b"{}"


# B09, B63: usage.


def test_b09_usage_is_counted_for_clients_that_did_not_ask_and_kept_from_them(
    programs: Programs, gateway: Gateways
) -> None:
    sim = SimEngine(programs, "--model", "chat-model")
    running = gateway([endpoint("e", sim.url)])
    ledger = Ledger(running)
    options: list[dict[str, Any] | None] = [None, {}, {"include_usage": False}, {"include_usage": True}]
    options.append({"continuous_usage_stats": False, "include_usage": True})
    options.append({"continuous_usage_stats": False})
    for number, option in enumerate(options):
        fields = {} if option is None else {"stream_options": option}
        with RawClient(running.url) as client:
            client.post(chat(max_tokens=5, **fields), headers={"x-request-id": f"usage-{number}"})
            events = [json.loads(data) for data in data_of_events(client.read_all())[:-1]]
        asked = bool(option and option.get("include_usage"))
        assert [one["choices"] == [] for one in events].count(True) == asked
        assert any(one.get("usage") for one in events) == asked
        sent = sim.seen(1)[0].json()["stream_options"]
        assert sent == {**(option or {}), "include_usage": True}
        line = settled(running, f"usage-{number}")
        assert line["completion_tokens"] == 5
        assert line["prompt_tokens"] > 0
    assert ledger.grew("llmgw_tokens_total", direction="completion") == 5 * len(options)


@pytest.mark.parametrize("asks", [False, True])
def test_b63_usage_is_the_last_report_wherever_it_stands(stand: Stand, asks: bool) -> None:
    def one(text: bytes, usage: bytes) -> bytes:
        return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}],"usage":%b}\n\n' % (text, usage)

    def counts(n: int) -> bytes:
        return b'{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}' % (n, n + 7)

    nulls = one(b"a", b"null") + one(b"b", b"null") + one(b"c", counts(3))
    continuous = one(b"a", counts(1)) + one(b"b", counts(2)) + one(b"c", counts(3))
    for stream in (nulls, continuous, nulls + one(b"", b"null")):
        call = stand.call(**({"stream_options": {"include_usage": True}} if asks else {}))
        request = stand.next_request(call)
        request.send(SSE_HEAD + chunk(stream))
        end(request)
        assert call.client.read_all() == stream + DONE  # there are choices: nothing to withhold
        line = stand.settled(call)
        assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 3)
    assert stand.ledger.grew("llmgw_tokens_total", direction="completion") == 9
    assert stand.ledger.grew("llmgw_tokens_total", direction="prompt") == 21


# B13, B15: fields and errors pass as they are.


def test_b13_reasoning_content_keeps_its_name_both_ways(programs: Programs, gateway: Gateways) -> None:
    sim = SimEngine(programs, "--model", "chat-model", "--reasoning-tokens", "3")
    running = gateway([endpoint("e", sim.url)])
    with RawClient(running.url) as client:
        client.post(chat(stream=False, max_tokens=6))
        message = client.json()["choices"][0]["message"]
        assert message["reasoning_content"]
        assert "reasoning" not in message
        client.post(chat(max_tokens=6))
        events = [json.loads(data) for data in data_of_events(client.read_all())[:-1]]
        deltas = [choice["delta"] for one in events for choice in one["choices"]]
        assert (
            "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
        )
        assert not any("reasoning" in delta for delta in deltas)
        history = [{"role": "user", "content": "hello"}, message, {"role": "user", "content": "and?"}]
        body = json.dumps({"model": "chat-model", "messages": history, "max_tokens": 2}).encode()
        client.post(body)
        assert client.status == 200
        client.read_all()
        assert sim.seen(1)[0].body == body


def test_b15_error_of_an_engine_is_not_wrapped_again_and_html_is_wrapped_once(stand: Stand) -> None:
    own = b'{"error":{"message":"ctx len","type":"BadRequestError","code":400}}'
    page = b"<html><body>bad gateway at node7.internal</body></html>"
    for code, kind, body in ((400, b"application/json", own), (502, b"text/html", page)):
        call = stand.call()
        request = stand.next_request(call)
        request.send(
            b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (code, kind, len(body), body)
        )
        request.finish()
        assert call.client.status == code
        assert call.client.header("content-type") == "application/json"
        received = call.client.read_all()
        if body is own:
            assert received == own
        else:
            error = json.loads(received)["error"]
            assert list(json.loads(received)) == ["error"]
            assert error["code"] == "upstream_error"
            assert isinstance(error["message"], str)
            assert b"<" not in received
            assert b"node7" not in received
        assert stand.settled(call)["status"] == code


# B91: names.


def test_b91_model_is_the_name_the_client_asked_for_everywhere(programs: Programs, gateway: Gateways) -> None:
    sim = SimEngine(programs, "--model", "m-int")
    running = gateway(
        [endpoint("e", sim.url, model="public", served_model="m-int")],
        models=[{"name": "public", "aliases": ["chat"]}],
    )
    prompts: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/embeddings", {"input": "x"}),
    ]
    for name in ("chat", "public"):
        for path, fields in prompts:
            for stream in (False, True) if "completions" in path else (False,):
                body = {"model": name, **fields, **({"stream": True} if stream else {})}
                with RawClient(running.url) as client:
                    client.post(json.dumps(body).encode(), path=path)
                    assert client.status == 200
                    assert client.header("x-llmgw-served-model") == "m-int"
                    whole = client.read_all()
                answers = data_of_events(whole)[:-1] if stream else [whole]
                assert {json.loads(answer)["model"] for answer in answers} == {name}
                assert b"m-int" not in whole
                assert sim.seen(1)[0].json()["model"] == "m-int"


def test_b91_error_of_the_engine_does_not_give_its_own_name_away(gateway: Gateways) -> None:
    engine = RawEngine(serves=("m-int",))
    try:
        running = gateway(
            [endpoint("e", engine.url, model="public", served_model="m-int")],
            models=[{"name": "public", "aliases": ["chat"]}],
        )
        error = b'{"error":{"message":"The model `m-int` refuses.","type":"BadRequestError","code":400}}'
        with RawClient(running.url) as client:
            client.post(chat(model="chat"))
            request = engine.next_request()
            assert json.loads(request.body)["model"] == "m-int"
            request.send(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\n")
            request.send(b"content-length: %d\r\n\r\n%b" % (len(error), error))
            request.finish()
            assert client.status == 400
            assert client.read_all() == error.replace(b"m-int", b"chat")
    finally:
        engine.close()


def test_b91_engines_own_name_can_be_configured(programs: Programs, gateway: Gateways) -> None:
    sim = SimEngine(programs, "--model", "m-int")
    running = gateway(
        [endpoint("e", sim.url, model="public", served_model="m-int")], router={"response_model": "served"}
    )
    with RawClient(running.url) as client:
        client.post(chat(stream=False, model="public", max_tokens=2))
        assert client.json()["model"] == "m-int"


# B101: deadlines that know the prompt.


@pytest.mark.parametrize("head", [b"", SSE_HEAD], ids=["late-head", "early-head"])
def test_b101_first_token_deadline_grows_with_the_prompt(
    gateway: Gateways, engine: RawEngine, head: bytes
) -> None:
    timeouts = {"first_token": "400ms", "first_token_per_token": "5ms"}
    running = gateway([endpoint("e", engine.url)], router={"timeouts": timeouts})
    with RawClient(running.url, timeout=30) as patient, RawClient(running.url) as hasty:
        patient.post(chat(content="word " * 4000), headers={"x-request-id": "long"})
        long = engine.next_request()
        long.send(head)
        hasty.post(chat(content="ten tokens"), headers={"x-request-id": "short"})
        short = engine.next_request()
        short.send(head)
        if head:
            assert json.loads(data_of_events(hasty.read_all())[0])["error"]["code"] == "upstream_timeout"
        else:
            assert hasty.status == 504
        short.wait_closed()
        line = line_of(running, "short")
        assert 400 <= line["duration_ms"] < 4000
        # Longer than the base already, and the long one still waits.
        assert long.is_open()
        long.send((b"" if head else SSE_HEAD) + chunk(ONE))
        end(long)
        assert patient.read_all() == ONE + DONE
    line = settled(running, "long")
    assert line["outcome"] == "ok"
    assert line["ttft_ms"] > 400
