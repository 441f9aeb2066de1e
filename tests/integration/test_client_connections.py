"""The client's side: slow and half requests, idle connections, sharing among workers, socket options."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.support.gateway import Gateway, Gateways, endpoint
from tests.support.scene import Scene, open_scene, request_id
from tests.support.wait import wait_until
from tests.support.wire import WireClient, chat, request

HEADER_S, BODY_S, KEEPALIVE_S = 0.6, 1.0, 1.0
TICK_S = 0.2
SLACK_S = 3.0  # a machine under load; the point is that it ends at all, and not before its time


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    client = {"header": f"{HEADER_S}s", "body": f"{BODY_S}s", "keepalive": f"{KEEPALIVE_S}s"}
    with open_scene(tmp_path_factory.mktemp("scene"), workers=2, client=client) as made:
        yield made


@pytest.fixture
def engine_is_untouched(scene: Scene) -> Iterator[None]:
    received = scene.sim.stats()["received"]
    yield
    scene.wait_idle()
    assert scene.sim.stats()["received"] == received


HEAD = request(chat(), "TE: trailers")
HALF_HEADS = {
    "one_byte": b"P",
    "half_a_line": b"POST /v1/chat/comp",
    "half_a_header": b"POST /v1/chat/completions HTTP/1.1\r\nHost: gate",
    "all_but_the_last_byte": HEAD.partition(b"\r\n\r\n")[0] + b"\r\n\r",
}


@pytest.mark.usefixtures("engine_is_untouched")
@pytest.mark.parametrize("name", HALF_HEADS)
def test_a_head_that_never_ends_is_answered_with_408_in_time(scene: Scene, name: str):
    ledger = scene.ledger()
    with scene.client() as client:
        client.send(HALF_HEADS[name])
        began = time.monotonic()
        answer = client.answer()
        assert HEADER_S - 0.1 <= time.monotonic() - began < HEADER_S + SLACK_S
        assert (answer.status, answer.code, answer.header("connection")) == (408, "request_timeout", "close")
        assert client.is_closed()
    line = scene.settled(str(answer.header("x-request-id")))
    assert (line["status"], line["outcome"]) == (408, "request_timeout")
    assert ledger.grew("llmgw_requests_total", status="408") == 1


@pytest.mark.usefixtures("engine_is_untouched")
def test_a_head_that_drips_gains_no_time_by_it(scene: Scene):
    with scene.client() as client:
        began = time.monotonic()
        drops = iter(HEAD)
        while not client.is_answered(TICK_S):
            client.send(bytes([next(drops)]))
        assert client.answer().status == 408
        assert HEADER_S - 0.1 <= time.monotonic() - began < HEADER_S + SLACK_S


@pytest.mark.parametrize("coding", ["length", "chunked", "careful"])
def test_a_body_that_stops_is_answered_with_408(scene: Scene, coding: str):
    received, asked = scene.sim.stats()["received"], request_id()
    with scene.client() as client:
        client.send(started(coding, asked))
        began = time.monotonic()
        answer = client.answer()
        # Once, and not a second time to throw away the rest.
        assert BODY_S - 0.1 <= time.monotonic() - began < 2 * BODY_S
        assert (answer.status, answer.code, answer.header("connection")) == (408, "request_timeout", "close")
        assert client.is_closed()
    assert scene.settled(asked)["outcome"] == "request_timeout"
    assert scene.sim.stats()["received"] == received


def started(coding: str, asked: str) -> bytes:
    """Return a request up to half its body."""
    body = json.dumps(chat()).encode()
    half = body[: len(body) // 2]
    name = f"x-request-id: {asked}"
    if coding == "chunked":
        return (
            request(b"", name, "Transfer-Encoding: chunked", has_length=False) + b"%x\r\n" % len(body) + half
        )
    extra = ("TE: trailers",) if coding == "careful" else ()
    return request(body, name, *extra)[: len(half) - len(body)]


@pytest.mark.parametrize("coding", ["length", "chunked", "careful"])
def test_a_body_that_goes_on_slowly_is_waited_for(scene: Scene, coding: str):
    """The whole takes longer than the time-out, no pause in it does."""
    body, asked = json.dumps(chat()).encode(), request_id()
    began = time.monotonic()
    with scene.client() as client:
        client.send(started(coding, asked))
        rest = body[len(body) // 2 :]
        pieces = 4
        step = len(rest) // pieces + 1
        for start in range(0, len(rest), step):
            time.sleep(BODY_S / 2)  # the pace of this client; nothing is waited for
            client.send(rest[start : start + step])
        if coding == "chunked":
            client.send(b"\r\n0\r\n\r\n")
        assert client.answer().status == 200
    assert time.monotonic() - began > BODY_S
    assert scene.sim.seen(1)[0].body == body
    assert scene.settled(asked)["status"] == 200


@pytest.mark.parametrize("part", ["nothing", "head", "body", "chunk"])
def test_a_client_that_leaves_in_mid_request_costs_nothing(scene: Scene, part: str):
    received, ledger, asked = scene.sim.stats()["received"], scene.ledger(), request_id()
    with scene.client() as client:
        if part != "nothing":
            client.send(
                {"head": HEAD[:60], "body": started("length", asked)}.get(part, started("chunked", asked))
            )
            wait_until(lambda: connections(scene.gateway) == 1, 5, "the connection")
    wait_until(lambda: connections(scene.gateway) == 0, 5, lambda: str(connections(scene.gateway)))
    assert scene.sim.stats()["received"] == received
    scene.wait_idle()
    if part in ("body", "chunk"):
        line = scene.settled(asked)
        assert (line["status"], line["outcome"]) == (499, "client_gone")
        assert ledger.grew("llmgw_client_gone_total", phase="queued") == 1


def connections(gateway: Gateway) -> int:
    """Return the open client connections, as the gateway counts them itself."""
    return int(gateway.metric("llmgw_client_connections"))


def test_an_idle_connection_is_closed_without_a_word(scene: Scene):
    lines = len(scene.gateway.access_lines())
    for answered in (False, True):
        with scene.client() as client:
            if answered:
                assert client.ask(chat()).status == 200
            began = time.monotonic()
            assert client.is_closed()
            assert 0.4 <= time.monotonic() - began < KEEPALIVE_S + SLACK_S
    assert len(scene.gateway.access_lines()) == lines + 1


def test_slow_clients_hold_nobody_up(scene: Scene):
    slow = [scene.client() for _ in range(60)]
    try:
        for number, client in enumerate(slow):
            client.send(
                (HEAD[:50], started("length", request_id()), started("chunked", request_id()))[number % 3]
            )
        with scene.client() as quick:
            began = time.monotonic()
            for _ in range(20):
                assert quick.ask(chat()).status == 200
            assert time.monotonic() - began < 2.0
        assert {client.answer().status for client in slow} == {408}
    finally:
        for client in slow:
            client.close()
    scene.wait_idle()


def test_two_hundred_idle_connections_are_held_and_every_one_still_serves(gateway: Gateways, scene: Scene):
    gw = gateway([endpoint("e0", scene.sim.url)], workers=2)
    clients = [WireClient(gw.url) for _ in range(200)]
    try:
        wait_until(lambda: connections(gw) == 200, 10, lambda: str(connections(gw)))
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda client: client.ask(chat()), clients))
        assert [answer.status for answer in answers] == [200] * 200
        assert connections(gw) == 200
        # SIGTERM: all of them are idle, so that nothing has to be waited for.
        began = time.monotonic()
        assert gw.stop() == 0
        assert time.monotonic() - began < 5
        assert all(client.is_closed() for client in clients)
    finally:
        for client in clients:
            client.close()


def test_workers_share_the_listener(scene: Scene):
    clients: list[WireClient] = []
    held: Counter[int] = Counter()

    def is_shared() -> bool:
        # In batches: a worker that the kernel keeps waiting for a moment may lose one of them altogether.
        batch = [scene.client() for _ in range(20)]
        clients.extend(batch)
        for client in batch:
            assert client.ask(chat()).status == 200
        held.clear()
        held.update(worker.pid for worker, _ in accepted(scene.gateway))
        assert sum(held.values()) == len(clients)
        return len(held) == 2 and min(held.values()) >= len(clients) / 10

    try:
        wait_until(is_shared, 10, lambda: str(held))
    finally:
        for client in clients:
            client.close()


def accepted(gateway: Gateway) -> list[tuple[psutil.Process, int]]:
    """Return the client connections as (worker, its descriptor)."""
    port = int(gateway.url.rpartition(":")[2])
    return [
        (process, each.fd)
        for process in gateway.processes("workers")
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port
    ]


def test_small_writes_leave_at_once_on_both_sides(scene: Scene):
    """TCP_NODELAY, read from the workers' own sockets."""
    with scene.client() as client:
        assert client.ask(chat()).status == 200
        sides = {"client": accepted(scene.gateway)[:1]}
        sides["engine"] = [
            (process, each.fd)
            for process in scene.gateway.processes("workers")
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_ESTABLISHED and each.raddr.port == scene.sim.port
        ][:1]
        for side, found in sides.items():
            assert found, side
            process, fd = found[0]
            with taken(process.pid, fd) as sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1, side


def taken(pid: int, fd: int) -> socket.socket:
    """Duplicate a socket of another process."""
    pidfd = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0)  # pidfd_getfd
    finally:
        os.close(pidfd)
    if own < 0:
        pytest.skip(f"no look into other processes' sockets here: {os.strerror(ctypes.get_errno())}")
    return socket.socket(fileno=own)
