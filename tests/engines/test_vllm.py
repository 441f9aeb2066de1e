"""The real vLLM, on the CPU with the tiny model. Minutes to install, 40 s to start: `make test-long`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from bin.engines.process import free_port
from bin.engines.vllm import SERVED_NAME, VARIABLES, Vllm
from tests.engines.conftest import Served, serve
from tests.support.engines import Engine, require
from tests.support.processes import Programs
from tests.support.wait import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def vllm(module_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway in front of vLLM."""
    installation = Vllm()
    require(installation.install)
    port = free_port()
    program = module_programs.start_command(installation.command(port), env=VARIABLES)
    engine = Engine(program, "vllm", f"http://127.0.0.1:{port}", SERVED_NAME)
    engine.wait_ready(300)
    yield from serve(engine, module_programs, tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def client(vllm: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=vllm.gateway.base_url, api_key="sk-test", max_retries=0, timeout=60) as client:
        yield client


def test_a_stream_has_the_same_text_as_the_whole_answer(client: OpenAI) -> None:
    request: Any = {"model": "chat-model", "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert {chunk.model for chunk in chunks} == {whole.model} == {"chat-model"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_cached_tokens_of_a_repeated_prompt_reach_the_request_log(client: OpenAI, vllm: Served) -> None:
    messages: Any = [{"role": "user", "content": "word " * 300}]
    for number in (1, 2):
        client.chat.completions.create(
            model="chat-model",
            messages=messages,
            max_tokens=2,
            extra_headers={"x-request-id": f"cached-{number}"},
        )
    (line,) = wait_until(lambda: vllm.gateway.access_lines(request_id="cached-2"), 5, "a line in the log")
    assert line["cached_tokens"] > 0


def test_a_chat_without_messages_is_a_bad_request_in_the_engine_s_words(client: OpenAI) -> None:
    wrong: Any = "no list"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chat-model", messages=wrong)
    assert "messages" in str(caught.value.body)


def test_closing_a_stream_frees_the_engine(client: OpenAI, vllm: Served) -> None:
    with client.chat.completions.create(
        model="chat-model", messages=HELLO, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).model == "chat-model"
        wait_until(lambda: vllm.engine.load() == 1, 5, "the request at the engine")
    vllm.engine.wait_idle()


def test_what_waits_inside_the_engine_is_scraped(client: OpenAI, vllm: Served) -> None:
    # vLLM runs four sequences at a time here; the others wait in it.
    streams = [
        client.chat.completions.create(
            model="chat-model", messages=HELLO, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(4)
    ]
    try:
        wait_until(
            lambda: vllm.gateway.metric("llmgw_endpoint_running", replica="engine-1") == 4,
            10,
            lambda: f"four running: {vllm.gateway.metrics()}",
        )
    finally:
        for stream in streams:
            stream.close()
    vllm.engine.wait_idle(3)
