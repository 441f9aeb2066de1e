"""Make the compiled form of this checkout: `make compile`.

Exit codes: 0 there is one; 1 the sources could not be compiled; 3 this machine cannot compile (no mypyc, no C
compiler or no Python headers). In the last two cases everything runs as Python, as it did before.
"""

from __future__ import annotations

import argparse
import compileall
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bin.compiled.form import IN_USE, MODULES, digest, home_of, sources

ROOT = Path(__file__).resolve().parents[2]
_NICENESS = 10
_LONGEST_S = 900.0
_LINES_SHOWN = 15


def main(argv: Sequence[str]) -> int:
    """Build what is missing; return the exit code."""
    options = _options(argv)
    # The compiler must not outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("compile: ended by SIGTERM"))
    home = home_of(ROOT)
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unfinished in home.glob("building-*"):
            shutil.rmtree(unfinished)
        wanted = home / digest(ROOT)
        code = 0
        if not wanted.exists():
            if missing := _missing():
                _say(f"{missing}; everything runs as Python")
                return 0 if options.optional else 3
            code = _build(home, options.timeout)
            if code == 0 and not wanted.exists():
                _say("the sources were edited meanwhile, and run as Python; run `make compile` again")
        _remove_others(home, home / digest(ROOT))
        return code


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("make compile", description="Compile the request path with mypyc.")
    parser.add_argument("--optional", action="store_true", help="a machine that cannot compile is no error")
    parser.add_argument("--timeout", type=float, default=_LONGEST_S, metavar="S", help="default %(default)g")
    return parser.parse_args(argv)


def _missing() -> str | None:
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        return "mypy or setuptools is not installed"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are not installed (python3-dev)"
    return None


def _build(home: Path, timeout_s: float) -> int:
    _say(f"compiling {len(MODULES)} modules, which takes a minute or two")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="building-", dir=home) as name:
        folder = Path(name) / "form"
        for path in sources(ROOT):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
        # Of the copy: an edit in the meantime must not give its name to what was not compiled.
        target = home / digest(folder)
        log = home / "build.log"
        if not _compile(folder, log, timeout_s):
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(lines[-_LINES_SHOWN:]), file=sys.stderr)
            _say(f"could not compile (see above and {log}); everything runs as Python")
            return 1
        shutil.rmtree(folder / "build")
        compileall.compile_dir(folder, quiet=2)
        (folder / IN_USE).touch()
        if not target.exists():
            folder.rename(target)
    _say(f"done in {time.monotonic() - started:.0f} s")
    return 0


def _compile(folder: Path, log: Path, timeout_s: float) -> bool:
    command = [sys.executable, "-m", "bin.compiled.build", str(folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            os.setpriority(os.PRIO_PGRP, process.pid, _NICENESS)
            return process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            output.write(f"took longer than {timeout_s:g} s\n".encode())
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _remove_others(home: Path, wanted: Path) -> None:
    for folder in home.iterdir():
        if folder == wanted or not folder.is_dir():
            continue
        (folder / IN_USE).touch()  # a removal that was broken off comes to its end
        with (folder / IN_USE).open() as in_use:
            try:
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a gateway runs from it, and may start a child again
                continue
            # First the name that programs look for, so that none starts from half a folder.
            (folder / IN_USE).unlink()
            shutil.rmtree(folder)


def _say(text: str) -> None:
    print(f"compile: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
