"""Tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLOURS = {
    "ready": "green",
    "serving": "green",
    "stale": "yellow",
    "down": "red",
    "draining": "yellow",
    "stuck": "red",
}
# A pipe has no width; no row is worth breaking for it.
_PIPE_COLUMNS = 1000


def print_json(value: object) -> None:
    """Print a struct as one indented JSON document."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under their headings; as wide as the terminal, or as wide as needed in a pipe.

    Arguments as for `make_table`.
    """
    console().print(make_table(columns, rows, right=right))


def console() -> Console:
    """Return where tables are printed."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """Return rows under their headings.

    Args:
        columns: headings.
        rows: one text per column.
        right: headings of the columns that hold numbers.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text, not markup: a name with brackets is a name.
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    return table


def spell_age(seconds: float | None) -> str:
    """Return an age for people: `3s`, `5m`, `2h`, `4d`; `-` for none."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
