"""How a command of llmgw-ctl ends."""

from __future__ import annotations

from enum import IntEnum

from conf.errors import LlmgwError


class ExitCode(IntEnum):
    """What a script can tell from the exit code."""

    GOOD = 0
    NOT_GOOD = 1  # the answer is no: a configuration with errors, a gateway that cannot serve
    NO_ANSWER = 2  # there is no answer: wrong usage, or no gateway to ask


class CommandError(LlmgwError):
    """The command has no answer; the message is for a person. Ends with `ExitCode.NO_ANSWER`."""
