"""What the gateway's core costs per request, per event and per decision; prints figures and budgets.

    python -m bench.micro_core

Exit code 1 above a budget.
"""

from __future__ import annotations

import json
import random
import sys

from bench.calls import Call, report
from conf.schema import Picker, RoutingProfile
from gateway.core import errors
from gateway.core.body import find_member, read_request, rename_model, set_model, with_include_usage
from gateway.core.framing import ChunkedDecoder, encode_chunk, parse_response_head, whole_chunks
from gateway.core.headers import accept_request_id, client_header_lines, engine_request_head
from gateway.core.schedule.pipeline import READY, Fleet, Request
from gateway.core.schedule.registry import build_pipeline
from gateway.core.sse import SseRelay
from gateway.core.usage import UsageTap

# One event as vLLM 0.32 sends it, and one as llama.cpp does.
VLLM_EVENT = (
    b'data: {"id":"chatcmpl-9c427013840d73f8","object":"chat.completion.chunk","created":1796014169,'
    b'"model":"tiny-llama","choices":[{"index":0,"delta":{"content":" fails"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)
LLAMACPP_EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" model"}}],"created":1796014598,'
    b'"id":"chatcmpl-9qGLEGyMQQlXNbsyRSruEoAzMQ71wGce","model":"tiny-llama",'
    b'"system_fingerprint":"b0-unknown","object":"chat.completion.chunk"}\n\n'
)
CONTINUOUS_EVENT = VLLM_EVENT.replace(
    b"}\n\n", b',"usage":{"prompt_tokens":20,"total_tokens":22,"completion_tokens":2}}\n\n'
)
USAGE_EVENT = (
    b'data: {"id":"chatcmpl-9c427013840d73f8","object":"chat.completion.chunk","created":1796014169,'
    b'"model":"tiny-llama","choices":[],"usage":{"prompt_tokens":20,"total_tokens":22,"completion_tokens":2}}'
    b"\n\n"
)
RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 04:49:28 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n"
    b"x-request-id: 937665d93cdb4ba7a40406f2c56429ed\r\ntransfer-encoding: chunked\r\n\r\n"
)
REQUEST_HEADERS = [
    (b"Host", b"gateway:8080"),
    (b"Accept-Encoding", b"gzip, deflate"),
    (b"Connection", b"keep-alive"),
    (b"Accept", b"application/json"),
    (b"Content-Type", b"application/json"),
    (b"User-Agent", b"OpenAI/Python 3.57.0"),
    (b"X-Stainless-Lang", b"python"),
    (b"X-Stainless-OS", b"Linux"),
    (b"Authorization", b"Bearer sk-llmgw-x"),
    (b"Content-Length", b"2048"),
]


def main() -> int:
    """Measure all calls; return 1 if one is over its budget."""
    within = []
    for title, calls in (
        ("body", _body()),
        ("head", _head()),
        ("stream", _stream()),
        ("decision", _decision()),
    ):
        print(title)
        within.append(report(calls))
    return 0 if all(within) else 1


def _chat_body(size: int, text: str) -> bytes:
    """A request of about `size` bytes as openai-python sends it: messages first."""
    content = text * (1000 // len(text.encode()))
    messages = [{"role": "user", "content": content} for _ in range(max(1, size // 1030))]
    rest = {"model": "gpt-4o-mini", "max_tokens": 256, "stream": True, "temperature": 0.2}
    return json.dumps({"messages": messages, **rest}, ensure_ascii=False, separators=(",", ":")).encode()


def _body() -> list[Call]:
    calls = []
    for label, size, scale in (("2 KB", 2_048, 1.0), ("100 KB", 100_000, 30.0), ("2 MB", 2_000_000, 700.0)):
        body = _chat_body(size, "The quick brown fox jumps over it. ")
        wide = _chat_body(size, "北京にいます、")
        request = read_request(body)
        members = {"object": "list", "data": "x" * size, "model": "m", "usage": {"prompt_tokens": 1}}
        answer = json.dumps(members).encode()
        calls += [
            Call(f"read_request, {label}", lambda body=body: read_request(body), 8.0 * scale),
            Call(f"read_request, {label}, not ASCII", lambda body=wide: read_request(body), 16.0 * scale),
            Call(f"set_model, {label}", lambda body=body: set_model(body, "m"), 10.0 * scale),
            Call(
                f"with_include_usage, {label}",
                lambda body=body, request=request: with_include_usage(body, request),
                4.0 * scale,
            ),
            Call(f"find_member, {label}", lambda body=body: find_member(body, ("stream",)), 30.0 * scale),
            Call(f"prompt_token_estimate, {label}", request.prompt_token_estimate, 10.0 * scale),
            Call(f"rename_model, {label}", lambda body=answer: rename_model(body, "m", "c"), 30.0 * scale),
            Call(f"UsageTap, {label}", lambda body=answer: _tap(body), 15.0 * scale),
        ]
    return calls


def _tap(body: bytes) -> None:
    tap = UsageTap()
    for at in range(0, len(body), 65536):
        tap.feed(body[at : at + 65536])
    tap.usage()


def _head() -> list[Call]:
    rng = random.Random(1)
    answer = parse_response_head(RESPONSE_HEAD)
    assert answer is not None
    failed = b'{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}'
    return [
        Call("parse_response_head", lambda: parse_response_head(RESPONSE_HEAD), 12.0),
        Call("client_header_lines", lambda: client_header_lines(answer.headers), 6.0),
        Call(
            "engine_request_head",
            lambda: engine_request_head(
                b"/v1/chat/completions",
                REQUEST_HEADERS,
                host=b"10.0.0.1:9001",
                content_length=2048,
                request_id="req-1",
                api_key="k",
            ),
            10.0,
        ),
        Call("accept_request_id, made here", lambda: accept_request_id(None, rng), 3.0),
        Call("accept_request_id, the client's", lambda: accept_request_id(b"0198c2d4-aaaa-7000", rng), 2.0),
        Call("error body", errors.UnknownModel("m").body, 5.0),
        Call("from_upstream", lambda: errors.from_upstream(400, b"application/json", failed).body(), 20.0),
    ]


def _stream() -> list[Call]:
    burst, coded = VLLM_EVENT * 20, b"".join(encode_chunk(VLLM_EVENT))
    plain, withheld = SseRelay(), SseRelay(withhold_usage=True)
    renamed, renamed_llamacpp = (SseRelay(rename=("tiny-llama", "chat")) for _ in range(2))
    for relay in (plain, withheld, renamed):
        relay.feed(VLLM_EVENT)
    renamed_llamacpp.feed(LLAMACPP_EVENT)
    decoder = ChunkedDecoder()
    half = len(VLLM_EVENT) // 2
    big = b"data: " + b"x" * 2_000_000 + b"\n\n"

    def cut() -> None:
        plain.feed(VLLM_EVENT[:half])
        plain.feed(VLLM_EVENT[half:])

    def in_reads() -> None:
        for at in range(0, len(big), 65536):
            plain.feed(big[at : at + 65536])

    return [
        Call("SseRelay.feed, one event", lambda: plain.feed(VLLM_EVENT), 2.0),
        Call("  burst of 20", lambda: plain.feed(burst), 5.0),
        Call("  one event in two reads", cut, 8.0),
        Call("  the usage chunk, withheld", lambda: withheld.feed(USAGE_EVENT), 20.0),
        Call("  usage in each of a burst of 20", lambda: plain.feed(CONTINUOUS_EVENT * 20), 40.0),
        Call("  one event renamed, vLLM", lambda: renamed.feed(VLLM_EVENT), 8.0),
        Call("  one event renamed, llama.cpp", lambda: renamed_llamacpp.feed(LLAMACPP_EVENT), 10.0),
        Call("  burst of 20 renamed", lambda: renamed.feed(burst), 120.0),
        Call("  2 MB in reads of 64 KB", in_reads, 4000.0),
        Call("whole_chunks, one event", lambda: whole_chunks(coded), 2.0),
        Call("  burst of 20", lambda: whole_chunks(coded * 20), 30.0),
        Call("encode_chunk", lambda: encode_chunk(VLLM_EVENT), 1.0),
        Call("ChunkedDecoder.feed, one event", lambda: decoder.feed(coded), 3.0),
    ]


def _decision() -> list[Call]:
    rng = random.Random(1)
    request, retried = Request(), Request(excluded={3})
    profiles = {
        "default": RoutingProfile(),
        "3 scorers": RoutingProfile(scorers={"inflight": 1.0, "queue": 1.0, "kv": 1.0}),
        "p2c": RoutingProfile(picker=Picker(type="p2c")),
        "softmax": RoutingProfile(picker=Picker(type="softmax")),
    }
    calls = []
    for size, budget_us in ((16, 30.0), (1000, 500.0)):
        fleet = Fleet(
            now=9.0,
            slots=list(range(size)),
            ids=[f"e{i}" for i in range(size)],
            state=[READY] * size,
            inflight=[rng.randrange(30) for _ in range(size)],
            waiting=[float(rng.randrange(5)) for _ in range(size)],
            running=[1.0] * size,
            kv=[rng.random() for _ in range(size)],
            weight=[1.0] * size,
            cooldown_until=[0.0] * size,
        )
        for name, profile in profiles.items():
            choose = build_pipeline(profile).choose
            calls.append(
                Call(
                    f"choose of {size}, {name}",
                    lambda choose=choose, fleet=fleet: choose(request, fleet, rng),
                    budget_us,
                )
            )
        choose = build_pipeline(profiles["3 scorers"]).choose
        calls.append(
            Call(
                f"choose of {size}, 3 scorers, one tried",
                lambda choose=choose, fleet=fleet: choose(retried, fleet, rng),
                budget_us,
            )
        )
    return calls


if __name__ == "__main__":
    sys.exit(main())
