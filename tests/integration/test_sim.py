"""`llmgw-sim` as a process: its endpoints, its faults, and what it gives back when clients leave."""

from __future__ import annotations

import base64
import http.client
import json
import re
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.core.contract import mapping_for, parse
from agent.sim.prompt import Vocabulary, make_prompt, salt_of
from agent.sim.requests import render_chat
from tests.support.processes import Programs
from tests.support.sim import SimEngine
from tests.support.tls import self_signed
from tests.support.wait import wait_until

MESSAGES = [{"role": "user", "content": "Explain how the import statement finds a module."}]
CHAT = {"model": "sim-model", "messages": MESSAGES, "max_tokens": 5}
STREAM = {**CHAT, "stream": True}
PATH = "/v1/chat/completions"


@pytest.fixture
def sim(programs: Programs) -> SimEngine:
    return SimEngine(programs)


class Answer:
    """A response, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """Return the data of its events."""
        parts = self.body.decode().replace("\r\n", "\n").split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") for part in parts)
        return [part.removeprefix("data: ") for part in parts]

    def chunks(self) -> list[Any]:
        """Return the decoded events before `[DONE]`."""
        events = self.events()
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


def ask(
    sim: SimEngine,
    path: str,
    body: object = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> Answer:
    with closing(sim.connect()) as connection:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        return Answer(connection.getresponse())


def get(sim: SimEngine, path: str) -> Answer:
    return ask(sim, path, method="GET")


def raw(sim: SimEngine, body: object, path: str = PATH) -> socket.socket:
    """Send a request and return the socket, its answer unread."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: sim\r\ncontent-length: {len(data)}\r\n\r\n"
    sock = socket.create_connection((sim.host, sim.port), timeout=20)
    try:
        sock.sendall(head.encode() + data)
    except OSError:
        sock.close()
        raise
    return sock


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(65536):
        received += data
    return received


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


# Answers.


def test_stream_and_whole_answer_say_the_same(sim: SimEngine) -> None:
    whole = ask(sim, PATH, CHAT).json()
    chunks = ask(sim, PATH, STREAM).chunks()
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert whole["usage"]["completion_tokens"] == 5


def test_answer_follows_from_prompt_and_seed(programs: Programs) -> None:
    prompt = make_prompt(render_chat(CHAT), 16, salt_of("sim-model", ""))
    for seed in (0, 7):
        sim = SimEngine(programs, "--seed", str(seed))
        words = Vocabulary(seed)
        expected = words.answer(words.start(prompt, 0), 5).decode()
        assert ask(sim, PATH, CHAT).json()["choices"][0]["message"]["content"] == expected


def test_answer_without_limit_has_the_default_length_and_stops(programs: Programs) -> None:
    sim = SimEngine(programs, "--output-tokens", "9")
    answer = ask(sim, PATH, {"model": "sim-model", "messages": MESSAGES}).json()
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_usage_chunk_comes_only_when_asked_for(sim: SimEngine) -> None:
    assert not any("usage" in chunk for chunk in ask(sim, PATH, STREAM).chunks())
    chunks = ask(sim, PATH, {**STREAM, "stream_options": {"include_usage": True}}).chunks()
    assert [chunk for chunk in chunks if chunk.get("usage")] == chunks[-1:]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_continuous_usage_counts_up(sim: SimEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = ask(sim, PATH, {**STREAM, "stream_options": options}).chunks()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 4, 5, 5]


def test_several_choices_are_different_and_complete(sim: SimEngine) -> None:
    whole = ask(sim, PATH, {**CHAT, "n": 3}).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 15
    streamed = {0: "", 1: "", 2: ""}
    for chunk in ask(sim, PATH, {**STREAM, "n": 3}).chunks():
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert [streamed[index] for index in range(3)] == texts


def test_completion_takes_text_ids_and_lists_of_both(sim: SimEngine) -> None:
    for prompt, count in (("abcd", 1), ([1, 2, 3], 3), (["abcd", "efghijkl"], 3), ([[1, 2, 3], [4]], 4)):
        body = {"model": "sim-model", "prompt": prompt, "max_tokens": 4}
        whole = ask(sim, "/v1/completions", body).json()
        assert whole["usage"]["prompt_tokens"] == count
        texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
        streamed = dict.fromkeys(texts, "")
        for chunk in ask(sim, "/v1/completions", {**body, "stream": True}).chunks():
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == texts


def test_tool_choice_yields_a_call_streamed_in_pieces(sim: SimEngine) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    body = {**CHAT, "tools": tools, "tool_choice": "auto"}
    choice = ask(sim, PATH, body).json()["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    chunks = ask(sim, PATH, {**body, "stream": True}).chunks()
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks[1:]]
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert len(deltas) > 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    after = [*MESSAGES, {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    assert ask(sim, PATH, {**body, "messages": after}).json()["choices"][0]["message"]["content"]


def test_reasoning_comes_before_the_content(programs: Programs) -> None:
    sim = SimEngine(programs, "--reasoning-tokens", "2")
    message = ask(sim, PATH, CHAT).json()["choices"][0]["message"]
    chunks = ask(sim, PATH, STREAM).chunks()
    reasoning = "".join(chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks)
    assert (reasoning, text_of(chunks)) == (message["reasoning_content"], message["content"])
    assert len(reasoning.encode()) == 8


def test_embeddings_scores_and_ranks(sim: SimEngine) -> None:
    body = {"model": "sim-model", "input": ["a", "b"]}
    data = ask(sim, "/v1/embeddings", body).json()["data"]
    assert [one["index"] for one in data] == [0, 1]
    packed = ask(sim, "/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<8f", base64.b64decode(packed)) == pytest.approx(data[0]["embedding"])
    ranked = ask(
        sim, "/v1/rerank", {"model": "sim-model", "query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    ).json()["results"]
    assert len(ranked) == 2
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]
    scores = ask(sim, "/v1/score", {"model": "sim-model", "text_1": "q", "text_2": ["a", "b"]}).json()["data"]
    assert len(scores) == 2


def test_tokenize_and_detokenize_are_inverse(sim: SimEngine) -> None:
    tokens = ask(sim, "/tokenize", {"model": "sim-model", "prompt": "Zürich, 猫 world!"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert ask(sim, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Zürich, 猫 world!"}


def test_models_health_version_and_load(programs: Programs) -> None:
    sim = SimEngine(programs, "--model", "one", "--model", "two", "--max-model-len", "512")
    models = get(sim, "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("one", 512), ("two", 512)]
    assert (get(sim, "/health").status, get(sim, "/health").body) == (200, b"")
    assert get(sim, "/version").json()["version"].endswith("-sim")
    assert get(sim, "/load").json() == {"server_load": 0}


def test_metrics_fulfil_the_contract(sim: SimEngine) -> None:
    ask(sim, PATH, CHAT)
    stats, violations = parse(get(sim, "/metrics").body, mapping_for("sim"))
    assert violations == ()
    assert (stats.waiting, stats.running, stats.kv_usage) == (0, 0, 0.0)
    assert (stats.generation_tokens, stats.block_size, stats.num_blocks) == (5, 16, 65536)


def test_request_id_is_echoed_and_names_the_answer(sim: SimEngine) -> None:
    answer = ask(sim, PATH, CHAT, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "chatcmpl-abc-1"
    assert ask(sim, PATH, CHAT).headers["x-request-id"]


# Refusals.


@pytest.mark.parametrize(
    ("path", "body", "status", "type_"),
    [
        (PATH, {**CHAT, "model": "nope"}, 404, "NotFoundError"),
        (PATH, {"messages": MESSAGES}, 400, "Bad Request"),
        (PATH, {"model": "sim-model"}, 400, "Bad Request"),
        (PATH, b'{"model": "x", "messages": [', 400, "Bad Request"),
        (PATH, b"[1]", 400, "Bad Request"),
        (PATH, {**CHAT, "temperature": "hot"}, 400, "Bad Request"),
        (PATH, {**CHAT, "stream_options": {}}, 400, "Bad Request"),
        (PATH, {**CHAT, "n": 0}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "sim-model", "prompt": "a" * 5000}, 400, "BadRequestError"),
        (
            "/v1/completions",
            {"model": "sim-model", "prompt": [1] * 1024, "stream": True},
            400,
            "BadRequestError",
        ),
        ("/v1/embeddings", {"model": "sim-model"}, 400, "Bad Request"),
    ],
)
def test_bad_request_is_refused_as_vllm_does(
    programs: Programs, path: str, body: object, status: int, type_: str
) -> None:
    answer = ask(SimEngine(programs, "--max-model-len", "1024"), path, body)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, type_)
    assert error["message"]


def test_unknown_path_and_method_are_refused_as_fastapi_does(sim: SimEngine) -> None:
    assert (ask(sim, "/nope", {}).status, ask(sim, "/nope", {}).json()) == (404, {"detail": "Not Found"})
    answer = get(sim, PATH)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


def test_key_is_wanted_on_the_api_alone(programs: Programs) -> None:
    sim = SimEngine(programs, "--api-key", "secret")
    assert ask(sim, PATH, CHAT).status == 401
    assert ask(sim, PATH, CHAT, headers={"Authorization": "Bearer wrong"}).status == 401
    assert ask(sim, PATH, CHAT, headers={"authorization": "bearer secret"}).status == 200
    assert get(sim, "/health").status == 200


def test_answer_is_cut_at_the_context(programs: Programs) -> None:
    sim = SimEngine(programs, "--max-model-len", "64")
    answer = ask(sim, "/v1/completions", {"model": "sim-model", "prompt": [1] * 60, "max_tokens": 100})
    assert answer.json()["usage"]["completion_tokens"] == 4


# Connections.


def test_connection_serves_many_requests_and_chunked_bodies(sim: SimEngine) -> None:
    with closing(sim.connect()) as connection:
        for _ in range(3):
            pieces = iter([json.dumps(CHAT)[:20].encode(), json.dumps(CHAT)[20:].encode()])
            connection.request("POST", PATH, pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
            assert Answer(connection.getresponse()).status == 200
    assert sim.stats()["connections_accepted"] == 1


def test_requests_sent_ahead_are_answered_in_order(sim: SimEngine) -> None:
    with closing(raw(sim, STREAM)) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\n\r\nGET /load HTTP/1.0\r\n\r\n")
        received = read_all(sock)
    assert received.index(b"[DONE]") < received.index(b'"version"') < received.index(b"server_load")


def test_large_body_is_read_after_continue(sim: SimEngine) -> None:
    body = json.dumps(
        {**CHAT, "messages": [{"role": "user", "content": "x" * 400_000}], "pad": "y" * 9_000_000}
    )
    with closing(socket.create_connection((sim.host, sim.port), timeout=20)) as sock:
        head = f"POST {PATH} HTTP/1.1\r\nexpect: 100-continue\r\nconnection: close\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body.encode())
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")


def test_idle_connection_is_closed(programs: Programs) -> None:
    sim = SimEngine(programs, "--keepalive-s", "0.05")
    with closing(socket.create_connection((sim.host, sim.port), timeout=20)) as sock:
        assert sock.recv(1) == b""


def test_seen_requests_are_kept_byte_for_byte(sim: SimEngine) -> None:
    body = b'{"model":"sim-model", "messages":[{"role":"user","content":"\\u00e9"}] ,"max_tokens":1}'
    ask(sim, PATH, body, headers={"X-Odd-Case": "Yes"})
    (seen,) = sim.seen()
    assert (seen.method, seen.target, seen.body) == ("POST", PATH, body)
    assert ("X-Odd-Case", "Yes") in seen.headers


# Batch, queue, cache.


def test_waiting_requests_run_one_after_the_other(programs: Programs) -> None:
    sim = SimEngine(programs, "--max-num-seqs", "1", "--itl-ms", "5")
    socks = [raw(sim, STREAM) for _ in range(4)]
    wait_until(lambda: sim.stats()["received"] == 4)
    for sock in socks:
        with closing(sock):
            received = b""
            while b"[DONE]" not in received:
                received += sock.recv(65536)
    stats = sim.stats()
    assert (stats["max_running_seen"], stats["completed"], stats["running"], stats["waiting"]) == (1, 4, 0, 0)
    assert stats["max_waiting_seen"] >= 1


def test_next_turn_of_a_chat_finds_its_prefix(sim: SimEngine) -> None:
    messages = [{"role": "user", "content": "word " * 100}]
    body = {"model": "sim-model", "messages": messages, "max_tokens": 64}
    first = ask(sim, PATH, body).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    for message in messages:
        message.pop("tool_calls", None)
    second = ask(sim, PATH, body).json()["usage"]
    before = first["usage"]["total_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] == before // 16 * 16


def test_cached_prompt_is_computed_faster(programs: Programs) -> None:
    sim = SimEngine(programs, "--prefill-us-per-token", "1000", "--ttft-ms", "0", "--itl-ms", "0")
    body = {"model": "sim-model", "prompt": [5] * 320, "max_tokens": 1}
    assert _seconds(lambda: ask(sim, "/v1/completions", body)) >= 0.32
    assert _seconds(lambda: ask(sim, "/v1/completions", body)) < 0.32


def _seconds(function: Callable[[], object]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


# Clients that leave.


@pytest.fixture
def slow_sim(programs: Programs) -> SimEngine:
    return SimEngine(programs, "--max-num-seqs", "2", "--ttft-ms", "60000", "--kv-blocks", "1000")


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_client_that_leaves_gives_back_slot_blocks_and_place(slow_sim: SimEngine, body: object) -> None:
    sim = slow_sim
    socks = [raw(sim, body) for _ in range(4)]
    wait_until(lambda: (sim.stats()["running"], sim.stats()["waiting"]) == (2, 2))
    assert sim.stats()["blocks_in_use"] > 0
    socks[3].close()  # waits
    wait_until(lambda: (sim.stats()["running"], sim.stats()["waiting"]) == (2, 1), 1.0)
    socks[0].close()  # runs; the last one takes its slot
    wait_until(lambda: (sim.stats()["running"], sim.stats()["waiting"]) == (2, 0), 1.0)
    for sock in socks[1:3]:
        sock.close()
    wait_until(lambda: sim.stats()["blocks_in_use"] == 0, 1.0)
    stats = sim.stats()
    assert (stats["running"], stats["aborted"], stats["connections_open"]) == (0, 4, 0)


def test_client_that_leaves_in_mid_stream_gives_back_its_blocks(programs: Programs) -> None:
    sim = SimEngine(programs, "--itl-ms", "20")
    with closing(raw(sim, {**STREAM, "max_tokens": 10_000})) as sock:
        received = b""
        while received.count(b"data:") < 3:
            received += sock.recv(65536)
        assert sim.stats()["blocks_in_use"] > 0
    wait_until(lambda: sim.stats()["blocks_in_use"] == 0, 1.0)
    assert sim.stats()["aborted"] == 1


# Faults.


def test_refused_port_opens_again_under_its_number(sim: SimEngine) -> None:
    idle = sim.connect()
    idle.request("GET", "/health")
    idle.getresponse().read()
    sim.fault("refuse")
    with pytest.raises(ConnectionRefusedError):
        ask(sim, PATH, CHAT)
    assert idle.sock is not None
    assert idle.sock.recv(1) == b""
    idle.close()
    sim.clear_fault()
    assert ask(sim, PATH, CHAT).status == 200


def test_connection_is_reset_when_accepted(sim: SimEngine) -> None:
    sim.fault("reset_accept", count=1)
    with pytest.raises((ConnectionResetError, BrokenPipeError)), closing(raw(sim, CHAT)) as sock:
        read_all(sock)
    assert ask(sim, PATH, CHAT).status == 200


def test_connection_is_reset_after_the_request(sim: SimEngine) -> None:
    sim.fault("reset", count=1)
    with pytest.raises(ConnectionResetError):
        ask(sim, PATH, CHAT)
    assert sim.stats()["received"] == 1
    assert ask(sim, PATH, CHAT).status == 200


def test_kept_connection_is_reset_at_its_second_request(sim: SimEngine) -> None:
    sim.fault("close_on_reuse")
    with closing(sim.connect()) as connection:
        connection.request("POST", PATH, json.dumps(CHAT))
        assert Answer(connection.getresponse()).status == 200
        connection.request("POST", PATH, json.dumps(CHAT))
        with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
            connection.getresponse()


@pytest.mark.parametrize(
    ("arg", "status", "retry_after", "body"),
    [
        ("429,openai,7", 429, "7", b'"SimulatedError"'),
        ("503", 503, None, b'"SimulatedError"'),
        ("502,html", 502, None, b"<html>"),
        ("500,empty", 500, None, b""),
        ("503,detail", 503, None, b'{"detail"'),
    ],
)
def test_status_fault_answers_so_often_as_asked(
    sim: SimEngine, arg: str, status: int, retry_after: str | None, body: bytes
) -> None:
    sim.fault("status", arg, count=2)
    for _ in range(2):
        answer = ask(sim, PATH, CHAT)
        assert (answer.status, answer.headers["retry-after"]) == (status, retry_after)
        assert body in answer.body
    assert ask(sim, PATH, CHAT).status == 200


def test_fault_can_hit_a_path(sim: SimEngine) -> None:
    sim.fault("status", "500", path="/metrics")
    assert get(sim, "/metrics").status == 500
    assert ask(sim, PATH, CHAT).status == 200


def test_hung_request_is_never_answered(sim: SimEngine) -> None:
    sim.fault("hang_headers", count=1)
    with closing(raw(sim, STREAM)) as sock:
        wait_until(lambda: sim.stats()["hung"] == 1)
        assert ask(sim, PATH, CHAT).status == 200
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    wait_until(lambda: sim.stats()["hung"] == 0)
    assert sim.stats()["aborted"] == 1


def test_hung_stream_keeps_its_blocks_until_the_client_leaves(sim: SimEngine) -> None:
    sim.fault("hang_stream", 2)
    with closing(raw(sim, STREAM)) as sock:
        received = b""
        while received.count(b"data:") < 2:
            received += sock.recv(65536)
        assert ask(sim, "/v1/embeddings", {"model": "sim-model", "input": "x"}).status == 200
        assert sim.stats()["running"] == 1
        assert sim.stats()["blocks_in_use"] > 0
        assert b"[DONE]" not in received
    wait_until(lambda: sim.stats()["blocks_in_use"] == 0, 1.0)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
@pytest.mark.parametrize("arg", ["2", "2,rst"])
def test_dropped_answer_is_cut_in_the_middle(sim: SimEngine, body: object, arg: str) -> None:
    sim.fault("drop_stream", arg, count=1)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        ask(sim, PATH, body)
    assert sim.stats()["running"] == 0
    assert ask(sim, PATH, body).status == 200


def test_error_event_ends_the_stream(sim: SimEngine) -> None:
    sim.fault("error_event", 3)
    events = ask(sim, PATH, STREAM).events()
    assert len(events) == 5
    assert json.loads(events[3])["error"]["code"] == 500
    assert sim.stats()["running"] == 0


def test_garbage_is_no_http(sim: SimEngine) -> None:
    sim.fault("garbage")
    with pytest.raises(http.client.BadStatusLine):
        ask(sim, PATH, CHAT)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_bad_chunk_breaks_the_framing(sim: SimEngine, body: object) -> None:
    sim.fault("bad_chunk", 1)
    with pytest.raises(http.client.IncompleteRead):
        ask(sim, PATH, body)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_early_close_ends_the_body_with_the_connection(sim: SimEngine, body: dict[str, object]) -> None:
    sim.fault("early_close")
    answer = ask(sim, PATH, body)
    assert not {"content-length", "transfer-encoding"} & {name.lower() for name in answer.headers}
    assert answer.headers["connection"] == "close"
    assert answer.chunks() if body.get("stream") else answer.json()


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_both_framings_are_sent(sim: SimEngine, body: object) -> None:
    sim.fault("both_framings")
    answer = ask(sim, PATH, body)
    assert answer.headers["content-length"]
    assert answer.headers["transfer-encoding"] == "chunked"


def test_huge_event_is_one_event(sim: SimEngine) -> None:
    sim.fault("huge_event", 3_000_000)
    assert max(map(len, ask(sim, PATH, STREAM).events())) > 3_000_000


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_bytewise_answer_is_complete(sim: SimEngine, body: dict[str, object]) -> None:
    sim.fault("byte_by_byte")
    answer = ask(sim, PATH, body)
    assert answer.chunks() if body.get("stream") else answer.json()


def test_crlf_ends_the_lines_of_every_event(sim: SimEngine) -> None:
    sim.fault("crlf")
    answer = ask(sim, PATH, STREAM)
    assert answer.body.count(b"\n") == answer.body.count(b"\r\n") == 2 * len(answer.events())


def test_stream_without_done_ends_well(sim: SimEngine) -> None:
    sim.fault("no_done")
    assert ask(sim, PATH, STREAM).events()[-1] != "[DONE]"


def test_slow_multiplies_the_times_of_a_request(programs: Programs) -> None:
    sim = SimEngine(programs, "--ttft-ms", "10", "--itl-ms", "0")
    sim.fault("slow", 20, count=1)
    assert _seconds(lambda: ask(sim, PATH, CHAT)) >= 0.2


def test_lying_health_is_well_while_nothing_works(sim: SimEngine) -> None:
    sim.fault("health_lies")
    assert get(sim, "/health").status == 200
    assert get(sim, "/v1/models").json()["data"] == []
    assert ask(sim, PATH, CHAT).status == 500


def test_stuck_engine_goes_on_when_freed(sim: SimEngine) -> None:
    sim.fault("stuck")
    with closing(raw(sim, STREAM)) as sock:
        wait_until(lambda: sim.stats()["waiting"] == 1)
        assert parse(get(sim, "/metrics").body, mapping_for("sim")).stats.waiting == 1
        sim.clear_fault("stuck")
        received = b""
        while b"[DONE]" not in received:
            received += sock.recv(65536)


def test_faults_can_be_set_by_flag(programs: Programs) -> None:
    sim = SimEngine(programs, "--fault", "status:429,openai,2@1", "--fault", "crlf")
    assert ask(sim, PATH, STREAM).status == 429
    assert b"\r\n" in ask(sim, PATH, STREAM).body


@pytest.mark.parametrize("flag", ["nope", "status:x", "status:503,nope", "crlf@0", "crlf@x"])
def test_impossible_fault_stops_the_start(programs: Programs, flag: str) -> None:
    program = programs.start("sim", "--fault", flag)
    assert program.wait() == 2
    assert program.output().startswith("llmgw-sim: ")


def test_impossible_orders_are_refused(sim: SimEngine) -> None:
    for path, body in (
        ("/sim/fault", {"kind": "nope"}),
        ("/sim/fault", {"kind": "crlf", "extra": 1}),
        ("/sim/config", {"itl": 1}),
        ("/sim/config", {"itl_ms": -1}),
    ):
        answer = ask(sim, path, body)
        assert answer.status == 400
        assert answer.json()["detail"]
    assert get(sim, "/sim/nope").status == 404


def test_timings_can_be_changed_while_it_runs(programs: Programs) -> None:
    sim = SimEngine(programs, "--ttft-ms", "60000", "--max-num-seqs", "1")
    with closing(raw(sim, CHAT)):
        wait_until(lambda: sim.stats()["running"] == 1)
        sim.configure(ttft_ms=0, itl_ms=0, max_num_seqs=2, output_tokens=3)
        answer = ask(sim, PATH, {"model": "sim-model", "messages": MESSAGES})
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_reset_forgets_counts_faults_and_prompts(sim: SimEngine) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "x" * 400}]}
    ask(sim, PATH, long)
    sim.fault("crlf")
    sim.reset()
    stats = sim.stats()
    assert (stats["received"], stats["completed"], stats["blocks_idle"]) == (0, 0, 0)
    assert ask(sim, PATH, long).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_engine_listens_on_ipv6(programs: Programs) -> None:
    sim = SimEngine(programs, host="::1")
    assert ask(sim, PATH, CHAT).status == 200


@pytest.mark.parametrize("body", [STREAM, {**CHAT, "pad": "x" * 1_000_000}], ids=["stream", "large"])
def test_engine_speaks_tls(programs: Programs, tmp_path: Path, body: dict[str, object]) -> None:
    made = self_signed(tmp_path)
    sim = SimEngine(programs, "--tls-cert", str(made.cert), "--tls-key", str(made.key))
    context = ssl.create_default_context(cafile=str(made.cert))
    with closing(http.client.HTTPSConnection(sim.host, sim.port, timeout=20, context=context)) as connection:
        for _ in range(2):
            connection.request("POST", PATH, json.dumps(body))
            answer = Answer(connection.getresponse())
            assert answer.chunks() if body.get("stream") else answer.json()


def test_client_that_speaks_no_tls_harms_nobody(programs: Programs, tmp_path: Path) -> None:
    made = self_signed(tmp_path)
    sim = SimEngine(programs, "--tls-cert", str(made.cert), "--tls-key", str(made.key))
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(sim, PATH, CHAT)
    wait_until(lambda: sim.stats()["connections_open"] == 0)


def test_thousand_streams_at_20_ms_are_complete(programs: Programs) -> None:
    sim = SimEngine(programs, "--itl-ms", "20", "--max-num-seqs", "1000")
    body = {**STREAM, "max_tokens": 50}
    socks = [raw(sim, body) for _ in range(1000)]
    received = dict.fromkeys(socks, b"")
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(timeout=20)
            assert ready, "the engine fell silent"
            for key, _ in ready:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                data = sock.recv(65536)
                assert data
                received[sock] += data
                if received[sock].endswith(b"\r\n0\r\n\r\n"):
                    selector.unregister(sock)
                    sock.close()
    words = [re.findall(rb'"content":"(.*?)"\}', data) for data in received.values()]
    assert all(one == words[0] for one in words)
    assert len(words[0]) == 51
    stats = sim.stats()
    assert (stats["completed"], stats["max_running_seen"], stats["blocks_in_use"]) == (1000, 1000, 0)
