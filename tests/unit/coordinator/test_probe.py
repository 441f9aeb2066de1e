"""Every way in which an engine can fail to answer, as the probe tells it. gevent has patched nothing here."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import probe as probe_module
from coordinator.core.look import Answer, Failure
from coordinator.probe import Probe, TlsContexts
from shm.endpoints import EndpointRecord
from tests.support.scripted_engine import ScriptedEngine, close, reset, response
from tests.support.tls import self_signed


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine()
    yield made
    made.refuse()


def probe_of(url: str, *, tls_ca: str | None = None, tls_verify: bool = True) -> Probe:
    record = EndpointRecord(
        id="e1",
        model="m",
        url=url,
        engine="vllm",
        pool="p",
        served_model="m",
        tls_ca=tls_ca,
        tls_verify=tls_verify,
    )
    return Probe(record, timeout_s=5.0, contexts=TlsContexts())


@pytest.fixture
def probe(engine: ScriptedEngine) -> Iterator[Probe]:
    made = probe_of(engine.url)
    yield made
    made.close()


def test_answer_comes_whole_and_the_connection_stays(probe: Probe, engine: ScriptedEngine) -> None:
    engine.script("/health", response(b"fine", "503 Service Unavailable"))
    assert [probe.ask("/health") for _ in range(3)] == [Answer(503, b"fine")] * 3
    assert engine.open_connections == 1


def test_chunked_and_unbounded_bodies_are_read_to_their_end(probe: Probe, engine: ScriptedEngine) -> None:
    engine.script(
        "/a", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    assert probe.ask("/a") == Answer(200, b"abcde")

    def until_close(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nabc")
        close(connection)

    engine.script("/b", until_close)
    assert probe.ask("/b") == Answer(200, b"abc")
    assert probe.ask("/a") == Answer(200, b"abcde")


def test_connection_closed_at_rest_is_replaced_without_a_word(probe: Probe, engine: ScriptedEngine) -> None:
    assert probe.ask("/health") == Answer(200)
    engine.refuse()
    engine.listen()
    assert probe.ask("/health") == Answer(200)


def test_first_connection_that_breaks_is_not_tried_again(probe: Probe, engine: ScriptedEngine) -> None:
    engine.script("/health", reset)
    assert probe.ask("/health") is Failure.BROKEN
    assert engine.count("/health") == 1


def test_nobody_listens(probe: Probe, engine: ScriptedEngine) -> None:
    engine.refuse()
    assert probe.ask("/health") is Failure.REFUSED


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "x" * 70])
def test_name_without_an_address(host: str) -> None:
    assert probe_of(f"http://{host}:80").ask("/health") is Failure.UNREACHABLE


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 " + b"x" * 100_000,
        b"",
    ],
)
def test_what_is_not_a_whole_http_response_is_broken(
    probe: Probe, engine: ScriptedEngine, data: bytes
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(data)
        close(connection)

    engine.script("/health", answer)
    assert probe.ask("/health") is Failure.BROKEN
    engine.script("/health", response())
    assert probe.ask("/health") == Answer(200)


def test_answer_beyond_the_limit_is_not_kept(
    probe: Probe, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "MAX_ANSWER_BYTES", 1000)
    engine.script("/metrics", response(b"x" * 1001))
    assert probe.ask("/metrics") is Failure.TOO_LARGE
    engine.script("/metrics", response(b"x" * 1000))
    assert probe.ask("/metrics") == Answer(200, b"x" * 1000)


def test_redirect_is_an_answer_and_not_followed(probe: Probe, engine: ScriptedEngine) -> None:
    engine.script("/health", response(b"", "302 Found", f"location: {engine.url}/v1/models"))
    assert probe.ask("/health") == Answer(302)
    assert engine.count("/v1/models") == 0


def test_path_of_the_address_stands_before_every_question(engine: ScriptedEngine) -> None:
    engine.script("/engines/a/health", response(b"here"))
    made = probe_of(f"{engine.url}/engines/a")
    assert made.ask("/health") == Answer(200, b"here")
    made.close()


@pytest.fixture
def https_url(engine: ScriptedEngine, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A TLS server that answers every connection with one empty response, and its certificate."""
    made = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain:
                try:
                    with context.wrap_socket(plain, server_side=True) as connection:
                        connection.recv(4096)
                        connection.sendall(response(b"", "200 OK", "connection: close"))
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}", made.cert
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_tls_engine_is_asked_when_its_authority_is_trusted(https_url: tuple[str, Path]) -> None:
    url, cert = https_url
    assert probe_of(url, tls_ca=str(cert)).ask("/health") == Answer(200)
    assert probe_of(url, tls_verify=False).ask("/health") == Answer(200)


def test_unknown_authority_unreadable_file_and_plain_server_are_tls_failures(
    https_url: tuple[str, Path], engine: ScriptedEngine, tmp_path: Path
) -> None:
    url, _ = https_url
    assert probe_of(url).ask("/health") is Failure.TLS
    assert probe_of(url, tls_ca=str(tmp_path / "none.pem")).ask("/health") is Failure.TLS
    plain = socket.create_server(("127.0.0.1", 0))

    def talk_plainly() -> None:
        connection, _ = plain.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(4096)

    thread = threading.Thread(target=talk_plainly, daemon=True)
    thread.start()
    made = probe_of(f"https://127.0.0.1:{plain.getsockname()[1]}")
    assert made.ask("/health") is Failure.TLS
    thread.join()
    plain.close()
