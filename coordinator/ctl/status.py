"""`llmgw-ctl status`."""

from __future__ import annotations

from coordinator.admin.views import StatusView
from coordinator.ctl.client import fetch
from coordinator.ctl.outcome import ExitCode
from coordinator.ctl.output import print_json, print_table, spell_age

_USABLE = ("unknown", "ready", "stale")


def status(*, json: bool = False, admin: str = "") -> ExitCode:
    """Show the instance as a whole: version, processes, endpoints by state, requests in flight.

    Exit codes: 0 if requests can be served; 1 if not (no worker runs, or no endpoint can be used);
    2 if no gateway answers.

    Args:
        json: print JSON for programs instead of text for people.
        admin: address of the gateway's admin listener; else LLMGW_ADMIN, else http://127.0.0.1:9090.
    """
    view = fetch(admin, "/api/v1/status", StatusView)
    if json:
        print_json(view)
    else:
        _show(view)
    workers = [process for process in view.processes if process.kind == "worker"]
    usable = sum(view.endpoints_by_state.get(state, 0) for state in _USABLE)
    return ExitCode.GOOD if workers and usable else ExitCode.NOT_GOOD


def _show(view: StatusView) -> None:
    states = [f"{count} {state}" for state, count in view.endpoints_by_state.items() if count]
    form = "compiled" if view.compiled else "as Python"
    print(f"llmgw {view.version} ({form}) on {view.instance}, {view.phase}")
    print(f"configuration {view.config_generation} since the start; {view.inflight} requests in flight")
    print(f"endpoints: {', '.join(states) or 'none configured'}\n")
    rows = [
        [each.kind, str(each.pid), each.state, spell_age(each.age_s), spell_age(each.heartbeat_age_s)]
        for each in view.processes
    ]
    print_table(("PROCESS", "PID", "STATE", "UP", "LAST SIGN"), rows, right=("PID", "UP", "LAST SIGN"))
