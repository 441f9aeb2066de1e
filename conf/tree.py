"""A YAML file as a tree that knows the line of everything in it.

Rules:
    - Scalars stay text: only the schema knows what a value is. (YAML 1.1 would read `off` as false.)
    - The same key twice in a mapping is refused; PyYAML itself would take the last in silence.
    - Aliases and merge keys (`<<`) work; a node that contains itself is refused.
    - Trees may share nodes (aliases), so nobody changes a node in place: `with_entry` and `with_item` copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import yaml

from conf.errors import Problem

_STANDARD_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = {"str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written.

    Attributes:
        path: the file, or `environment`.
        line: line in the file, from 1.
        variable: name of the environment variable; None in a file.
    """

    path: str
    line: int | None = None
    variable: str | None = None

    def problem(self, key: str, message: str) -> Problem:
        """Say what is wrong with the value of the dotted `key`."""
        return Problem(self.path, self.line, self.variable or key, message)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value. `plain`: written without quotes."""

    text: str
    plain: bool
    origin: Origin

    @property
    def is_null(self) -> bool:
        """Whether it stands for "nothing" (an empty value too)."""
        return self.plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list of values."""

    items: tuple[Node, ...]
    origin: Origin

    def with_item(self, index: int, node: Node) -> Sequence:
        """Return a copy with `node` at `index`, which may be one past the end."""
        return replace(self, items=(*self.items[:index], node, *self.items[index + 1 :]))


@dataclass(frozen=True, slots=True)
class Mapping:
    """Values by key, in file order. `key_origins` holds where each key itself stands."""

    entries: dict[str, Node]
    key_origins: dict[str, Origin]
    origin: Origin

    def with_entry(self, key: str, node: Node, origin: Origin) -> Mapping:
        """Return a copy with `node` under `key`."""
        return replace(
            self, entries={**self.entries, key: node}, key_origins={**self.key_origins, key: origin}
        )


Node: TypeAlias = Scalar | Sequence | Mapping


def read_yaml(text: str, origin: Origin, problems: list[Problem]) -> Node | None:
    """Read one YAML document.

    Args:
        text: the document.
        origin: its file or variable; lines are added for a file.
        problems: what is wrong is appended here.

    Returns:
        The tree (a null scalar for an empty document); None where the text is no YAML at all.
    """
    return _Reader(origin, problems).read(text)


class _Reader:
    def __init__(self, origin: Origin, problems: list[Problem]) -> None:
        self._origin = origin
        self._problems = problems
        # By identity of the YAML node: an alias gives the same node of ours. None: being converted.
        self._done: dict[int, Node | None] = {}

    def read(self, text: str) -> Node | None:
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            return Scalar("", True, self._origin) if node is None else self._convert(node)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = " ".join(filter(None, (error.context, error.problem, error.note)))
            origin = self._at(mark.line) if mark else self._origin
            self._problems.append(origin.problem("", f"is not valid YAML: {reason}"))
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position)
            message = f"is not valid YAML: character #x{ord(text[error.position]):04x} is not allowed"
            self._problems.append(self._at(line).problem("", message))
        except RecursionError:
            self._problems.append(self._origin.problem("", "is nested too deeply"))
        return None

    def _at(self, line: int) -> Origin:
        return self._origin if self._origin.variable else replace(self._origin, line=line + 1)

    def _convert(self, node: yaml.Node) -> Node:
        origin = self._at(node.start_mark.line)
        if id(node) in self._done:
            done = self._done[id(node)]
            if done is None:
                raise yaml.composer.ComposerError(None, None, "an anchor contains itself", node.start_mark)
            return done
        self._done[id(node)] = None
        if node.tag.removeprefix(_STANDARD_TAG) not in _KNOWN_TAGS:
            self._problems.append(origin.problem("", f"the YAML tag {node.tag} is not allowed"))
        result: Node
        if isinstance(node, yaml.MappingNode):
            result = self._mapping(node, origin)
        elif isinstance(node, yaml.SequenceNode):
            result = Sequence(tuple(self._convert(item) for item in node.value), origin)
        else:
            assert isinstance(node, yaml.ScalarNode)
            result = Scalar(node.value, node.style is None, origin)
        self._done[id(node)] = result
        return result

    def _mapping(self, node: yaml.MappingNode, origin: Origin) -> Mapping:
        entries: dict[str, Node] = {}
        origins: dict[str, Origin] = {}
        merged: list[Mapping] = []
        for key_node, value_node in node.value:
            at = self._at(key_node.start_mark.line)
            value = self._convert(value_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(at.problem("", "a key must be a name, not a list or a mapping"))
            elif key_node.tag == _STANDARD_TAG + "merge":
                merged += self._merged(value, at)
            elif key_node.value in entries:
                first = origins[key_node.value]
                self._problems.append(
                    at.problem(key_node.value, f"is written twice; the first is in line {first.line}")
                )
            else:
                entries[key_node.value] = value
                origins[key_node.value] = at
        # Own keys win over merged ones, earlier merged ones over later (YAML's merge type).
        for mapping in merged:
            entries = {**mapping.entries, **entries}
            origins = {**mapping.key_origins, **origins}
        return Mapping(entries, origins, origin)

    def _merged(self, value: Node, at: Origin) -> list[Mapping]:
        sources = value.items if isinstance(value, Sequence) else (value,)
        mappings = [source for source in sources if isinstance(source, Mapping)]
        if len(mappings) != len(sources):
            self._problems.append(at.problem("<<", "needs a mapping or a list of mappings"))
        return mappings
