"""`llmgw-ctl`: commands for operators. One file per command; its docstring is its manual (docs/ctl.md)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence

import fire
from fire.parser import DefaultParseValue

from conf import load as conf_load
from coordinator.ctl.client import DEFAULT_ADMIN
from coordinator.ctl.config_check import check
from coordinator.ctl.endpoints import endpoints
from coordinator.ctl.outcome import CommandError, ExitCode
from coordinator.ctl.status import status
from coordinator.ctl.top import top

Command = Callable[..., ExitCode]

# By the words that a person types.
COMMANDS: Mapping[tuple[str, ...], Command] = {
    ("config", "check"): check,
    ("endpoints",): endpoints,
    ("status",): status,
    ("top",): top,
}


class _Call:
    """A command with its arguments, to be run once all words are understood; fire would run it before."""

    def __init__(self, command: Command, args: tuple[object, ...], options: dict[str, object]) -> None:
        self._command = command
        self._args = args
        self._options = options

    def __dir__(self) -> list[str]:
        return []  # what fire would take a further word for

    def _run(self, default_admin: str) -> ExitCode:
        options = dict(self._options)
        if "admin" in _options(self._command):
            options["admin"] = options.get("admin") or default_admin
        return self._command(*self._args, **options)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; None for the process's own.
        environ: variables; None for the process's own.

    Returns:
        The exit code, see `coordinator.ctl.outcome.ExitCode`.
    """
    words = [_as_text(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        call = fire.Fire(_tree(), command=words, name="llmgw-ctl", serialize=_silent)
        if not isinstance(call, _Call):
            return ExitCode.NO_ANSWER  # fire has shown what there is
        return call._run(conf_load.admin_url(environ) or DEFAULT_ADMIN)
    except CommandError as exc:
        print(f"llmgw-ctl: {exc}", file=sys.stderr)
        return ExitCode.NO_ANSWER
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return ExitCode.GOOD


def _as_text(word: str) -> str:
    """Quote a word that fire would take for a number, a list or the like: our arguments are texts."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if (word.startswith("-") and not equals) or DefaultParseValue(value) == value:
        return word
    return f"{flag}{equals}{value!r}"


def _tree() -> dict[str, object]:
    """Return the commands as fire wants them: a dictionary per group."""
    tree: dict[str, object] = {}
    for words, command in COMMANDS.items():
        at = tree
        for word in words[:-1]:
            at = at.setdefault(word, {})  # type: ignore[assignment]
        at[words[-1]] = _deferred(command)
    return tree


def _deferred(command: Command) -> Callable[..., _Call]:
    @functools.wraps(command)
    def call(*args: object, **options: object) -> _Call:
        return _Call(command, args, options)

    return call


def _options(command: Command) -> Mapping[str, object]:
    return command.__kwdefaults__ or {}


def _silent(result: object) -> object:
    return None if isinstance(result, _Call) else result
