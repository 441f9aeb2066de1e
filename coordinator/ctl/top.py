"""`llmgw-ctl top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from coordinator.admin.views import BandView, LoadView, PoolLoadView
from coordinator.ctl.client import fetch
from coordinator.ctl.outcome import CommandError, ExitCode
from coordinator.ctl.output import console, make_table, print_json

_PATH = "/api/v1/load"
_TURN_S = 1.0
_NEVER_REACHED = 100.0
"""Ceilings from here on say that the band never waits for saturation."""
_COLUMNS = ("POOL", "MODEL", "SATURATION", "IN FLIGHT", "LEASES", "CAP")


def top(*, once: bool = False, json: bool = False, admin: str = "") -> ExitCode:
    """Show who runs and who waits, by pool, model and band, anew each second until Ctrl-C.

    SATURATION is how full a model is in a pool: 1 is the healthy limit; `none` where no endpoint could run
    anything. A band waits while it is at or above the band's ceiling, which stands behind the band's name.
    LEASES are requests that may run, CAP is how many may at most, both on a pool's first line and for all its
    models. Of other instances, LEASES and IN FLIGHT show the sum behind a `+`.

    Exit codes: 0; 2 if no gateway answers.

    Args:
        once: show it once; so it is too where the output is no terminal.
        json: print JSON for programs, once.
        admin: address of the gateway's admin listener; else LLMGW_ADMIN, else http://127.0.0.1:9090.
    """
    view = fetch(admin, _PATH, LoadView)
    out = console()
    if json:
        print_json(view)
    elif once or not out.is_terminal:
        out.print(picture(view))
    else:
        _follow(lambda: fetch(admin, _PATH, LoadView), view, out)
    return ExitCode.GOOD


def picture(view: LoadView) -> RenderableType:
    """Return the table of one look."""
    if not view.pools:
        return Text("The configuration names no endpoints.")
    columns = [*_COLUMNS, *map(_heading, view.bands)]
    rows = [row for pool in view.pools for row in _rows(pool, [band.name for band in view.bands])]
    return make_table(columns, rows, right=columns[2:])


def _rows(pool: PoolLoadView, bands: list[str]) -> Iterator[list[str]]:
    leases = _with_others(pool.leases, pool.remote_leases)
    cap = "-" if pool.cap is None else str(pool.cap)
    for number, lane in enumerate(pool.lanes):
        yield [
            "" if number else pool.pool,
            lane.model,
            "none" if lane.saturation is None else f"{lane.saturation:.2f}",
            _with_others(lane.inflight, lane.remote_inflight),
            "" if number else leases,
            "" if number else cap,
            *(str(lane.waiting.get(band, 0)) for band in bands),
        ]


def _heading(band: BandView) -> str:
    ceiling = band.saturation_ceiling
    return band.name if ceiling >= _NEVER_REACHED else f"{band.name} <{ceiling:g}"


def _with_others(own: int, others: int) -> str:
    return f"{own}+{others}" if others else str(own)


def _follow(look: Callable[[], LoadView], view: LoadView, out: Console) -> None:
    """Show one look after the other until Ctrl-C; a gateway that is away may come back."""
    try:
        with Live(_page(view), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_TURN_S)
                try:
                    view = look()
                    live.update(_page(view), refresh=True)
                except CommandError as exc:
                    live.update(Group(_page(view), Text(str(exc), style="red")), refresh=True)
    except KeyboardInterrupt:
        return


def _page(view: LoadView) -> RenderableType:
    title = Text(
        f"llmgw on {view.instance}, {time.strftime('%H:%M:%S')}; waiting requests by band on the right\n"
    )
    return Group(title, picture(view))
