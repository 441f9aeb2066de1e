"""Environment variables that override the file: `LLMGW_ROUTER__RETRIES=3`.

`__` stands between the keys of a path; an item of a list is named by its index (`LLMGW_ENDPOINTS__0__URL`). A
value is YAML, so that a list or a mapping can be given whole; where the schema wants text, it is taken as is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Environment

from msgspec import inspect

from conf.binding import suggestion, unwrap
from conf.errors import Problem
from conf.schema import Config
from conf.tree import Mapping, Node, Origin, Scalar, Sequence, read_yaml

PREFIX = "LLMGW_"
# Address of the admin listener for llmgw-ctl; no key of the configuration.
ADMIN_VARIABLE = "LLMGW_ADMIN"
# Read by bin/boot.py before anything of ours is imported; no key of the configuration either.
COMPILED_VARIABLE = "LLMGW_COMPILED"


class _BadVariableError(Exception):
    """The variable cannot be put in; the text says why. Empty: that was reported."""


def apply_overrides(root: Mapping, environ: Environment[str, str], problems: list[Problem]) -> Mapping:
    """Return `root` with every `LLMGW_` variable of `environ` put in; unknown ones go to `problems`."""
    # Shorter paths first: LLMGW_ENDPOINTS is the list into which LLMGW_ENDPOINTS__0__URL reaches.
    others = (ADMIN_VARIABLE, COMPILED_VARIABLE)
    ours = (name for name in environ if name.startswith(PREFIX) and name not in others)
    names = sorted(ours, key=lambda n: (n.count("__"), n))
    for name in names:
        origin = Origin("environment", None, name)
        parts = name.removeprefix(PREFIX).split("__")
        try:
            changed = _put(root, inspect.type_info(Config), parts, "", environ[name], origin, problems)
        except _BadVariableError as error:
            if str(error):
                problems.append(origin.problem("", str(error)))
        else:
            assert isinstance(changed, Mapping)
            root = changed
    return root


def _put(
    node: Node | None,
    annotated: inspect.Type,
    parts: list[str],
    done: str,
    value: str,
    origin: Origin,
    problems: list[Problem],
) -> Node:
    """Return `node`, or what stands for nothing, with `value` at the path `parts` below it.

    Args:
        done: the part of the variable's name that led here, for messages.
    """
    if not parts:
        return _parse(value, annotated, origin, problems)
    bare = _container(annotated)
    if isinstance(node, Scalar) and node.is_null:
        node = None
    if isinstance(bare, inspect.StructType | inspect.DictType) and isinstance(node, Mapping | None):
        mapping = node or Mapping({}, {}, origin)
        key, child_type = _key(bare, mapping, parts[0], done)
        child = _put(
            mapping.entries.get(key), child_type, parts[1:], f"{done}{parts[0]}__", value, origin, problems
        )
        return mapping.with_entry(key, child, origin)
    if isinstance(bare, inspect.VarTupleType) and isinstance(node, Sequence | None):
        items = node or Sequence((), origin)
        count = len(items.items)
        if not re.fullmatch(r"[0-9]{1,6}", parts[0]) or int(parts[0]) > count:
            raise _BadVariableError(f"{parts[0]} is no index of this list; allowed: 0 to {count}")
        index = int(parts[0])
        old = items.items[index] if index < count else None
        child = _put(old, bare.item_type, parts[1:], f"{done}{parts[0]}__", value, origin, problems)
        return items.with_item(index, child)
    raise _BadVariableError(f"{PREFIX}{done.removesuffix('__')} has no keys below it")


def _container(annotated: inspect.Type) -> inspect.Type:
    bare, _ = unwrap(annotated)
    if isinstance(bare, inspect.UnionType):
        for option in map(lambda t: unwrap(t)[0], bare.types):
            if isinstance(option, inspect.StructType | inspect.DictType):
                return option
    return bare


def _key(
    bare: inspect.StructType | inspect.DictType, mapping: Mapping, part: str, done: str
) -> tuple[str, inspect.Type]:
    if isinstance(bare, inspect.StructType):
        fields = {field.name: field.type for field in bare.fields}
        if part.lower() not in fields:
            names = (f"{PREFIX}{done}{name.upper()}" for name in fields)
            hint = suggestion(f"{PREFIX}{done}{part}".upper(), names)
            raise _BadVariableError(f"unknown variable; {hint}")
        return part.lower(), fields[part.lower()]
    # Names in a mapping are the operator's own, and may hold what a variable's name cannot.
    same = [key for key in mapping.entries if re.sub(r"\W", "_", key).lower() == part.lower()]
    return (same[0] if same else part.lower()), bare.value_type


def _parse(value: str, annotated: inspect.Type, origin: Origin, problems: list[Problem]) -> Node:
    bare, _ = unwrap(annotated)
    options = [unwrap(t)[0] for t in bare.types] if isinstance(bare, inspect.UnionType) else [bare]
    is_text = any(isinstance(option, inspect.StrType | inspect.LiteralType) for option in options)
    if is_text and not any(isinstance(option, inspect.CollectionType) for option in options):
        return Scalar(value, False, origin)
    node = read_yaml(value, origin, problems)
    if node is None:
        raise _BadVariableError
    return node
