"""OpenAI's Python client against the gateway, as an application uses it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.engines.conftest import Served
from tests.support.wait import wait_until

HELLO: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
# Tokens of an answer that takes long everywhere; llama.cpp has to be kept from ending early.
LONG = 100_000
ENDLESS: Any = {"ignore_eos": True}


def client_of(served: Served, **options: Any) -> OpenAI:
    """Return a client without retries of its own; `options` are more of its arguments."""
    settings: dict[str, Any] = {"api_key": "sk-test", "max_retries": 0, "timeout": 30.0, **options}
    return OpenAI(base_url=served.gateway.base_url, **settings)


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with client_of(served) as client:
        yield client


@pytest.fixture
def sim_client(sim: Served) -> Iterator[OpenAI]:
    with client_of(sim) as client:
        yield client


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    """Return the answer of a stream's first choice."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_chat_completion_has_text_usage_and_the_name_that_was_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="chat-model", messages=HELLO, max_tokens=12)
    assert answer.model == "chat-model"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_an_alias_reaches_the_model(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=HELLO, max_tokens=4)
    assert answer.model == "gpt-4o-mini"


def test_a_stream_comes_in_pieces_and_says_why_it_ends(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="chat-model", messages=HELLO, max_tokens=16, stream=True)
    chunks = list(stream)
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 4
    assert {chunk.model for chunk in chunks} == {"chat-model"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_stream_has_the_same_text_as_the_whole_answer(client: OpenAI) -> None:
    request: Any = {"model": "chat-model", "messages": HELLO, "max_tokens": 24, "temperature": 0, "seed": 7}
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True)
    assert text_of(list(stream)) == whole.choices[0].message.content


def test_usage_ends_a_stream_for_those_who_ask(client: OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="chat-model", messages=HELLO, max_tokens=8, stream=True, stream_options=options
    )
    last = list(stream)[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_usage_that_nobody_asked_for_stays_out_of_a_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="chat-model", messages=HELLO, max_tokens=8, stream=True)
    assert all(chunk.choices for chunk in stream)


def test_the_request_log_counts_the_tokens_of_a_stream_that_asked_for_no_usage(
    client: OpenAI, served: Served
) -> None:
    request_id = f"log-{served.engine.kind}"
    headers = {"x-request-id": request_id}
    list(
        client.chat.completions.create(
            model="chat-model", messages=HELLO, max_tokens=8, stream=True, extra_headers=headers
        )
    )
    line = wait_until(lambda: served.gateway.access_lines(request_id=request_id), 5, "a line in the log")[0]
    assert line["status"] == 200
    assert line["streamed"] is True
    assert line["model"] == "chat-model"
    assert line["served_model"] == served.engine.served_model
    assert line["prompt_tokens"] > 0
    assert 0 < line["completion_tokens"] <= 8


def test_completions_stream_as_well(client: OpenAI) -> None:
    stream = client.completions.create(model="chat-model", prompt="Once upon", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_models_are_those_of_the_configuration(client: OpenAI) -> None:
    assert "chat-model" in {model.id for model in client.models.list()}
    assert client.models.retrieve("chat-model").id == "chat-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_embeddings_pass(sim_client: OpenAI) -> None:
    answer = sim_client.embeddings.create(model="chat-model", input=["one", "two"], encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1]


def test_a_tool_call_comes_whole(sim_client: OpenAI) -> None:
    answer = sim_client.chat.completions.create(
        model="chat-model", messages=HELLO, tools=[WEATHER], tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_streamed_tool_call_comes_whole(sim_client: OpenAI) -> None:
    stream = sim_client.chat.completions.create(
        model="chat-model", messages=HELLO, tools=[WEATHER], tool_choice="required", stream=True
    )
    calls = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    names = [call.function.name for call in calls if call.function and call.function.name]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert names == ["get_weather"]
    assert "city" in json.loads(arguments)


def test_a_conversation_with_tools_reaches_the_engine(client: OpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="chat-model", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.type == "invalid_request_error"


def test_what_the_engine_finds_wrong_is_a_bad_request_with_its_words(client: OpenAI) -> None:
    wrong: Any = "no list"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chat-model", messages=wrong)
    assert "messages" in str(caught.value.body)


def test_a_prompt_beyond_the_context_is_a_bad_request(client: OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 200_000}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="chat-model", messages=long, max_tokens=4)


def test_raw_responses_carry_the_headers(client: OpenAI, served: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="chat-model", messages=HELLO, max_tokens=4, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-llmgw-replica"] == "engine-1"
    assert raw.headers["x-llmgw-pool"] == "default"
    assert raw.headers["x-llmgw-served-model"] == served.engine.served_model
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().choices


def test_streamed_responses_carry_the_headers(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model="chat-model", messages=HELLO, max_tokens=4, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        assert response.headers["x-llmgw-replica"] == "engine-1"
        assert list(response.iter_lines())


def test_errors_carry_the_request_id(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(
            model="nobody", messages=HELLO, extra_headers={"x-request-id": "mine-2"}
        )
    assert caught.value.request_id == "mine-2"


def test_an_engine_that_is_full_is_a_rate_limit_with_a_time_to_wait(sim: Served) -> None:
    sim.engine.set_fault("status", "429,openai,7")
    with client_of(sim) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="chat-model", messages=HELLO)
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("status", [429, 503])
def test_the_client_waits_as_told_and_tries_again(sim: Served, status: int) -> None:
    sim.engine.set_fault("status", f"{status},openai,1", count=1)
    started = time.monotonic()
    with client_of(sim, max_retries=1) as client:
        answer = client.chat.completions.create(model="chat-model", messages=HELLO, max_tokens=4)
    assert answer.choices[0].message.content
    assert time.monotonic() - started >= 1.0, "Retry-After: 1 was not honoured"


def test_an_engine_that_is_gone_is_a_503_which_says_when_to_come_back(sim: Served) -> None:
    sim.engine.set_fault("reset")
    with client_of(sim) as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="chat-model", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.code in ("upstream_unreachable", "no_endpoint")
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_stream_that_breaks_raises_instead_of_looking_whole(sim: Served) -> None:
    sim.engine.set_fault("drop_stream", "3", count=1)
    with client_of(sim) as client, pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(model="chat-model", messages=HELLO, max_tokens=50, stream=True))
    assert caught.value.code == "upstream_interrupted"


def test_a_client_that_times_out_frees_the_engine(sim: Served) -> None:
    # Not with llama.cpp, which computes a whole answer to its end although nobody is there to take it.
    sim.engine.set_fault("slow", "200", count=1)
    with client_of(sim, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="chat-model", messages=HELLO)
    sim.engine.wait_idle()


def test_closing_a_stream_frees_the_engine(client: OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(
        model="chat-model", messages=HELLO, max_tokens=LONG, stream=True, extra_body=ENDLESS
    )
    with stream:
        for _, chunk in zip(range(4), stream, strict=False):
            assert chunk.model == "chat-model"
        assert served.engine.load() == 1
    served.engine.wait_idle()


def test_the_async_client_streams_many_at_a_time(served: Served) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"Question {number}"}]
        stream = await client.chat.completions.create(
            model="chat-model", messages=messages, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=served.gateway.base_url, api_key="sk-test", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    assert all(asyncio.run(all_of_them()))


def test_cancelling_an_async_request_before_its_answer_frees_the_engine(sim: Served) -> None:
    sim.engine.set_fault("slow", "200", count=1)

    async def cancel() -> None:
        async with AsyncOpenAI(base_url=sim.gateway.base_url, api_key="sk-test", max_retries=0) as client:
            request = client.chat.completions.create(model="chat-model", messages=HELLO)
            task = asyncio.ensure_future(request)
            while not await asyncio.to_thread(sim.engine.load):
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())
    sim.engine.wait_idle()
