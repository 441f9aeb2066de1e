"""The main flows as Python; every other test runs what `make compile` left, which is the compiled form."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bin.compiled.form import VARIABLE, choose
from tests.support.gateway import Gateways, endpoint
from tests.support.processes import ROOT
from tests.support.raw_client import RawClient
from tests.support.raw_engine import DONE, JSON_HEAD, LAST_CHUNK, SSE_HEAD, chunk, event
from tests.support.stand import Stand, open_stand

ANSWER = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
WHOLE_STREAM = SSE_HEAD + chunk(event("one")) + chunk(event("two")) + chunk(DONE) + LAST_CHUNK
FREED_S = 3.0


@pytest.fixture(scope="module")
def open_python_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A gateway that runs as Python whatever has been compiled."""
    with open_stand(tmp_path_factory.mktemp("python-stand"), env={VARIABLE: "0"}) as opened:
        yield opened


@pytest.fixture
def python_stand(open_python_stand: Stand) -> Iterator[Stand]:
    """The same; a test must leave nothing under way."""
    open_python_stand.begin()
    yield open_python_stand
    open_python_stand.end()


def test_gateway_says_which_form_it_runs(gateway: Gateways, python_stand: Stand) -> None:
    assert python_stand.gateway.log_lines(event="gateway_started")[0]["compiled"] is False
    assert python_stand.gateway.admin_json("/api/v1/status")["compiled"] is False
    usual = gateway([endpoint("engine-1", python_stand.engine.url)])
    is_compiled = choose(ROOT, os.environ) != ROOT
    assert usual.log_lines(event="gateway_started")[0]["compiled"] is is_compiled
    assert usual.admin_json("/api/v1/status")["compiled"] is is_compiled
    folders = {str(choose(ROOT, os.environ) / "bin")}
    for kind in ("workers", "coordinator"):
        boots = {process.cmdline()[1].rpartition("/")[0] for process in usual.processes(kind)}
        assert boots == folders


def test_python_form_answers_whole(python_stand: Stand) -> None:
    call = python_stand.call(stream=False)
    request = python_stand.next_request(call)
    request.send(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
    request.finish()
    assert call.client.read_all() == ANSWER
    line = python_stand.settled(call)
    assert (line["status"], line["outcome"]) == (200, "ok")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 2)


def test_python_form_streams(python_stand: Stand) -> None:
    call = python_stand.call()
    request = python_stand.next_request(call)
    request.send(SSE_HEAD + chunk(event("one")))
    assert call.client.read_until(len(event("one"))) == event("one")
    request.send(chunk(event("two")) + chunk(DONE) + LAST_CHUNK)
    request.finish()
    assert call.client.read_all() == event("one") + event("two") + DONE
    assert python_stand.settled(call)["outcome"] == "ok"


def test_python_form_ends_a_broken_stream_with_an_error_event(python_stand: Stand) -> None:
    call = python_stand.call()
    request = python_stand.next_request(call)
    request.send(SSE_HEAD + chunk(event("one")))
    assert call.client.read_until(len(event("one"))) == event("one")
    request.close()
    rest = call.client.read_all().removeprefix(event("one"))
    assert rest.startswith(b'data: {"error":')
    assert b"upstream_interrupted" in rest
    assert python_stand.settled(call)["outcome"] == "stream_broken"


def test_python_form_tries_the_other_engine(python_stand: Stand) -> None:
    call = python_stand.call("pair")
    first = python_stand.next_request(call)
    first.reset()
    second = python_stand.next_request(call)
    assert second.port != first.port
    second.send(WHOLE_STREAM)
    second.finish()
    assert call.client.read_all() == event("one") + event("two") + DONE
    assert python_stand.settled(call)["retries"] == 1


@pytest.mark.parametrize("sent", [b"", SSE_HEAD + chunk(event("one"))], ids=["waiting", "streaming"])
def test_python_form_frees_the_engine_of_a_client_that_left(python_stand: Stand, sent: bytes) -> None:
    call = python_stand.call()
    request = python_stand.next_request(call)
    if sent:
        request.send(sent)
        assert call.client.status == 200
    call.client.close()
    assert request.wait_closed(FREED_S) < FREED_S
    assert python_stand.settled(call)["status"] == 499


def test_python_form_gives_up_a_silent_engine(python_stand: Stand) -> None:
    call = python_stand.call("slow-headers")
    request = python_stand.next_request(call)
    assert call.client.status == 504
    request.wait_closed()
    assert python_stand.settled(call)["outcome"] == "upstream_timeout"


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b'{"model":"nobody"}', 404)], ids=["no-json", "unknown-model"]
)
def test_python_form_refuses_and_goes_on(python_stand: Stand, body: bytes, status: int) -> None:
    with RawClient(python_stand.gateway.url) as client:
        for _ in range(2):  # the connection is kept
            client.post(body)
            assert client.status == status
            assert client.error()["message"]
