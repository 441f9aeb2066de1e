"""The documentation can be followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from conf.load import load

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_names_only_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert used
    assert used - targets == set()


def test_the_readme_configuration_is_valid(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    assert yaml.safe_load(block[1])["workers"] == 2
    (tmp_path / "readme.yaml").write_text(block[1])
    assert len(load(tmp_path / "readme.yaml", {}).endpoints) == 2


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- .*\(([^)]+)\)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert listed == [page.name for page in sorted(folder.glob("2*.md"))]
