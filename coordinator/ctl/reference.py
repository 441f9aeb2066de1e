"""The page docs/ctl.md, made from the docstrings of the commands by `make docs`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from coordinator.ctl.main import COMMANDS, Command

INTRODUCTION = """\
# llmgw-ctl

<!-- Made by `make docs` from coordinator/ctl/; change it there. -->

Commands for operators. They ask the admin listener of a running gateway; where that is, `--admin URL` says,
else the variable `LLMGW_ADMIN`, else it is `http://127.0.0.1:9090`. Every command prints text for people, or
with `--json` one JSON document for programs; of a running gateway, the body of the management API.

| exit code | means |
|---|---|
| 0 | the answer is yes, or there was nothing to say no to |
| 1 | the answer is no: a configuration with errors, a gateway that cannot serve |
| 2 | there is no answer: wrong usage, or no gateway to ask |

`llmgw-ctl COMMAND --help` shows what is below.
"""


def render() -> str:
    """Return the page."""
    sections = (_section(" ".join(words), command) for words, command in COMMANDS.items())
    return INTRODUCTION + "".join(f"\n{section}" for section in sections)


def _section(name: str, command: Command) -> str:
    text, _, arguments = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")
    usage = " ".join(["llmgw-ctl", name, *_usage(command)])
    return (
        "\n".join([f"## {name}\n", f"    {usage}\n", text.strip(), "", *_arguments(command, arguments)])
        + "\n"
    )


def _usage(command: Command) -> Iterator[str]:
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            yield parameter.name.upper()
        elif parameter.default is False:
            yield f"[--{parameter.name}]"
        else:
            yield f"[--{parameter.name} {_value(parameter.name)}]"


def _arguments(command: Command, text: str) -> Iterator[str]:
    kinds = inspect.signature(command).parameters
    for line in inspect.cleandoc(text).splitlines():
        name, _, meaning = line.strip().partition(": ")
        parameter = kinds[name]
        if parameter.kind is not parameter.KEYWORD_ONLY:
            spelled = name.upper()
        elif parameter.default is False:
            spelled = f"--{name}"
        else:
            spelled = f"--{name} {_value(name)}"
        yield f"- `{spelled}`: {meaning}"


def _value(name: str) -> str:
    return "URL" if name == "admin" else name.upper()


if __name__ == "__main__":
    print(render(), end="")
