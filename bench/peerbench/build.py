"""Build peerbench, the fake engine and the load generator, with plain rustc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"


class BuildError(Exception):
    """peerbench cannot be built; the text says what to do."""


def build(folder: Path) -> Path:
    """Return the program in `folder`, built anew if a source is newer.

    Installs Debian's rustc where there is none and we are root.

    Raises:
        BuildError: no compiler, or it refused.
    """
    program = folder / "peerbench"
    newest = max(source.stat().st_mtime for source in SOURCES.glob("*.rs"))
    if program.exists() and program.stat().st_mtime > newest:
        return program
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "peerbench.new"
    command = [_compiler(), "-O", "--edition", "2021", "-o", str(unfinished), str(SOURCES / "main.rs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"rustc could not build peerbench:\n{done.stderr}")
    unfinished.replace(program)
    return program


def _compiler() -> str:
    if not shutil.which("rustc") and os.geteuid() == 0 and shutil.which("apt-get"):
        print("bench: installing rustc (apt-get)", flush=True)
        for arguments in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "rustc"]):
            subprocess.run(["apt-get", *arguments], capture_output=True, check=False)
    found = shutil.which("rustc")
    if found is None:
        raise BuildError("rustc is needed to build the load generator (on Debian: apt-get install rustc).")
    return found
