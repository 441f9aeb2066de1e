"""What is measured: the bare engines, our gateway, and other gateways where they are installed.

Versions and settings of the others: bench/README.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bin.compiled.form import VARIABLE, choose

ROOT = Path(__file__).resolve().parents[1]
MODEL = "sim"
LITELLM_KEY = "sk-bench"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a gateway is to run.

    Attributes:
        folder: for its files.
        port: for clients.
        spare_ports: two more that are free.
        engines: `host:port` of each engine.
    """

    folder: Path
    port: int
    spare_ports: tuple[int, int]
    engines: Sequence[str]

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines as URLs."""
        return [f"http://{engine}" for engine in self.engines]


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway, or none at all.

    Attributes:
        name: in the tables.
        notes: its settings, in a few words.
        start: writes its files and returns its command line; None for the bare engines.
        health: path that answers 200 once it is up.
        headers: its clients have to send.
        environment: it needs beside PATH and HOME.
        start_s: seconds it may take to start.
    """

    name: str
    notes: str
    start: Callable[[Site], list[str]] | None
    health: str = "/health"
    headers: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 60.0


def direct() -> Target:
    """No gateway: the load goes to the engines in turn."""
    return Target("direct", "no gateway, clients take the engines in turn", None)


def llmgw(workers: int, *, as_python: bool = False) -> Target:
    """Our gateway with `workers` workers: routing, metrics and request log on, the log into a file.

    Args:
        as_python: not the compiled form, though there may be one.
    """

    def start(site: Site) -> list[str]:
        endpoints = "\n".join(
            f"  - {{id: engine-{number}, model: {MODEL}, url: {url}, engine: vllm, batch_capacity: 4096}}"
            for number, url in enumerate(site.urls, 1)
        )
        config = site.folder / "llmgw.yaml"
        config.write_text(
            f"listen: 127.0.0.1:{site.port}\n"
            f"admin_listen: 127.0.0.1:{site.spare_ports[0]}\n"
            f"workers: {workers}\n"
            f"state_dir: {json.dumps(str(site.folder / 'state'))}\n"
            "drain_timeout: 2s\n"
            "auth: {enabled: false}\n"
            "log: {level: info, format: json}\n"
            f"models: [{{name: {MODEL}}}]\n"
            f"endpoints:\n{endpoints}\n"
        )
        return [sys.executable, str(ROOT / "bin" / "llmgw-gateway"), "--config", str(config)]

    is_compiled = not as_python and choose(ROOT, os.environ) != ROOT
    form = "compiled" if is_compiled else "as Python"
    notes = f"{form}, {workers} worker{'s' * (workers > 1)}, auth off, request log to a file, metrics on"
    name = f"llmgw-{workers}w{'-python' * as_python}"
    return Target(name, notes, start, health="/readyz", environment={VARIABLE: "" if is_compiled else "0"})


def nginx() -> Target:
    """nginx, the floor for anything that passes bytes."""

    def start(site: Site) -> list[str]:
        servers = "".join(f"server {engine}; " for engine in site.engines)
        temporary = "".join(
            f"    {kind}_temp_path {site.folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (site.folder / "nginx.conf").write_text(
            f"""\
daemon off;
worker_processes auto;
worker_rlimit_nofile 16384;
pid {site.folder}/nginx.pid;
error_log {site.folder}/error.log warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
{temporary}    client_max_body_size 64m;
    client_body_buffer_size 256k;
    keepalive_requests 1000000;
    upstream engines {{
        least_conn;
        {servers}
        keepalive 512;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{site.port} backlog=4096;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""
        )
        return ["nginx", "-p", str(site.folder), "-c", str(site.folder / "nginx.conf")]

    return Target("nginx", "a worker per core, least_conn, no buffering, no access log", start)


def rust_router(name: str, program: Path, *arguments: str, notes: str) -> Target:
    """sglang-router or vllm-router, which share their command line."""

    def start(site: Site) -> list[str]:
        return [
            *(str(program), *arguments, "--host", "127.0.0.1", "--port", str(site.port)),
            *("--worker-urls", *site.urls, "--worker-startup-check-interval", "1"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.spare_ports[0])),
        ]

    return Target(name, notes, start)


def litellm(program: Path) -> Target:
    """LiteLLM's proxy with one worker."""

    def start(site: Site) -> list[str]:
        def entry(url: str) -> object:
            parameters = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
            return {"model_name": MODEL, "litellm_params": parameters}

        config = {
            "model_list": [entry(url) for url in site.urls],
            "router_settings": {"routing_strategy": "simple-shuffle"},
            "litellm_settings": {"request_timeout": 600, "set_verbose": False, "telemetry": False},
            "general_settings": {"master_key": LITELLM_KEY},
        }
        file = site.folder / "config.yaml"
        file.write_text(json.dumps(config))
        return [str(program), "--config", str(file), "--host", "127.0.0.1", "--port", str(site.port)]

    return Target(
        "litellm",
        "1 worker, hosted_vllm provider, simple-shuffle, master key, no database",
        start,
        health="/health/liveliness",
        headers=[f"authorization: Bearer {LITELLM_KEY}"],
        environment={
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "DISABLE_ADMIN_UI": "True",
        },
        start_s=120.0,
    )


def peers(folder: Path | None) -> list[Target]:
    """Return the other gateways that are installed: nginx on the path, the rest in `folder`."""
    found = [nginx()] if shutil.which("nginx") else []
    if folder is None:
        return found
    sglang = folder / "sglang-router" / "bin" / "sglang-router"
    vllm = folder / "vllm-router" / "bin" / "vllm-router"
    proxy = folder / "litellm" / "bin" / "litellm"
    cache_aware = ("--policy", "cache_aware")
    if sglang.exists():
        arguments = ("launch", *cache_aware, "--log-level", "warn")
        found.append(rust_router("sglang-router", sglang, *arguments, notes="cache_aware, log level warn"))
    if vllm.exists():
        for suffix, policy in (("", "cache_aware"), ("-rr", "round_robin")):
            found.append(
                rust_router(
                    f"vllm-router{suffix}",
                    vllm,
                    *("--policy", policy, "--log-level", "warning"),
                    notes=f"{policy}, log level warning",
                )
            )
    if proxy.exists():
        found.append(litellm(proxy))
    return found
