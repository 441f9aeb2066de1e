"""The wheel, installed beside a stranger that owns the same names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("llmgw-gateway", "llmgw-ctl", "llmgw-sim")
RIVAL = 'raise ImportError("a stranger\'s package was taken for ours")\n'


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes into the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns(
        ".*", "__pycache__", "node_modules", "build", "dist", "*.egg-info", "tests"
    )
    shutil.copytree(ROOT, source, ignore=ignore)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    return next(folder.glob("llmgw-*.whl"))


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, our dependencies, and packages called `agent` and `conf`."""
    folder = tmp_path_factory.mktemp("installation")
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*/site-packages"))
    # A folder named in a .pth file gives its modules; its own .pth files, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("agent", "conf", "gateway"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(RIVAL)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"llmgw"}


@pytest.mark.parametrize("file", ["examples/minimal.yaml", "systemd/llmgw-gateway.service"])
def test_the_wheel_holds_the_files_to_copy(wheel: Path, file: str) -> None:
    assert f"llmgw/conf/{file}" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_starts_beside_a_stranger_with_our_names(program: str, installation: Path) -> None:
    done = run(installation / "bin" / program, "--help", cwd=installation)
    assert program in done.stdout + done.stderr


def test_a_child_finds_its_room_in_the_installed_package(installation: Path) -> None:
    boot = next((installation / "lib").glob("python*/site-packages/llmgw/boot.py"))
    done = run(installation / "bin" / "python", boot, "sim", "--help", cwd=installation)
    assert "llmgw-sim" in done.stdout + done.stderr
