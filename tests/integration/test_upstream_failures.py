"""Engines that fail: what the client gets, what is given back, what is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.accounts import settled
from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.raw_client import RawClient, Truncated, chat
from tests.support.raw_engine import DONE, JSON_HEAD, LAST_CHUNK, SSE_HEAD, RawEngine, chunk, event
from tests.support.stand import MAX_EVENT_BYTES, Stand
from tests.support.wait import wait_until

ONE, TWO = event("one"), event("two")
SSE_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
SSE_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
WHOLE = SSE_HEAD + chunk(ONE) + chunk(DONE) + LAST_CHUNK
ERROR_JSON = b'{"error":{"message":"busy","type":"x","param":null,"code":"engine_busy"}}'


def status(code: int, body: bytes, *lines: bytes) -> bytes:
    """Return an engine's answer with a status."""
    more = b"".join(line + b"\r\n" for line in lines)
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (code, len(body))
    return head + more + b"\r\n" + body


def assert_broken_event(payload: bytes, before: bytes, code: bytes) -> None:
    """The client has `before`, then one event with an error, and no `[DONE]`."""
    assert payload.startswith(before)
    rest = payload[len(before) :]
    assert rest.startswith(b'data: {"error":')
    assert rest.endswith(b"}\n\n")
    assert rest.count(b"\n\n") == 1
    assert b'"code":"%b"' % code in rest
    assert b"[DONE]" not in rest


# Mid-stream.


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("last", [chunk(TWO)[:40], chunk(TWO), b"5"], ids=["mid-event", "event", "mid-frame"])
def test_stream_that_breaks_ends_with_an_error_event_and_without_done(
    stand: Stand, ending: str, last: bytes
) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE))
    assert call.client.read_until(len(ONE)) == ONE
    request.send(last)
    before = ONE + TWO if last == chunk(TWO) else ONE
    assert call.client.read_until(len(before)) == before
    request.close() if ending == "close" else request.reset()
    assert_broken_event(call.client.read_all(), before, b"upstream_interrupted")
    assert call.client.is_closed()
    line = stand.settled(call)
    assert (line["status"], line["outcome"], line["reason"]) == (200, "stream_broken", "upstream_interrupted")
    assert line["retries"] == 0
    assert stand.ledger.grew("llmgw_upstream_errors_total", reason="upstream_interrupted") == 1


def test_length_delimited_stream_that_is_short_ends_with_an_error_event(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_LENGTH % (len(ONE) + 10) + ONE)
    assert call.client.read_until(len(ONE)) == ONE
    request.close()
    assert_broken_event(call.client.read_all(), ONE, b"upstream_interrupted")
    assert stand.settled(call)["outcome"] == "stream_broken"


def test_close_delimited_stream_without_done_does_not_look_whole(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_CLOSE + ONE)
    assert call.client.read_until(len(ONE)) == ONE
    request.close()
    assert_broken_event(call.client.read_all(), ONE, b"upstream_interrupted")
    assert stand.settled(call)["outcome"] == "stream_broken"


def test_close_delimited_stream_that_says_done_or_an_error_is_whole(stand: Stand) -> None:
    for last in (DONE, b'data: {"error":{"message":"x","code":500}}\n\n'):
        call = stand.call()
        request = stand.next_request(call)
        request.send(SSE_CLOSE + ONE + last)
        request.close()
        assert call.client.read_all() == ONE + last
        assert stand.settled(call)["outcome"] == "ok"


def test_http10_client_gets_the_error_event_and_the_end_of_the_connection(stand: Stand) -> None:
    call = stand.call(http10=True)
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE))
    assert call.client.read_until(len(ONE)) == ONE
    request.reset()
    assert_broken_event(call.client.read_all(), ONE, b"upstream_interrupted")
    assert stand.settled(call)["outcome"] == "stream_broken"


def test_error_event_of_the_engine_passes_unchanged(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    error = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\n'
    request.send(SSE_HEAD + chunk(ONE) + chunk(error) + chunk(DONE) + LAST_CHUNK)
    request.finish()
    assert call.client.read_all() == ONE + error + DONE
    line = stand.settled(call)
    assert line["status"] == 200


def test_bad_chunk_in_a_stream_ends_with_an_error_event(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE))
    assert call.client.read_until(len(ONE)) == ONE
    request.send(b"zz\r\nwhat\r\n")
    assert_broken_event(call.client.read_all(), ONE, b"upstream_interrupted")
    request.wait_closed()
    assert stand.settled(call)["outcome"] == "stream_broken"


def test_event_over_the_limit_ends_the_stream_with_an_error_event(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE))
    assert call.client.read_until(len(ONE)) == ONE
    request.send(chunk(b"data: " + b"x" * (MAX_EVENT_BYTES - 6)))
    assert request.is_open()
    request.send(chunk(b"x"))
    assert_broken_event(call.client.read_all(), ONE, b"upstream_interrupted")
    request.wait_closed()
    line = stand.settled(call)
    assert (line["outcome"], line["reason"]) == ("stream_broken", "event_too_large")


@pytest.mark.parametrize("http10", [False, True])
@pytest.mark.parametrize("framing", [b"content-length: 100\r\n", b"transfer-encoding: chunked\r\n"])
def test_broken_body_is_closed_short_and_never_padded(stand: Stand, framing: bytes, http10: bool) -> None:
    call = stand.call(stream=False, http10=http10)
    request = stand.next_request(call)
    part = b'{"object":"chat.completion",'
    request.send(JSON_HEAD + framing + b"\r\n" + (chunk(part) if b"chunked" in framing else part))
    assert call.client.read_until(len(part)) == part
    request.close()
    if http10 and b"chunked" in framing:
        # Nothing but the closed connection can tell such a client, and half a JSON document.
        assert call.client.read_all() == part
    else:
        assert call.client.read_broken() == part
    line = stand.settled(call)
    assert (line["outcome"], line["reason"]) == ("stream_broken", "upstream_interrupted")
    assert stand.ledger.grew("llmgw_upstream_errors_total", reason="upstream_interrupted") == 1


def test_bytes_behind_a_response_cost_the_connection_and_reach_nobody(stand: Stand) -> None:
    for stray in (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray", b"x"):
        for whole in (SSE_HEAD + chunk(DONE) + LAST_CHUNK, SSE_LENGTH % len(DONE) + DONE):
            call = stand.call()
            request = stand.next_request(call)
            request.send(whole + stray)
            assert call.client.read_all() == DONE
            request.wait_closed()
            assert stand.settled(call)["outcome"] == "ok"


# Deadlines.


def test_engine_silent_before_its_head_is_given_up_with_504(stand: Stand) -> None:
    for model, stream in (("slow-headers", False), ("slow-headers", True), ("slow-first", True)):
        call = stand.call(model, stream=stream)
        request = stand.next_request(call)
        assert call.client.status == 504
        error = call.client.error()
        assert error["code"] == "upstream_timeout"
        assert call.client.header("retry-after") == str(error["retry_after"])
        request.wait_closed()
        line = stand.settled(call)
        assert (line["status"], line["outcome"]) == (504, "upstream_timeout")
    assert stand.ledger.grew("llmgw_upstream_errors_total", reason="timeout") == 3


def test_engine_silent_behind_its_head_is_given_up_with_an_error_event(stand: Stand) -> None:
    call = stand.call("slow-first")
    request = stand.next_request(call)
    request.send(SSE_HEAD)
    assert_broken_event(call.client.read_all(), b"", b"upstream_timeout")
    request.wait_closed()
    line = stand.settled(call)
    assert (line["outcome"], line["reason"]) == ("stream_broken", "upstream_timeout")
    assert stand.ledger.grew("llmgw_upstream_errors_total", reason="upstream_timeout") == 1


def test_engine_silent_in_mid_stream_is_given_up_after_the_idle_time(stand: Stand) -> None:
    call = stand.call("slow-idle")
    request = stand.next_request(call)
    request.send(SSE_HEAD)
    assert call.client.status == 200
    request.send(chunk(ONE))
    assert call.client.read_until(len(ONE)) == ONE
    assert_broken_event(call.client.read_all(), ONE, b"upstream_timeout")
    request.wait_closed()
    assert stand.settled(call)["reason"] == "upstream_timeout"


@pytest.mark.parametrize("sent", [b"", b"2", chunk(b'{"a')], ids=["head", "mid-frame", "mid-body"])
def test_engine_silent_in_a_body_is_given_up_after_the_idle_time(stand: Stand, sent: bytes) -> None:
    call = stand.call("slow-idle", stream=False)
    request = stand.next_request(call)
    request.send(JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n" + sent)
    assert call.client.status == 200
    call.client.read_broken()
    request.wait_closed()
    assert stand.settled(call)["reason"] == "upstream_timeout"


def test_head_goes_out_though_the_first_event_is_not_whole(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE[:10]))
    assert call.client.status == 200
    request.send(chunk(ONE[10:]))
    assert call.client.read_until(len(ONE)) == ONE
    request.send(chunk(DONE) + LAST_CHUNK)
    assert call.client.read_all() == ONE + DONE


def test_answer_that_never_ends_is_ended_by_the_total_deadline(stand: Stand) -> None:
    call = stand.call("slow-total")
    request = stand.next_request(call)
    request.send(SSE_HEAD)
    sent = 0
    with contextlib.suppress(OSError, Truncated):
        while not call.client.is_whole:
            request.send(chunk(ONE))
            sent += 1
            call.client.read_until(sent * len(ONE))
    payload = call.client.read_all()
    assert_broken_event(payload, ONE * (payload.count(b"\n\n") - 1), b"upstream_timeout")
    assert stand.settled(call)["reason"] == "upstream_timeout"


def test_total_deadline_before_the_head_is_504(stand: Stand) -> None:
    call = stand.call("slow-total", stream=False)
    request = stand.next_request(call)
    assert call.client.status == 504
    request.wait_closed()
    assert stand.settled(call)["outcome"] == "upstream_timeout"


# Before the first byte.


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
def test_garbage_instead_of_a_response_is_502_and_not_retried(stand: Stand, garbage: bytes) -> None:
    call = stand.call("pair")
    request = stand.next_request(call)
    request.send(garbage)
    assert call.client.status == 502
    assert call.client.error()["code"] == "upstream_error"
    request.wait_closed()
    line = stand.settled(call)
    assert (line["status"], line["outcome"], line["retries"]) == (502, "upstream_error", 0)
    assert stand.ledger.grew("llmgw_upstream_errors_total", reason="protocol") == 1


def test_head_that_breaks_off_is_502_and_not_retried(stand: Stand) -> None:
    for ending in ("close", "reset"):
        call = stand.call("pair")
        request = stand.next_request(call)
        request.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/ev")
        if ending == "reset":
            # It must not overtake the bytes before it.
            wait_until(request.is_received, 5.0, "the half head to be at the gateway")
        request.close() if ending == "close" else request.reset()
        assert call.client.status == 502
        assert stand.settled(call)["retries"] == 0


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_connection_lost_before_a_byte_is_retried_at_the_other_engine(
    stand: Stand, ending: str, stream: bool
) -> None:
    call = stand.call("pair", stream=stream)
    first = stand.next_request(call)
    first.close() if ending == "close" else first.reset()
    second = stand.next_request(call)
    assert second.port != first.port
    assert second.body == first.body
    second.send(WHOLE)
    second.finish()
    assert call.client.read_all() == ONE + DONE
    line = stand.settled(call)
    assert (line["status"], line["outcome"], line["retries"]) == (200, "ok", 1)
    assert call.client.header("x-llmgw-replica") == line["replica"]
    assert stand.ledger.grew("llmgw_retries_total", reason="unreachable") == 1


def test_connection_lost_at_every_engine_is_503(stand: Stand) -> None:
    call = stand.call("pair")
    stand.next_request(call).reset()
    stand.next_request(call).reset()
    assert call.client.status == 503
    error = call.client.error()
    assert error["code"] == error["reason"] == "upstream_unreachable"
    assert call.client.header("retry-after") == str(error["retry_after"])
    line = stand.settled(call)
    assert (line["outcome"], line["retries"]) == ("upstream_unreachable", 1)
    assert stand.ledger.grew("llmgw_upstream_errors_total", reason="unreachable") == 2


@pytest.mark.parametrize("code", [429, 503])
def test_engine_that_is_busy_is_passed_over_before_the_first_byte(stand: Stand, code: int) -> None:
    call = stand.call("pair")
    first = stand.next_request(call)
    first.send(status(code, ERROR_JSON))
    first.finish()
    second = stand.next_request(call)
    assert second.port != first.port
    second.send(WHOLE)
    second.finish()
    assert call.client.read_all() == ONE + DONE
    assert stand.settled(call)["retries"] == 1
    assert stand.ledger.grew("llmgw_retries_total", reason="back_pressure") == 1


def test_busy_at_every_engine_is_the_last_engines_answer(stand: Stand) -> None:
    call = stand.call("pair")
    for code in (503, 429):
        request = stand.next_request(call)
        request.send(status(code, ERROR_JSON, b"retry-after: 7"))
        request.finish()
    assert call.client.status == 429
    assert call.client.header("retry-after") == "7"
    error = call.client.error()
    assert (error["message"], error["code"], error["retry_after"]) == ("busy", "engine_busy", 7)
    assert stand.settled(call)["status"] == 429


@pytest.mark.parametrize("code", [400, 404, 422, 500, 502])
def test_other_errors_of_an_engine_are_not_tried_elsewhere(stand: Stand, code: int) -> None:
    call = stand.call("pair")
    request = stand.next_request(call)
    request.send(status(code, ERROR_JSON))
    request.finish()
    assert call.client.status == code
    assert call.client.read_all() == ERROR_JSON
    line = stand.settled(call)
    assert (line["status"], line["retries"]) == (code, 0)


def test_nothing_is_retried_behind_the_first_byte(stand: Stand) -> None:
    call = stand.call("pair")
    request = stand.next_request(call)
    request.send(SSE_HEAD + chunk(ONE))
    assert call.client.read_until(len(ONE)) == ONE
    request.reset()
    assert_broken_event(call.client.read_all(), ONE, b"upstream_interrupted")
    assert stand.settled(call)["retries"] == 0
    assert stand.ledger.grew("llmgw_retries_total") == 0


# Unusual, and right.


def test_interim_responses_are_skipped(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
    request.send(b"HTTP/1.1 102 Processing\r\n\r\n" + WHOLE)
    request.finish()
    assert call.client.status == 200
    assert call.client.header("link") is None
    assert call.client.read_all() == ONE + DONE
    assert stand.settled(call)["outcome"] == "ok"


def test_http10_engine_is_relayed_up_to_its_close(stand: Stand) -> None:
    call = stand.call(stream=False)
    request = stand.next_request(call)
    request.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + b'{"a":')
    assert call.client.read_until(5) == b'{"a":'
    request.send(b"1}")
    request.close()
    assert call.client.read_all() == b'{"a":1}'
    assert stand.settled(call)["outcome"] == "ok"


def test_both_framings_are_read_as_chunks_and_the_connection_is_not_used_again(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n") + WHOLE[len(SSE_HEAD) :])
    assert call.client.read_all() == ONE + DONE
    assert call.client.header("content-length") is None
    request.wait_closed()
    assert stand.settled(call)["outcome"] == "ok"


def test_connections_to_engines_are_kept_and_used_again(stand: Stand) -> None:
    seen = []
    for framing in (WHOLE, SSE_LENGTH % len(DONE) + DONE, status(400, ERROR_JSON), WHOLE):
        call = stand.call()
        request = stand.next_request(call)
        request.send(framing)
        seen.append((request.connection, request.nth))
        request.finish()
        call.client.read_all()
        stand.settled(call)
    assert [nth - seen[0][1] for _, nth in seen] == [0, 1, 2, 3]
    assert len({connection for connection, _ in seen}) == 1


def test_engine_that_says_close_is_not_used_again(stand: Stand) -> None:
    call = stand.call()
    request = stand.next_request(call)
    request.send(SSE_HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + WHOLE[len(SSE_HEAD) :])
    assert call.client.read_all() == ONE + DONE
    request.wait_closed()
    stand.settled(call)


def test_keep_alive_of_the_client_survives_errors_before_the_first_byte(stand: Stand) -> None:
    client = stand.connect()
    for number in range(3):
        client.post(chat(), headers={"x-request-id": f"keep-{number}"})
        request = stand.engine.next_request()
        request.send(status(400, ERROR_JSON))
        request.finish()
        assert client.status == 400
        assert client.read_all() == ERROR_JSON


# While the request's body is on its way.

LARGE = chat(stream=False, content="x" * 8_000_000)


@pytest.fixture
def unread(gateway: Gateways) -> Iterator[tuple[Gateway, RawEngine]]:
    """A gateway and an engine that reads heads, but no bodies."""
    engine = RawEngine(reads_bodies=False)
    yield gateway([endpoint("e", engine.url)]), engine
    engine.close()


def test_answer_to_the_head_alone_reaches_the_client_while_the_body_is_stuck(
    unread: tuple[Gateway, RawEngine],
) -> None:
    running, engine = unread
    with RawClient(running.url) as client:
        client.post(LARGE, headers={"x-request-id": "early"})
        request = engine.next_request()
        request.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.send(status(413, ERROR_JSON))
        assert client.status == 413
        assert client.read_all() == ERROR_JSON
        request.wait_closed()  # half a request is on it: no other may follow
        assert settled(running, "early")["status"] == 413


def test_client_that_leaves_while_the_body_is_stuck_frees_the_engine(
    unread: tuple[Gateway, RawEngine],
) -> None:
    running, engine = unread
    with RawClient(running.url) as client:
        client.post(LARGE, headers={"x-request-id": "left"})
        request = engine.next_request()
    request.wait_closed(2.0)
    line = settled(running, "left")
    assert (line["status"], line["outcome"]) == (499, "client_gone")
    assert running.metric("llmgw_client_gone_total", phase="waiting") == 1


def test_engine_that_stops_reading_the_body_is_given_up(gateway: Gateways) -> None:
    engine = RawEngine(reads_bodies=False)
    try:
        running = gateway([endpoint("e", engine.url)], router={"timeouts": {"headers": "500ms"}})
        with RawClient(running.url) as client:
            client.post(LARGE, headers={"x-request-id": "stuck"})
            request = engine.next_request()
            assert client.status == 504
            assert client.error()["code"] == "upstream_timeout"
            request.wait_closed()
            assert settled(running, "stuck")["outcome"] == "upstream_timeout"
    finally:
        engine.close()
