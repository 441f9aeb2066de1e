"""Engines behind TLS: whom the gateway trusts, and that bytes pass as they do without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.accounts import Ledger, settled, wait_idle
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.scene import request_id
from tests.support.sim import SimEngine
from tests.support.tls import self_signed
from tests.support.wait import wait_until
from tests.support.wire import WireClient, chat

BIG = 6 * 2**20


class Secured:
    """One engine served once plain and several times by TLS, each as a model of its own."""

    def __init__(self, gateway: Gateway, plain: SimEngine, tls: SimEngine) -> None:
        self.gateway = gateway
        self.plain = plain
        self.tls = tls


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    programs, right = Programs(folder), self_signed(folder / "right")
    other, foreign = self_signed(folder / "other"), self_signed(folder / "foreign", "DNS:elsewhere.example")
    gateways = Gateways(programs, folder)
    names = (
        "plain",
        "trusted",
        "wrong-ca",
        "system-ca",
        "unverified",
        "wrong-name",
        "unverified-name",
        "six",
    )
    flags = [flag for name in names for flag in ("--model", name)]
    flags += ["--max-model-len", "100000000", "--kv-blocks", "1000000"]

    def sim(certificate: Any = None, host: str = "127.0.0.1") -> SimEngine:
        tls = ("--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key)) if certificate else ()
        return SimEngine(programs, *flags, *tls, host=host)

    def entry(model: str, engine: SimEngine, **tls: Any) -> dict[str, Any]:
        return endpoint(model, engine.url, model=model, **({"tls": tls} if tls else {}))

    try:
        plain, tls, named, six = sim(), sim(right), sim(foreign), sim(right, "::1")
        entries = [
            entry("plain", plain),
            entry("trusted", tls, ca=str(right.cert)),
            entry("wrong-ca", tls, ca=str(other.cert)),
            entry("system-ca", tls),
            entry("unverified", tls, verify=False),
            entry("wrong-name", named, ca=str(foreign.cert)),
            entry("unverified-name", named, verify=False),
            entry("six", six, ca=str(right.cert)),
        ]
        timeouts = {"idle": "500ms"}
        config = config_for(entries, router={"scrape_interval": "200ms", "timeouts": timeouts})
        yield Secured(gateways(config), plain, tls)
    finally:
        gateways.close()
        programs.close()


@pytest.mark.parametrize("model", ["trusted", "unverified", "unverified-name", "six"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_trusted_engine_is_used_as_one_without_tls(secured: Secured, model: str, stream: bool):
    wait_until(lambda: states(secured)[model] == "ready", 10, lambda: str(states(secured)))
    with WireClient(secured.gateway.url) as client:
        answer = client.ask(chat(model, stream=stream, seed=1, max_tokens=20))
        assert (answer.status, answer.is_whole) == (200, True)
        expected = client.ask(chat("plain", stream=stream, seed=1, max_tokens=20))
        assert words(answer.body, stream=stream) == words(expected.body, stream=stream)


def states(secured: Secured) -> dict[str, str]:
    endpoints = secured.gateway.admin_json("/api/v1/endpoints")["endpoints"]
    return {each["id"]: each["state"] for each in endpoints}


def words(body: bytes, *, stream: bool) -> str:
    """Return the text of an answer."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    assert body.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in body.split(b"\n\n")[:-2]]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])


@pytest.mark.parametrize("model", ["wrong-ca", "system-ca", "wrong-name"])
def test_an_engine_that_cannot_prove_who_it_is_gets_no_request(secured: Secured, model: str):
    received, asked = secured.tls.stats()["received"], request_id()
    wait_until(lambda: states(secured)[model] == "down", 10, lambda: str(states(secured)))
    with WireClient(secured.gateway.url) as client:
        answer = client.ask(chat(model), f"x-request-id: {asked}")
        assert (answer.status, answer.code) == (503, "no_endpoint")
        assert "certificate" not in answer.body.decode()
        assert client.ask(chat("plain")).status == 200
    assert secured.tls.stats()["received"] == received
    assert settled(secured.gateway, asked)["status"] == 503


def test_a_handshake_that_fails_under_a_request_is_unreachable_and_told_without_names(
    gateway: Gateways, programs: Programs, tmp_path: Path
):
    """Before the coordinator has looked, the endpoint is a candidate: the worker itself must refuse it."""
    certificate, other = self_signed(tmp_path / "one"), self_signed(tmp_path / "two")
    tls = ("--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key))
    sim = SimEngine(programs, "--model", "chat-model", *tls)
    fine = SimEngine(programs, "--model", "fine")
    entries = [
        endpoint("fine", fine.url, model="fine"),
        endpoint("e0", sim.url, tls={"ca": str(certificate.cert)}),
    ]
    router = {"scrape_interval": "1h", "retries": 0}
    gw = gateway(config_for(entries, router=router))

    def served() -> int:
        with WireClient(gw.url) as client:
            return client.ask(chat()).status

    wait_until(lambda: served() == 200, 10)
    entries[1]["tls"] = {"ca": str(other.cert)}
    gw.reload(config_for(entries, router=router))
    ledger, answers = Ledger(gw), []

    def refused() -> bool:
        with WireClient(gw.url) as client:
            answers.append(client.ask(chat(), f"x-request-id: {request_id()}"))
        return answers[-1].status == 503

    wait_until(refused, 10)
    assert answers[-1].code in ("upstream_unreachable", "no_endpoint")
    wait_idle(gw)
    assert ledger.grew("llmgw_requests_total", status="503", model="chat-model") >= 1
    text = answers[-1].body.decode().lower()
    assert not [word for word in ("ssl", "certificate", "127.0.0.1") if word in text]


def test_large_bodies_pass_both_ways(secured: Secured):
    asked = request_id()
    body = json.dumps(chat("trusted", stream=True, padding="x" * BIG)).encode()
    secured.tls.fault("huge_event", str(BIG), count=1)
    try:
        with WireClient(secured.gateway.url, timeout=30) as client:
            answer = client.ask(body, f"x-request-id: {asked}")
            assert (answer.status, answer.is_whole) == (200, True)
            assert len(answer.body) > BIG
            assert answer.body.endswith(b"data: [DONE]\n\n")
    finally:
        secured.tls.clear_fault()
    line = settled(secured.gateway, asked)
    assert line["outcome"] == "ok"


def test_connections_are_kept_and_a_closed_one_is_replaced_without_an_error(secured: Secured):
    with WireClient(secured.gateway.url) as client:
        client.ask(chat("unverified"))
        before = secured.tls.stats()["connections_accepted"]
        for _ in range(5):
            assert client.ask(chat("unverified")).status == 200
        scrapes = secured.tls.stats()["connections_accepted"] - before
        assert scrapes < 5, "a handshake for every request"
        secured.tls.fault("close_on_reuse", count=1, path="/v1/")
        ledger = Ledger(secured.gateway)
        assert client.ask(chat("unverified")).status == 200
        assert ledger.grew("llmgw_retries_total") == 0
    secured.tls.clear_fault()


def test_a_client_that_leaves_ends_the_request_at_the_engine(secured: Secured):
    asked = request_id()
    secured.tls.configure(itl_ms=20)
    with WireClient(secured.gateway.url) as client:
        client.send_request(chat("unverified", stream=True, max_tokens=2000), f"x-request-id: {asked}")
        client.read_until(b"data: ")
    try:
        wait_until(lambda: secured.tls.stats()["running"] == 0, 2, "the engine's freedom")
    finally:
        secured.tls.configure(itl_ms=1)
    line = settled(secured.gateway, asked)
    assert (line["status"], line["outcome"]) == (499, "client_gone")


@pytest.mark.parametrize(
    ("fault", "arg"), [("drop_stream", "3"), ("drop_stream", "3,rst"), ("hang_stream", "3")]
)
def test_a_stream_that_breaks_does_not_look_whole(secured: Secured, fault: str, arg: str):
    asked = request_id()
    secured.tls.fault(fault, arg, count=1)
    try:
        with WireClient(secured.gateway.url) as client:
            client.send_request(chat("unverified", stream=True, max_tokens=20), f"x-request-id: {asked}")
            body = client.answer().body
    finally:
        secured.tls.clear_fault()
    assert b"[DONE]" not in body
    assert b'data: {"error":' in body
    assert settled(secured.gateway, asked)["outcome"] != "ok"
