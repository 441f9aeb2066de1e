"""How programs start from a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BOOT = Path(__file__).resolve().parents[3] / "bin" / "boot.py"
MAIN = """\
import sys
def main(argv):
    print(argv)
    print(sys.executable)
    print([entry for entry in sys.path if entry.endswith(('checkout', 'bin'))])
    return 3
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose simulated engine only tells how it was started."""
    root = tmp_path / "checkout"
    (root / "bin").mkdir(parents=True)
    (root / "gateway").mkdir()
    (root / "agent" / "sim").mkdir(parents=True)
    (root / "agent" / "sim" / "main.py").write_text(MAIN)
    shutil.copy(BOOT, root / "bin" / "boot.py")
    shutil.copy(BOOT.parent / "llmgw-sim", root / "bin" / "llmgw-sim")
    return root


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_program_gets_its_arguments_and_gives_its_exit_code(checkout: Path) -> None:
    done = run(sys.executable, checkout / "bin" / "llmgw-sim", "--port", "0")
    assert done.stdout.splitlines()[0] == "['--port', '0']"
    assert done.returncode == 3, done.stderr


def test_the_rooms_parent_comes_first_and_the_scripts_folder_not_at_all(checkout: Path) -> None:
    done = run(sys.executable, checkout / "bin" / "boot.py", "sim")
    assert done.stdout.splitlines()[2] == str([str(checkout)])


def test_a_python_without_the_packages_is_replaced_by_the_checkouts_own(checkout: Path) -> None:
    venv_python = checkout / ".venv" / "bin" / "python"
    venv_python.parent.mkdir(parents=True)
    # Without -S, which hides the packages from the first interpreter.
    venv_python.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" "$@"\n')
    venv_python.chmod(0o755)
    done = run(sys.executable, "-S", checkout / "bin" / "boot.py", "sim", "a b")
    assert done.stdout.splitlines()[0] == "['a b']", done.stderr


def test_without_packages_and_without_a_venv_it_says_what_to_do(checkout: Path) -> None:
    done = run(sys.executable, "-S", "-I", checkout / "bin" / "boot.py", "sim")
    assert done.returncode == 1
    assert "lacks falcon" in done.stderr
    assert f"Run `make setup` in {checkout}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_program_is_refused_with_the_known_ones(checkout: Path) -> None:
    done = run(sys.executable, checkout / "bin" / "boot.py", "gate")
    assert done.returncode == 2
    assert "gateway|workers|coordinator|ctl|sim" in done.stderr
