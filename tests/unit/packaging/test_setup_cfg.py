"""setup.cfg says what the tree and the code say."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("gateway", "coordinator", "agent", "shm", "conf")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def boot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("boot", ROOT / "bin" / "boot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line and not line.startswith("#")]


def test_every_package_of_the_tree_is_in_the_wheel(setup_cfg: configparser.ConfigParser) -> None:
    packages = {"llmgw"}
    for room in ROOMS:
        for file in (ROOT / room).rglob("__init__.py"):
            packages.add("llmgw." + ".".join(file.parent.relative_to(ROOT).parts))
    assert sorted(lines(setup_cfg["options"]["packages"])) == sorted(packages)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").exists()] == []


def test_every_program_has_an_entry_point_and_a_script(
    setup_cfg: configparser.ConfigParser, boot: ModuleType
) -> None:
    entries = dict(
        line.split(" = ", 1) for line in lines(setup_cfg["options.entry_points"]["console_scripts"])
    )
    assert sorted(entries) == sorted(file.name for file in (ROOT / "bin").glob("llmgw-*"))
    for name, target in entries.items():
        program = name.removeprefix("llmgw-")
        assert target == f"llmgw.boot:{program}"
        assert callable(getattr(boot, program))
        assert program in boot.MAIN_MODULES


def test_what_boot_asks_for_is_what_the_wheel_requires(
    setup_cfg: configparser.ConfigParser, boot: ModuleType
) -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    required = {
        normal(re.split(r"[<>=]", line)[0]) for line in lines(setup_cfg["options"]["install_requires"])
    }
    owners = importlib.metadata.packages_distributions()
    assert {normal(owners[name][0]) for name in boot.REQUIRED} == required
    assert len(boot.REQUIRED) == len(required)


def test_every_dependency_is_explained(setup_cfg: configparser.ConfigParser) -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    wanted = lines(setup_cfg["options"]["install_requires"])
    wanted += lines(setup_cfg["options.extras_require"]["dev"])
    names = [re.split(r"[<>=]", line)[0].lower() for line in wanted]
    assert [name for name in names if f"| {name} |" not in page] == []


def test_a_room_data_file_is_in_the_wheel(setup_cfg: configparser.ConfigParser) -> None:
    data = setup_cfg["options.package_data"]
    for room in ROOMS:
        patterns = [p.strip() for p in re.split(r"[,\n]", data.get(f"llmgw.{room}", "")) if p.strip()]
        listed = {file for pattern in patterns for file in (ROOT / room).glob(pattern)}
        others = {
            file
            for file in (ROOT / room).rglob("*")
            if file.is_file() and file.suffix not in (".py", ".pyc", ".md")
        }
        assert others - listed == set()
