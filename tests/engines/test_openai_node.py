"""OpenAI's Node client against the gateway; node/client.mjs has the scenarios."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import Served

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module", autouse=True)
def node() -> None:
    """Fail on CI, and skip elsewhere, where Node or the client is missing."""
    missing = None
    if not shutil.which("node"):
        missing = "there is no node on this machine"
    elif not (FOLDER / "node_modules" / "openai").is_dir():
        missing = f"the client is not installed: npm install in {FOLDER}"
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


def command(served: Served, scenario: str, **options: Any) -> list[str]:
    """Return the command line of a scenario; `options` are of the client."""
    return ["node", str(FOLDER / "client.mjs"), served.gateway.base_url, scenario, json.dumps(options)]


def run(served: Served, scenario: str, **options: Any) -> Any:
    """Run a scenario and return what it printed."""
    done = subprocess.run(command(served, scenario, **options), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chat_completion_arrives(served: Served) -> None:
    answer = run(served, "whole")
    assert answer["model"] == "chat-model"
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


def test_a_stream_comes_in_pieces_and_says_why_it_ends(served: Served) -> None:
    chunks = run(served, "stream")["chunks"]
    assert len(chunks) > 4
    assert all(chunk["choices"] for chunk in chunks), "usage that nobody asked for"
    assert {chunk["model"] for chunk in chunks} == {"chat-model"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_usage_ends_a_stream_for_those_who_ask(served: Served) -> None:
    last = run(served, "usage")
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


def test_tool_calls_come_whole(sim: Served) -> None:
    answer = run(sim, "tools")
    assert answer["whole"][0]["function"]["name"] == "get_weather"
    assert "city" in json.loads(answer["whole"][0]["function"]["arguments"])
    assert "city" in json.loads(answer["streamed"])


def test_responses_carry_the_headers(served: Served) -> None:
    answer = run(served, "headers")
    assert answer["status"] == 200
    assert answer["headers"]["x-request-id"] == "node-1"
    assert answer["headers"]["x-llmgw-replica"] == "engine-1"
    assert answer["headers"]["x-llmgw-served-model"] == served.engine.served_model


def test_an_unknown_model_is_not_found(served: Served) -> None:
    error = run(served, "unknownModel")["error"]
    assert error["kind"] == "NotFoundError"
    assert error["code"] == "model_not_found"
    assert error["requestID"]


def test_what_the_engine_finds_wrong_is_a_bad_request(served: Served) -> None:
    error = run(served, "badRequest")["error"]
    assert error["kind"] == "BadRequestError"
    assert "messages" in error["message"]


def test_an_engine_that_is_full_is_a_rate_limit(sim: Served) -> None:
    sim.engine.set_fault("status", "429,openai,7")
    assert run(sim, "whole")["error"]["kind"] == "RateLimitError"


@pytest.mark.parametrize("status", [429, 503])
def test_the_client_waits_as_told_and_tries_again(sim: Served, status: int) -> None:
    sim.engine.set_fault("status", f"{status},openai,1", count=1)
    assert run(sim, "retried", maxRetries=1)["ms"] >= 1000


def test_a_stream_that_breaks_throws_instead_of_looking_whole(sim: Served) -> None:
    sim.engine.set_fault("drop_stream", "3", count=1)
    assert run(sim, "stream")["error"]["code"] == "upstream_interrupted"


def test_a_client_that_times_out_frees_the_engine(sim: Served) -> None:
    sim.engine.set_fault("slow", "200", count=1)
    assert run(sim, "whole", timeout=300)["error"]["kind"] == "APIConnectionTimeoutError"
    sim.engine.wait_idle()


def test_leaving_a_stream_frees_the_engine(served: Served) -> None:
    with subprocess.Popen(
        command(served, "leave"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline()) == {"count": 3}
            served.engine.wait_idle()
            assert process.poll() is None, (
                "the client has to be alive, or its end would have closed the stream"
            )
        finally:
            process.stdin.write("\n")
            process.stdin.close()
