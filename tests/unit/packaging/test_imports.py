"""Which room may import which, as Python sees it; the linter's contracts in setup.cfg read the source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("gateway", "coordinator", "agent", "shm", "conf")
FRAMEWORKS = (
    "falcon",
    "gevent",
    "gunicorn",
    "lmdb",
    "prometheus_client",
    "pynvml",
    "redis",
    "urllib3",
    "zmq",
)
# What may be in memory once a module of the core is; packages on the way down count as themselves.
CORES = {
    "agent.core": ("agent", "agent.core", "conf"),
    "gateway.core": ("gateway", "gateway.core", "agent", "agent.core", "conf"),
    "coordinator.core": (
        *("coordinator", "coordinator.core", "gateway", "gateway.core", "agent", "agent.core", "conf"),
    ),
}
# Imports each module in a child of its own, forked from an interpreter that has imported nothing of ours.
CHILD = """
import importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    if os.fork() == 0:
        importlib.import_module(name)
        print(json.dumps([name, sorted(sys.modules)]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{name} cannot be imported")
"""


def core_modules(core: str) -> list[str]:
    files = (ROOT / core.replace(".", "/")).rglob("*.py")
    return sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files
    )


def loaded_by(modules: list[str]) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("core", CORES)
def test_a_core_loads_no_framework_and_no_shell(core: str) -> None:
    modules = core_modules(core)
    loaded = loaded_by(modules)
    assert sorted(loaded) == modules
    for module, names in loaded.items():
        rooms = [name for name in names if name.split(".")[0] in ROOMS]
        foreign = [
            name
            for name in rooms
            if name not in CORES[core] and not name.startswith((*(c + "." for c in CORES), "conf."))
        ]
        if core == "agent.core":
            foreign += [name for name in rooms if name.startswith("gateway")]
        foreign += [name for name in names if name.split(".")[0] in FRAMEWORKS]
        assert foreign == [], f"{module} loads {foreign}"


def test_importing_the_configuration_loads_no_framework() -> None:
    names = ["conf.load", "conf.log", "conf.reload"]
    for module, loaded in loaded_by(names).items():
        assert not [n for n in loaded if n.split(".")[0] in (*FRAMEWORKS, "shm", "gateway")], module


def test_no_source_file_spells_a_room_through_the_wheel() -> None:
    spellings = ("import llmgw", "from llmgw")
    folders = (*ROOMS, "bin", "tests", "bench")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py") if f != Path(__file__)]
    found = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in files
        for line in file.read_text().splitlines()
        if line.lstrip().startswith(spellings)
    ]
    assert found == []


def test_only_the_loader_reads_the_environment() -> None:
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py")]
    readers = {str(f.relative_to(ROOT)) for f in files if "os.environ" in f.read_text()}
    assert readers <= {"conf/load.py"}
