"""Root of llmgw's exceptions, and the one for configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class LlmgwError(Exception):
    """Root of every exception that llmgw raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: file as the caller named it, or `environment` for an override.
        line: line in that file, from 1; None where there is no line (environment, a missing file).
        key: dotted key (`router.retries`, `endpoints[0].url`), the variable's name for an override,
            empty for the file as a whole.
        message: what is wrong and what is allowed; never the value of a secret.
    """

    path: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: {self.key}: {self.message}" if self.key else f"{where}: {self.message}"


class ConfigError(LlmgwError):
    """A configuration cannot be used; carries every problem found, in file order.

    `str()` is one line per problem, `FILE:LINE: key: message`.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))
