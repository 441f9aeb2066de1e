"""`llmgw-ctl config check`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from conf import load as conf_load
from conf.errors import ConfigError
from conf.schema import Config
from coordinator.ctl.outcome import ExitCode
from coordinator.ctl.output import print_json


class ProblemView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong; see conf.errors.Problem."""

    path: str
    line: int | None
    key: str
    message: str


class CheckView(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    ok: bool
    problems: tuple[ProblemView, ...] = ()


def check(file: str, *, json: bool = False) -> ExitCode:
    """Check a configuration as the gateway would read it, `LLMGW_` variables included; start nothing.

    Prints every problem, one per line: `FILE:LINE: key: what is wrong and what is allowed`. A running gateway
    is not needed, and not touched.

    Exit codes: 0 if the gateway could start with it (or take it up at SIGHUP); 1 if not; 2 for wrong usage.

    Args:
        file: the configuration (YAML).
        json: print JSON for programs: `{"ok": …, "problems": [{"path", "line", "key", "message"}]}`.
    """
    try:
        config = conf_load.load(Path(file))
    except ConfigError as exc:
        if json:
            problems = [
                ProblemView(path=each.path, line=each.line, key=each.key, message=each.message)
                for each in exc.problems
            ]
            print_json(CheckView(ok=False, problems=tuple(problems)))
        else:
            print(exc)
        return ExitCode.NOT_GOOD
    if json:
        print_json(CheckView(ok=True))
    else:
        print(f"{file}: good ({_summary(config)})")
    return ExitCode.GOOD


def _summary(config: Config) -> str:
    counts = ((len(config.models), "model"), (len(config.endpoints), "endpoint"))
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
