"""`llmgw-ctl endpoints`."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.admin.views import EndpointsView, EndpointView
from coordinator.ctl.client import fetch
from coordinator.ctl.outcome import ExitCode
from coordinator.ctl.output import print_json, print_table, spell_age

_COLUMNS: dict[str, Callable[[EndpointView], str]] = {
    "ENDPOINT": lambda view: view.id,
    "MODEL": lambda view: view.model,
    "POOL": lambda view: view.pool,
    "ENGINE": lambda view: view.engine,
    "STATE": lambda view: view.state,
    "FOR": lambda view: spell_age(view.state_age_s),
    "IN FLIGHT": lambda view: str(view.inflight),
    "WAITING": lambda view: _number(view.waiting),
    "RUNNING": lambda view: _number(view.running),
    "KV": lambda view: "-" if view.kv_usage_ratio is None else f"{view.kv_usage_ratio:.0%}",
    "NOTE": lambda view: _note(view),
}
_NUMBERS = ("FOR", "IN FLIGHT", "WAITING", "RUNNING", "KV")


def endpoints(*, json: bool = False, admin: str = "") -> ExitCode:
    """Show every endpoint: its state, what it has to do, and what is wrong with it.

    States: `ready`; `stale` (serves, but its metrics cannot be read: chosen by in-flight counts alone);
    `down` (gets no requests; the note says why); `unknown` (not looked at yet; gets requests); `draining`;
    `stuck` (a request makes no progress there; gets no new ones).

    IN FLIGHT counts this gateway's own requests. WAITING, RUNNING and KV are what the engine said last.

    Exit codes: 0, whatever the endpoints' states; 2 if no gateway answers.

    Args:
        json: print JSON for programs instead of a table for people.
        admin: address of the gateway's admin listener; else LLMGW_ADMIN, else http://127.0.0.1:9090.
    """
    view = fetch(admin, "/api/v1/endpoints", EndpointsView)
    if json:
        print_json(view)
    elif not view.endpoints:
        print("The configuration names no endpoints.")
    else:
        rows = [[cell(each) for cell in _COLUMNS.values()] for each in view.endpoints]
        print_table(tuple(_COLUMNS), rows, right=_NUMBERS)
    return ExitCode.GOOD


def _number(figure: int | None) -> str:
    return "-" if figure is None else str(figure)


def _note(view: EndpointView) -> str:
    notes = [view.reason.replace("_", " ")] if view.reason else []
    if view.stuck_s:
        notes.append(f"a request makes no progress; stuck for {view.stuck_s:.0f}s")
    if view.cooldown_s:
        notes.append(f"left alone for {view.cooldown_s:.0f}s after a failed request")
    return "; ".join([*notes, *view.violations])
