"""`llmgw-sim`: an engine that speaks like vLLM, computes nothing, and fails on demand.

Prints one line of JSON when it listens: `{"event":"listening","port":...,"control_port":...,"pid":...}`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import ssl
import sys
import time

from agent.sim.app import App, Settings, make_timing
from agent.sim.connection import Connection, Listener, Poller
from agent.sim.control import Control
from agent.sim.engine import Engine
from agent.sim.faults import FaultError, FaultKind, parse_fault
from agent.sim.prompt import Vocabulary
from agent.sim.requests import Limits

_SWEEP_S = 0.25


def parser() -> argparse.ArgumentParser:
    """Return the reader of the flags."""
    kinds = ", ".join(kind.value for kind in FaultKind)
    flags = argparse.ArgumentParser(prog="llmgw-sim", description="Simulated inference engine.")
    add = flags.add_argument
    add("--host", "--bind", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=9001, help="0: any")
    add("--control-port", type=int, default=0, help="second port for /sim/*, never refused; 0: any")
    add(
        "--model",
        "--served-model-name",
        action="append",
        dest="models",
        metavar="NAME",
        help="name it answers to; repeat for more (default: sim-model)",
    )
    add("--max-num-seqs", type=int, default=256, help="sequences that run at once; the rest waits")
    add("--ttft-ms", type=float, default=20.0, help="time to the first token")
    add("--prefill-us-per-token", type=float, default=0.0, help="added per prompt token that is not cached")
    add("--itl-ms", type=float, default=10.0, help="time between tokens")
    add("--slow-factor", type=float, default=1.0, help="multiplies all times")
    add("--output-tokens", type=int, default=32, help="answer's length where a request does not say")
    add("--reasoning-tokens", type=int, default=0, help="of a chat answer, sent as reasoning_content")
    add("--kv-blocks", type=int, default=65536, help="size of the KV cache")
    add("--block-size", type=int, default=16, help="tokens per block")
    add("--max-model-len", type=int, default=131072, help="tokens of prompt and answer together")
    add("--seed", type=int, default=0, help="engines with the same seed give the same answers")
    add("--api-key", default="", help="bearer that /v1/* wants")
    add("--keepalive-s", type=float, default=0.0, help="close connections idle for so long; 0: never")
    add(
        "--late-head",
        action="store_true",
        help="send a stream's head with its first token, as llama.cpp does",
    )
    add("--tls-cert", default="", help="PEM file; serve TLS")
    add("--tls-key", default="", help="PEM file of its key")
    add(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[:ARG][@COUNT]",
        help=f"what goes wrong, for how many requests; kinds: {kinds}",
    )
    return flags


class Sim:
    """A simulated engine in a process of its own.

    Args:
        options: of `parser`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._poller = Poller()
        self._keepalive_s: float = options.keepalive_s
        self._is_stopping = False
        engine = Engine(
            make_timing(
                ttft_ms=options.ttft_ms,
                prefill_us_per_token=options.prefill_us_per_token,
                itl_ms=options.itl_ms,
                slow_factor=options.slow_factor,
            ),
            max_num_seqs=options.max_num_seqs,
            num_blocks=options.kv_blocks,
            block_size=options.block_size,
        )
        limits = Limits(
            models=tuple(options.models or ("sim-model",)),
            max_model_len=options.max_model_len,
            output_tokens=options.output_tokens,
            block_size=options.block_size,
        )
        settings = Settings(
            limits=limits,
            api_key=options.api_key,
            reasoning_tokens=options.reasoning_tokens,
            sends_head_first=not options.late_head,
        )
        self._engine = engine
        self._app = App(engine, settings, Vocabulary(options.seed), self._refuse)
        self._app.control = Control(self._app).on_request
        tls = None
        if options.tls_cert:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(options.tls_cert, options.tls_key or None)
        self._listener = Listener(options.host, options.port, self._poller, self._accept, tls)
        self._control = Listener(options.host, options.control_port, self._poller, self._accept_control)
        for fault in options.fault:
            self._app.set_fault(parse_fault(fault))

    def announce(self) -> None:
        """Say where it listens."""
        ports = {"port": self._listener.port, "control_port": self._control.port}
        print(json.dumps({"event": "listening", **ports, "pid": os.getpid()}), flush=True)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._poller.add(wake_read, lambda mask: None)
        engine, poll = self._engine, self._poller.poll
        monotonic = time.monotonic
        next_sweep = monotonic() + _SWEEP_S
        while not self._is_stopping:
            now = monotonic()
            if now >= next_sweep:
                next_sweep = now + _SWEEP_S
                self._sweep(now)
            due = engine.next_due(now)
            poll(_SWEEP_S if due is None else min(due, _SWEEP_S))
            for work in engine.step(monotonic()):
                work.sink.on_step(work)

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True

    def _accept(self, sock: socket.socket) -> None:
        self._app.on_accept(Connection(sock, self._poller, self._app, time.monotonic(), is_control=False))

    def _accept_control(self, sock: socket.socket) -> None:
        Connection(sock, self._poller, self._app, time.monotonic(), is_control=True)

    def _refuse(self, refuses: bool) -> None:
        if refuses:
            self._listener.refuse()
        else:
            self._listener.open()

    def _sweep(self, now: float) -> None:
        if self._keepalive_s <= 0:
            return
        idle_since = now - self._keepalive_s
        for connection in list(self._app.connections.values()):
            if connection.is_idle and connection.idle_since < idle_since:
                connection.close()


def main(argv: list[str]) -> int:
    """Run the simulated engine.

    Args:
        argv: flags, without the program's name.

    Returns:
        0 after a signal, 2 for flags that cannot be, 1 for a port that cannot be had.
    """
    options = parser().parse_args(argv)
    try:
        sim = Sim(options)
    except FaultError as error:
        print(f"llmgw-sim: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"llmgw-sim: {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    # Nothing made so far will ever be garbage; with a thousand streams a full collection takes tens of ms.
    gc.collect()
    gc.freeze()
    # Requests leave no cycles, so the collector can come seldom.
    gc.set_threshold(50_000, 20, 50)
    sim.announce()
    sim.run()
    return 0
