"""A compiled form is run only where it belongs to the sources as they are, and never needed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bin.compiled.form import IN_USE, MODULES, PARTS, ROOMS, VARIABLE, choose, digest, home_of, sources

ROOT = Path(__file__).resolve().parents[3]
# Structs that only carry values from one function to another; nothing is decoded into them.
CONTAINERS = {"Choice", "LaneSettings", "Request"}
MAIN = """\
import sys
from pathlib import Path
def main(argv):
    print(Path(__file__).parents[2], flush=True)
    if argv:
        sys.stdin.read()
    return 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a room, whose simulated engine tells which folder it runs from."""
    root = tmp_path / "checkout"
    (root / "gateway").mkdir(parents=True)
    (root / "gateway" / "relay.py").write_text("SIZE = 1\n")
    (root / "agent" / "sim").mkdir(parents=True)
    (root / "agent" / "sim" / "main.py").write_text(MAIN)
    (root / "bin" / "engines").mkdir(parents=True)
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, root / part)
    return root


def classes_of(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]


def is_struct(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Struct") for base in node.bases)


def compiled(root: Path) -> Path:
    """Make what a build makes, without compiling anything."""
    folder = home_of(root) / digest(root)
    for path in sources(root):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, folder / path)
    (folder / IN_USE).touch()
    return folder


def runs_from(root: Path, *, boot: Path | None = None, env: dict[str, str] | None = None) -> Path:
    done = subprocess.run(
        [sys.executable, boot or root / "bin" / "boot.py", "sim"],
        env={**os.environ, VARIABLE: "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return Path(done.stdout.strip())


def build(root: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bin.compiled", *arguments],
        cwd=root,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def edit(root: Path) -> None:
    (root / "gateway" / "relay.py").write_text("SIZE = 2\n")


def add_module(root: Path) -> None:
    (root / "gateway" / "new.py").touch()


def remove_module(root: Path) -> None:
    (root / "gateway" / "relay.py").unlink()


def rename_module(root: Path) -> None:
    (root / "gateway" / "relay.py").rename(root / "gateway" / "relais.py")


def add_data(root: Path) -> None:
    (root / "agent" / "sim" / "words.yaml").write_text("a: b\n")


def edit_boot(root: Path) -> None:
    with (root / "bin" / "boot.py").open("a") as file:
        file.write("\n")


def edit_module_list(root: Path) -> None:
    with (root / "bin" / "compiled" / "form.py").open("a") as file:
        file.write('MODULES = ("gateway/relay.py",)\n')


def test_every_module_that_is_compiled_is_there_once() -> None:
    assert len(set(MODULES)) == len(MODULES)
    assert [module for module in MODULES if not (ROOT / module).is_file()] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_compiled_module_defines_what_msgspec_decodes_into(module: str) -> None:
    structs = {node.name for node in classes_of(ROOT / module) if is_struct(node)}
    assert structs - CONTAINERS == set(), "mypyc loses a Struct's types: put it into gateway/core/shapes.py"
    # A `dict[str, Raw]` in an expression becomes a `dict`.
    assert "json.Decoder(" not in (ROOT / module).read_text()


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    compiled_classes = {node.name for module in MODULES for node in classes_of(ROOT / module)}
    heirs = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if str(file.relative_to(ROOT)) not in MODULES
        for node in classes_of(file)
        if compiled_classes & {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    ]
    assert heirs == []


def test_the_copy_has_everything_that_the_wheel_has() -> None:
    listed = set(sources(ROOT))
    files = {str(file.relative_to(ROOT)) for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert files - listed == set()


def test_programs_run_from_the_compiled_form_of_these_sources(checkout: Path) -> None:
    assert runs_from(checkout) == checkout
    folder = compiled(checkout)
    assert runs_from(checkout) == folder


@pytest.mark.parametrize(
    "change",
    [edit, add_module, remove_module, rename_module, add_data, edit_boot, edit_module_list],
)
def test_after_any_change_programs_run_from_the_sources(
    checkout: Path, change: Callable[[Path], None]
) -> None:
    compiled(checkout)
    change(checkout)
    assert runs_from(checkout) == checkout


def test_another_interpreter_has_a_form_of_its_own(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = digest(checkout)
    monkeypatch.setattr(sys, "version", "3.99.0 (another build)")
    assert digest(checkout) != mine


def test_what_python_and_the_engines_write_changes_nothing(checkout: Path) -> None:
    before = digest(checkout)
    (checkout / "gateway" / "__pycache__").mkdir()
    (checkout / "gateway" / "__pycache__" / "relay.cpython-311.pyc").write_bytes(b"x")
    (checkout / "gateway" / ".relay.py.swp").write_bytes(b"x")
    (checkout / "bin" / "engines" / "sim.py").touch()
    assert digest(checkout) == before


def test_a_variable_has_programs_run_from_the_sources(checkout: Path) -> None:
    compiled(checkout)
    assert runs_from(checkout, env={VARIABLE: "0"}) == checkout


def test_children_stay_in_their_parents_form_though_the_sources_change(checkout: Path) -> None:
    folder = compiled(checkout)
    edit(checkout)
    assert runs_from(checkout, boot=folder / "bin" / "boot.py") == folder


def test_half_a_folder_is_not_run(checkout: Path) -> None:
    folder = compiled(checkout)
    (folder / IN_USE).unlink()
    assert choose(checkout, {}) == checkout


def test_a_form_in_use_stays_until_its_last_program_has_ended(checkout: Path) -> None:
    folder = compiled(checkout)
    with subprocess.Popen(
        [sys.executable, checkout / "bin" / "boot.py", "sim", "stay"],
        env={**os.environ, VARIABLE: ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        # Without a compiler, a build only tidies up.
        command = {"CC": "no-such-compiler"}
        assert program.stdout.readline() in (f"{folder}\n", "")
        edit(checkout)
        compiled(checkout)
        assert build(checkout, env=command).returncode == 0
        assert folder.exists()
        program.communicate("")
    assert build(checkout, env=command).returncode == 0
    assert not folder.exists()
    assert runs_from(checkout) == home_of(checkout) / digest(checkout)


def test_a_machine_without_a_compiler_is_told_so_and_goes_on_as_python(checkout: Path) -> None:
    done = build(checkout, env={"CC": "no-such-compiler"})
    assert done.returncode == 3
    assert done.stderr == "compile: there is no C compiler (no-such-compiler); everything runs as Python\n"
    assert build(checkout, "--optional", env={"CC": "no-such-compiler"}).returncode == 0
    assert runs_from(checkout) == checkout


def test_sources_that_cannot_be_compiled_go_on_as_python(checkout: Path) -> None:
    done = build(checkout, "--optional")  # the modules to be compiled are not there
    assert done.returncode == 1
    assert "could not compile" in done.stderr
    assert "everything runs as Python" in done.stderr
    assert "Traceback" not in done.stderr.splitlines()[-1]
    assert [folder for folder in home_of(checkout).iterdir() if folder.is_dir()] == []
    assert runs_from(checkout) == checkout


def test_a_build_that_takes_too_long_is_ended(checkout: Path) -> None:
    done = build(checkout, "--timeout", "0.01")
    assert done.returncode == 1
    assert "took longer than 0.01 s" in done.stderr
