"""Start a program of llmgw from a checkout or from an installed wheel.

Rules:
    - Only the standard library is imported here, so that any Python can run this file.
    - The rooms (`gateway`, `conf`, ...) are imported flat, as `gateway.launcher`. Their parent is put first
      on `sys.path`: this file's own folder in a wheel, where the rooms lie inside the package `llmgw`, and
      its parent in a checkout. First, so that a foreign `agent` or `conf` never takes their place.
    - A Python without our packages is replaced by the checkout's `.venv`, if there is one.
    - A checkout whose sources were compiled as they are now runs from that copy; see `bin/compiled/form.py`.

Children are started through it as well: `sys.executable boot.py coordinator ...`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

MAIN_MODULES = {
    "gateway": "gateway.launcher",
    "workers": "gateway.workers",
    "coordinator": "coordinator.main",
    "ctl": "coordinator.ctl.main",
    "sim": "agent.sim.main",
}
# Import names of the run-time dependencies of setup.cfg; a test compares the two.
REQUIRED = (
    "falcon",
    "fire",
    "gevent",
    "gunicorn",
    "gunicorn_h1c",
    "msgspec",
    "orjson",
    "prometheus_client",
    "redis",
    "rich",
    "urllib3",
    "xxhash",
    "yaml",
)


def rooms_parent() -> Path:
    """Return the folder that holds the rooms."""
    here = Path(__file__).resolve().parent
    return here if (here / "gateway").is_dir() else here.parent


def run(program: str, argv: list[str]) -> int:
    """Start `program` with the arguments `argv` (without the program's name).

    Does not return where the checkout's own interpreter has to take over.

    Returns:
        The program's exit code.
    """
    root = rooms_parent()
    _require_packages(root)
    here = str(Path(__file__).resolve().parent)
    # The script's folder comes first by default; in a checkout that is bin/, which holds no room.
    others = [entry for entry in sys.path if entry not in (here, str(root))]
    sys.path[:] = [str(root), *others]
    if (root / "bin" / "compiled").is_dir():  # not in a wheel
        from bin.compiled.form import choose

        sys.path[:] = [str(choose(root, os.environ)), *others]
    main: Callable[[list[str]], int] = importlib.import_module(MAIN_MODULES[program]).main
    return main(argv)


def _require_packages(root: Path) -> None:
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    venv = root / ".venv"
    python = venv / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != venv.resolve():
        # orig_argv keeps the interpreter's own options (-X, -W) as well.
        os.execv(python, [str(python), *sys.orig_argv[1:]])
    sys.exit(
        f"llmgw: {sys.executable} lacks {', '.join(missing)}. "
        f"Run `make setup` in {root}, or install llmgw with pip into this Python."
    )


def gateway() -> int:
    """Start the launcher: `llmgw-gateway`."""
    return run("gateway", sys.argv[1:])


def ctl() -> int:
    """Start the command line: `llmgw-ctl`."""
    return run("ctl", sys.argv[1:])


def sim() -> int:
    """Start the simulated engine: `llmgw-sim`."""
    return run("sim", sys.argv[1:])


def main() -> int:
    """Start the program that the first argument names: `python boot.py workers ...`."""
    if len(sys.argv) < 2 or sys.argv[1] not in MAIN_MODULES:
        print(f"usage: boot.py {'|'.join(MAIN_MODULES)} [arguments]", file=sys.stderr)
        return 2
    return run(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
