"""`make demo`: from a clone to an OpenAI endpoint that streams from an engine on this machine.

    make demo              llama.cpp with a small real model
    make demo ENGINE=sim   three simulated engines
    make demo ENGINE=tiny  llama.cpp with a tiny model of random weights (for tests: small, and talks noise)

Installs the engine, starts it and the gateway, sends one streaming request through, shows it with its
headers, and stays until Ctrl-C, SIGTERM, or until the terminal (or the pipe on standard input) closes. Then
everything it started is stopped. Configuration and logs are in `.cache/demo/`.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bin.engines.environment import ROOT, EngineError
from bin.engines.llamacpp import GEMMA, STOP, TINY, GgufModel, LlamaCpp
from bin.engines.process import Process, free_port
from bin.engines.sim import sim_command

MODEL = "chat-model"
QUESTION = "What is an HTTP proxy?"
SIM_COUNT = 3
ENGINE_START_S = 120.0
GATEWAY_START_S = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(BaseException):
    """Somebody asked the demo to end."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that answers.

    Attributes:
        kind: the configuration's word for it.
        served_model: what it calls its model.
    """

    process: Process
    url: str
    kind: str
    served_model: str


def main(argv: Sequence[str]) -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description="Serve a model on this machine.")
    parser.add_argument("--engine", choices=["llamacpp", "tiny", "sim"], default="llamacpp")
    parser.add_argument("--once", action="store_true", help="end after the first request")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache" / "demo", help="configuration and logs"
    )
    options = parser.parse_args(argv)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _raise_stop)
    try:
        # Closed in the reverse order: the gateway stops before the engines that it uses.
        with only_demo(options.folder), ExitStack() as stack:
            stack.callback(tell, "Everything is stopped.")
            run(options.engine, options.folder, stack, once=options.once)
            return 0
    except Stop:
        return 0
    except EngineError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def run(engine: str, folder: Path, stack: ExitStack, *, once: bool) -> None:
    """Start everything, send the request, and stay unless `once`.

    Args:
        stack: gets whatever has to be stopped, as soon as it exists.

    Raises:
        EngineError: something did not start, or ended by itself.
    """
    if engine == "sim":
        engines = [start_sim(number, folder, stack) for number in range(1, SIM_COUNT + 1)]
    else:
        model = GEMMA if engine == "llamacpp" else TINY
        engines = [start_llamacpp(model, folder, stack)]
        if model.licence:
            tell(f"The weights of {model.served_name} are used under {model.licence}.")
    gateway, port, admin_port = start_gateway(engines, folder, stack)
    show_request(port)
    if once:
        return
    show_usage(port, admin_port, folder)
    stay([gateway, *(each.process for each in engines)])


def start_llamacpp(model: GgufModel, folder: Path, stack: ExitStack) -> RunningEngine:
    """Install and start llama.cpp with `model`."""
    llamacpp = LlamaCpp()
    llamacpp.install(gemma=model is GEMMA)
    # More threads than free cores make llama.cpp slow: they wait by spinning.
    threads = str(max(1, (os.cpu_count() or 1) - 1))
    port = chosen_port(9001, "the engine")
    command = llamacpp.command(model, port, "--threads", threads)
    return start_engine("llamacpp", model.served_name, command, port, folder, stack)


def start_sim(number: int, folder: Path, stack: ExitStack) -> RunningEngine:
    """Start the simulated engine `number`, counted from 1."""
    port = chosen_port(9000 + number, f"engine {number}")
    command = sim_command(port, "sim-model", "--ttft-ms", "50", "--itl-ms", "20", "--seed", str(number))
    return start_engine("sim", "sim-model", command, port, folder, stack)


def start_engine(
    kind: str, served_model: str, command: Sequence[str], port: int, folder: Path, stack: ExitStack
) -> RunningEngine:
    """Start an engine and wait until it is healthy."""
    tell(f"Starting {kind} with {served_model} on port {port} ...")
    process = Process(f"The engine ({kind})", command, folder / f"engine-{port}.log")
    stack.callback(process.stop)
    url = f"http://127.0.0.1:{port}"
    process.wait_http(f"{url}/health", ENGINE_START_S)
    return RunningEngine(process, url, kind, served_model)


def start_gateway(
    engines: Sequence[RunningEngine], folder: Path, stack: ExitStack
) -> tuple[Process, int, int]:
    """Write the configuration, start the gateway, and wait until it can serve; return its ports as well."""
    port, admin_port = chosen_port(8080, "the gateway"), chosen_port(9090, "the admin listener")
    config = folder / "llmgw.yaml"
    config.write_text(configuration(engines, port, admin_port, folder))
    command = [sys.executable, str(ROOT / "bin" / "llmgw-gateway"), "--config", str(config)]
    tell(f"Starting the gateway: bin/llmgw-gateway --config {shown(config)}")
    process = Process("The gateway", command, folder / "gateway.log")
    stack.callback(process.stop)
    process.wait_http(f"http://127.0.0.1:{port}/readyz", GATEWAY_START_S)
    return process, port, admin_port


def configuration(engines: Sequence[RunningEngine], port: int, admin_port: int, folder: Path) -> str:
    """Return the configuration file, as a person would write it."""
    endpoints = "\n".join(
        f"  - {{id: {each.kind}-{number}, model: {MODEL}, url: {each.url}, engine: {each.kind}, "
        f"served_model: {each.served_model}}}"
        for number, each in enumerate(engines, 1)
    )
    return f"""\
# Written by `make demo`.
listen: 127.0.0.1:{port}
admin_listen: 127.0.0.1:{admin_port}
workers: 2
state_dir: {json.dumps(str(folder / "state"))}
drain_timeout: 5s
auth: {{enabled: false}}
models:
  - {{name: {MODEL}, aliases: [gpt-4o-mini]}}
endpoints:
{endpoints}
"""


def show_request(port: int) -> None:
    """Send one streaming request through the gateway and print what comes back, as it comes.

    Raises:
        EngineError: no good answer came.
    """
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 60,
        "temperature": 0,
        "stop": list(STOP),
        "stream": True,
    }
    tell(f"\nPOST http://127.0.0.1:{port}/v1/chat/completions")
    tell(f"{json.dumps(body)}\n")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        started = time.monotonic()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        tell(f"HTTP/1.1 {response.status} {response.reason}")
        for name, value in response.getheaders():
            tell(f"{name}: {value}")
        tell("")
        if response.status != 200:
            raise EngineError(f"the request failed: {response.read().decode(errors='replace')}")
        first_s, tokens = None, 0
        for text in contents(response):
            first_s = first_s or time.monotonic() - started
            tokens += 1
            print(text, end="", flush=True)
        if first_s is None:
            raise EngineError("the stream ended without any text.")
        total_s = time.monotonic() - started
        tell(f"\n\n[{tokens} pieces; the first after {first_s * 1000:.0f} ms, all after {total_s:.2f} s]\n")
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"the request failed: {error}") from error
    finally:
        connection.close()


def contents(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the text of each event of a chat stream.

    Raises:
        EngineError: an error event came, or the stream ended without `[DONE]`.
    """
    for line in iter(response.readline, b""):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EngineError(f"the engine broke off: {event['error'].get('message')}")
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                yield text
    raise EngineError("the stream ended without [DONE].")


def show_usage(port: int, admin_port: int, folder: Path) -> None:
    """Tell how to call what runs now."""
    body = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": QUESTION}]})
    tell(
        f"""\
Call it yourself, with curl:

  curl -N http://127.0.0.1:{port}/v1/chat/completions -H 'content-type: application/json' \\
    -d {shlex.quote(body)}

or with OpenAI's Python client (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:{port}/v1", api_key="none")
  question = {{"role": "user", "content": "{QUESTION}"}}
  for event in client.chat.completions.create(model="{MODEL}", messages=[question], stream=True):
      for choice in event.choices:
          print(choice.delta.content or "", end="", flush=True)

Models: http://127.0.0.1:{port}/v1/models  Metrics: http://127.0.0.1:{admin_port}/metrics
Configuration and logs: {shown(folder)}/

Ctrl-C stops everything."""
    )


def stay(processes: Sequence[Process]) -> None:
    """Wait until somebody asks to stop, or until nobody can see us any more.

    Raises:
        Stop: the pipe or terminal on standard input closed, or nobody reads our output; a signal came.
        EngineError: one of `processes` ended by itself.
    """
    watched = select.poll()
    for descriptor in (0, 1):
        with suppress(OSError):
            os.fstat(descriptor)  # it may have been closed from the start, which asks for nothing
            watched.register(descriptor, 0)  # no events: a hang-up is always told
    while True:
        hung_up = [events for _, events in watched.poll(500) if events & (select.POLLHUP | select.POLLERR)]
        if hung_up:
            raise Stop
        for process in processes:
            if not process.is_running:
                raise EngineError(f"{process.name} ended by itself.\n{process.tail()}")


@contextmanager
def only_demo(folder: Path) -> Iterator[None]:
    """Hold `folder`, which only one demo can use.

    Raises:
        EngineError: another one runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise EngineError(
                f"a demo runs in {shown(folder)} already (process {lock.read().strip()}); stop it first."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def chosen_port(preferred: int, purpose: str) -> int:
    """Return a free port, if possible `preferred`, and say so if not."""
    port = free_port(preferred)
    if port != preferred:
        tell(f"Port {preferred} is taken; {purpose} gets port {port}.")
    return port


def shown(path: Path) -> Path:
    """Return `path` as a person in the checkout would write it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def tell(text: str) -> None:
    """Print a line at once. A terminal that is gone is no reason to leave processes behind."""
    with suppress(OSError):
        print(text, flush=True)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    # Once is enough: the clean-up that follows must not be interrupted.
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    tell("\nStopping ...")
    raise Stop


if __name__ == "__main__":
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads any more; Python would complain about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
