"""The configuration page is the schema's."""

from pathlib import Path

from conf.reference import render
from conf.schema import Config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run `make docs`"


def test_every_key_has_a_text() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.rsplit(" | ", 1)[1].strip(" |") == ""] == []


def test_a_key_that_needs_a_restart_says_so() -> None:
    rows = {line.split("`")[1]: line for line in render().splitlines() if line.startswith("| `")}
    assert "**restart**" in rows["listen"]
    assert "**restart**" not in rows["drain_timeout"]
    assert set(Config.__struct_fields__) <= set(rows)
