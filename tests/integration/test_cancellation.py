"""Clients that leave, half leave, or do not read: the engine is freed at once, nothing is held for them."""

from __future__ import annotations

import socket
import threading
import time

import psutil
import pytest

from tests.support.gateway import Gateway
from tests.support.raw_client import chat
from tests.support.raw_engine import DONE, JSON_HEAD, LAST_CHUNK, SSE_HEAD, RawRequest, chunk, event
from tests.support.stand import DUE_S, WRITE_S, Stand
from tests.support.wait import wait_until

ONE = event("one")
PIECE = event("x" * 60_000)
FREED_S = 1.0
"""Within this an engine is to know that its client has left; noise of the machine is added by tests."""
NOISE_S = 2.0


def assert_gone(stand: Stand, line: dict[str, object], phase: str) -> None:
    """It was counted as a client that left, and as nothing else."""
    assert (line["status"], line["outcome"], line["reason"]) == (499, "client_gone", None)
    assert stand.ledger.grew("llmgw_client_gone_total", phase=phase) == 1
    assert stand.ledger.grew("llmgw_client_gone_total") == 1
    assert stand.ledger.grew("llmgw_requests_total", status="499") == 1
    assert stand.ledger.grew("llmgw_upstream_errors_total") == 0
    assert stand.ledger.grew("llmgw_retries_total") == 0


@pytest.mark.parametrize("leave", ["close", "reset", "shutdown"])
@pytest.mark.parametrize(
    ("stream", "sent", "phase"),
    [
        (False, b"", "waiting"),
        (False, JSON_HEAD + b"content-length: 9\r\n\r\n{", "streaming"),
        (True, b"", "waiting"),
        (True, SSE_HEAD, "waiting"),
        (True, SSE_HEAD + chunk(b": a comment\n\n"), "waiting"),
        (True, SSE_HEAD + chunk(ONE), "streaming"),
        (True, SSE_HEAD + chunk(ONE) + chunk(ONE)[:20], "streaming"),
    ],
    ids=["whole-silent", "whole-half", "silent", "head", "comment", "mid-stream", "mid-event"],
)
def test_client_that_leaves_frees_the_engine_at_once(
    stand: Stand, leave: str, stream: bool, sent: bytes, phase: str
) -> None:
    call = stand.call("pair", stream=stream)
    request = stand.next_request(call)
    if sent:
        request.send(sent)
        assert call.client.status == 200
        call.client.read_until(sent.count(ONE) * len(ONE))
    if leave == "reset":
        call.client.reset()
    elif leave == "shutdown":
        call.client.sock.shutdown(
            socket.SHUT_WR
        )  # no more to say, but still reading: taken for gone, as by nginx
    else:
        call.client.close()
    assert request.wait_closed(FREED_S + NOISE_S) < FREED_S + NOISE_S
    assert_gone(stand, stand.settled(call), phase)
    if leave == "shutdown":
        call.client.read_broken()


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("sent", [b"", SSE_HEAD + chunk(ONE)], ids=["silent", "mid-stream"])
def test_client_that_leaves_with_a_pipelined_request_frees_the_engine(
    stand: Stand, leave: str, sent: bytes
) -> None:
    call = stand.call()
    request = stand.next_request(call)
    call.client.sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    if sent:
        request.send(sent)
        call.client.read_until(len(ONE))
    call.client.reset() if leave == "reset" else call.client.close()
    request.wait_closed(FREED_S + NOISE_S)
    assert_gone(stand, stand.settled(call), "streaming" if sent else "waiting")


def test_pipelined_requests_are_answered_in_order(stand: Stand) -> None:
    client = stand.connect()
    bodies = [chat(content=f"number {n}") for n in range(3)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    client.post(bodies[0])
    client.sock.sendall(b"".join(head % len(body) + body for body in bodies[1:]))
    for number, body in enumerate(bodies):
        if number:
            client.head(0)  # it is on its way already
            client.expect_response()
        request = stand.engine.next_request()
        assert request.body.endswith(body[1:])
        answer = event(f"number {number}")
        request.send(SSE_HEAD + chunk(answer) + chunk(DONE) + LAST_CHUNK)
        request.finish()
        assert client.read_all() == answer + DONE


def workers_rss(gateway: Gateway) -> int:
    """Return the memory of the workers, in bytes."""
    found = 0
    for process in gateway.processes("workers"):
        try:
            found += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


class Flood:
    """An engine's answer that is as long as the gateway takes it; sent by a thread of its own."""

    def __init__(self, request: RawRequest, pieces: int) -> None:
        self.sent = 0
        self._request = request
        self._pieces = pieces
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._send(SSE_HEAD)
            for _ in range(self._pieces):
                self._send(chunk(PIECE))
                self.sent += 1
            self._send(chunk(DONE) + LAST_CHUNK)
        except OSError:
            pass

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        self._request.sock.settimeout(0.05)
        while len(view):
            try:
                view = view[self._request.sock.send(view) :]
            except TimeoutError:
                if self._is_stopped:
                    raise

    def reset(self) -> None:
        """Break the answer off with RST."""
        self._is_stopped = True
        self.join()
        self._request.reset()

    def wait_stuck(self) -> None:
        """Wait until nothing goes out any more."""
        seen = [(self.sent, time.monotonic())]

        def is_stuck() -> bool:
            if self.sent != seen[0][0]:
                seen[0] = (self.sent, time.monotonic())
            return self.sent > 0 and time.monotonic() - seen[0][1] > 0.3

        wait_until(is_stuck, 10.0, lambda: f"the flood to stop; sent {self.sent}")

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_client_that_never_reads_costs_bounded_memory_and_is_closed(stand: Stand) -> None:
    before = workers_rss(stand.gateway)
    call = stand.call(receive_buffer=8192)
    request = stand.next_request(call)
    flood = Flood(request, pieces=2000)
    flood.wait_stuck()
    assert flood.sent < 1000  # the sockets' buffers took some; the rest waits at the engine
    assert workers_rss(stand.gateway) - before < 16 * 2**20
    flood.join()  # its connection is closed when the write time-out is over
    line = stand.settled(call, WRITE_S + 5)
    assert_gone(stand, line, "streaming")
    assert WRITE_S * 1000 <= line["duration_ms"] < (WRITE_S + 8) * 1000


def test_stalled_client_that_leaves_frees_the_engine_at_once(stand: Stand) -> None:
    call = stand.call(receive_buffer=8192)
    flood = Flood(stand.next_request(call), pieces=2000)
    flood.wait_stuck()
    left_at = time.monotonic()
    call.client.reset()
    flood.join()
    assert time.monotonic() - left_at < FREED_S + NOISE_S
    assert_gone(stand, stand.settled(call), "streaming")


def test_slow_reader_gets_everything(stand: Stand) -> None:
    pieces = 150
    call = stand.call("slow-idle", receive_buffer=8192)
    request = stand.next_request(call)
    flood = Flood(request, pieces)
    flood.wait_stuck()
    # Longer than the idle time, shorter than the write time-out: the client is slow, not the engine.
    time.sleep(DUE_S * 2)
    assert call.client.read_all() == PIECE * pieces + DONE
    flood.join()
    request.finish()
    line = stand.settled(call)
    assert (line["status"], line["outcome"]) == (200, "ok")


def test_slow_reader_gets_the_error_event_behind_everything(stand: Stand) -> None:
    call = stand.call(receive_buffer=8192)
    request = stand.next_request(call)
    flood = Flood(request, 2000)
    flood.wait_stuck()
    flood.reset()
    payload = call.client.read_all()
    events = payload.split(b"\n\n")
    assert set(events[:-2]) == {PIECE[:-2]}
    assert b'"code":"upstream_interrupted"' in events[-2]
    assert stand.settled(call)["outcome"] == "stream_broken"
