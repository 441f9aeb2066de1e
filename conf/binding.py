"""Bind a tree to the schema: check every value, and report everything that is wrong.

Rules:
    - One pass finds all problems. A bad value is replaced by its default (a required text by `""`), so that
      the rest, and the rules of `conf.check`, can still be looked at.
    - The result can be used only where no problem was found.
    - The schema is read through `msgspec.inspect`; this module names no key.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from conf.errors import Problem
from conf.schema import KIND
from conf.tree import Mapping, Node, Origin, Scalar, Sequence
from conf.values import parse_duration, parse_endpoint_url, parse_listen, parse_redis_url, parse_size

S = TypeVar("S", bound=msgspec.Struct)

_INTEGER = re.compile(r"[+-]?[0-9][0-9_]*", re.ASCII)
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _BadValueError(Exception):
    """The value was reported; the caller puts the default in its place."""


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """Say which of `allowed` was probably meant by `name`, and what all of them are."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    meant = f'did you mean "{close[0]}"? ' if close else ""
    return f"{meant}allowed: {', '.join(allowed) or 'none'}"


def unwrap(annotated: inspect.Type) -> tuple[inspect.Type, dict[str, Any]]:
    """Split a type into itself and its `Meta.extra`."""
    if isinstance(annotated, inspect.Metadata):
        return annotated.type, annotated.extra or {}
    return annotated, {}


def describe(annotated: inspect.Type) -> str:
    """Name a type for people: what a value of it must be."""
    bare, extra = unwrap(annotated)
    if extra.get(KIND):
        return {"listen": "address", "url": "URL", "redis_url": "URL"}.get(extra[KIND], str(extra[KIND]))
    match bare:
        case inspect.StructType() | inspect.DictType():
            return "mapping"
        case inspect.CollectionType():
            return f"list of {describe(bare.item_type)}s"
        case inspect.UnionType():
            return " or ".join(describe(t) for t in bare.types if not isinstance(t, inspect.NoneType))
        case inspect.LiteralType():
            return " or ".join(f"`{value}`" for value in bare.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "whole number"
        case inspect.FloatType():
            return "number"
        case _:
            return "text"


class Binder:
    """Turns trees into structs of the schema.

    Attributes:
        problems: everything found, in the order of the tree.
        origins: dotted key -> where its value was written; only keys that were written.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.origins: dict[str, Origin] = {}

    def bind(self, node: Node, cls: type[S], key: str = "") -> S:
        """Return `cls` filled from `node`; never raises, see `problems`."""
        info = inspect.type_info(cls)
        assert isinstance(info, inspect.StructType)
        try:
            return self._struct(node, info, key)  # type: ignore[no-any-return]
        except _BadValueError:
            return _placeholder(info)  # type: ignore[no-any-return]

    def _bad(self, node: Node, key: str, message: str) -> _BadValueError:
        self.problems.append(node.origin.problem(key, message))
        return _BadValueError()

    def _value(self, node: Node, annotated: inspect.Type, key: str) -> Any:
        self.origins[key] = node.origin
        bare, extra = unwrap(annotated)
        match bare:
            case inspect.StructType():
                return self._struct(node, bare, key)
            case inspect.DictType():
                return self._dict(node, bare, key)
            case inspect.VarTupleType():
                return self._tuple(node, bare, key)
            case inspect.UnionType():
                return self._union(node, bare, key)
        if not isinstance(node, Scalar):
            raise self._bad(node, key, f"needs {_article(describe(annotated))}, not {_kind_of(node)}")
        if node.is_null:
            raise self._bad(node, key, f"is empty; it needs {_article(describe(annotated))}")
        try:
            return _scalar(node, bare, extra.get(KIND))
        except ValueError as error:
            raise self._bad(node, key, str(error)) from None

    def _struct(self, node: Node, info: inspect.StructType, key: str) -> Any:
        if isinstance(node, Scalar) and node.is_null:
            node = Mapping({}, {}, node.origin)
        if not isinstance(node, Mapping):
            raise self._bad(node, key, f"needs a mapping, not {_kind_of(node)}")
        fields = {field.name: field for field in info.fields}
        values: dict[str, Any] = {}
        for name, child in node.entries.items():
            path = f"{key}.{name}" if key else name
            if name not in fields:
                hint = suggestion(name, fields)
                self.problems.append(node.key_origins[name].problem(path, f"unknown key; {hint}"))
                continue
            try:
                values[name] = self._value(child, fields[name].type, path)
            except _BadValueError:
                if fields[name].required:
                    values[name] = ""
        for name, field in fields.items():
            if field.required and name not in node.entries:
                self.problems.append(node.origin.problem(f"{key}.{name}", "is missing"))
                values[name] = ""
        return info.cls(**values)

    def _dict(self, node: Node, info: inspect.DictType, key: str) -> dict[str, Any]:
        if isinstance(node, Scalar) and node.is_null:
            return {}
        if not isinstance(node, Mapping):
            raise self._bad(node, key, f"needs a mapping, not {_kind_of(node)}")
        values = {}
        for name, child in node.entries.items():
            try:
                values[name] = self._value(child, info.value_type, f"{key}.{name}")
            except _BadValueError:
                continue
        return values

    def _tuple(self, node: Node, info: inspect.VarTupleType, key: str) -> tuple[Any, ...]:
        if isinstance(node, Scalar) and node.is_null:
            return ()
        if not isinstance(node, Sequence):
            raise self._bad(node, key, f"needs a list such as [a, b], not {_kind_of(node)}")
        items = []
        for index, child in enumerate(node.items):
            try:
                items.append(self._value(child, info.item_type, f"{key}[{index}]"))
            except _BadValueError:
                items.append(_placeholder(info.item_type))  # keeps the places of the others
        return tuple(items)

    def _union(self, node: Node, info: inspect.UnionType, key: str) -> Any:
        types = [t for t in info.types if not isinstance(t, inspect.NoneType)]
        if isinstance(node, Scalar) and node.is_null and len(types) < len(info.types):
            return None
        for option in types:
            if isinstance(node, Sequence) == isinstance(unwrap(option)[0], inspect.CollectionType):
                return self._value(node, option, key)
        return self._value(node, types[0], key)


def _placeholder(annotated: inspect.Type) -> Any:
    bare, _ = unwrap(annotated)
    if isinstance(bare, inspect.StructType):
        return bare.cls(**{field.name: "" for field in bare.fields if field.required})
    return ""


def _kind_of(node: Node) -> str:
    match node:
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case Scalar():
            return "a single value"


def _article(words: str) -> str:
    return words if words.startswith(("`", "text", "true")) else f"a {words}"


def _scalar(node: Scalar, bare: inspect.Type, kind: str | None) -> str | int | float | bool:
    """Read the text of a scalar as the schema wants it.

    Raises:
        ValueError: with what is allowed. Texts are never quoted back: one may be a key in the wrong place.
    """
    number: float
    match bare:
        case inspect.StrType():
            return _text(node.text, bare, kind)
        case inspect.LiteralType():
            if node.text not in bare.values:
                raise ValueError(suggestion(node.text, map(str, bare.values)))
            return node.text
        case inspect.BoolType():
            value = _BOOLEANS.get(node.text.lower()) if node.plain else None
            if value is None:
                raise ValueError("needs true or false")
            return value
        case inspect.IntType():
            if kind != "size" and not (node.plain and _INTEGER.fullmatch(node.text)):
                raise ValueError(f"needs a whole number{_range(bare)}")
            number = parse_size(node.text) if kind == "size" else int(node.text)
        case inspect.FloatType():
            number = parse_duration(node.text) if kind == "duration" else _number(node, bare)
        case _:
            raise TypeError(f"the schema has a type that no file can hold: {bare}")
    _check_range(number, bare)
    return number


def _number(node: Scalar, bare: inspect.FloatType) -> float:
    try:
        number = float(node.text) if node.plain else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"needs a number{_range(bare)}")
    return number


def _text(text: str, bare: inspect.StrType, kind: str | None) -> str:
    if len(text) < (bare.min_length or 0):
        raise ValueError("must not be empty")
    if bare.pattern is not None and not re.search(bare.pattern, text):
        raise ValueError(f"must match {bare.pattern}")
    parsers: dict[str | None, Callable[[str], object]] = {
        "listen": parse_listen,
        "url": parse_endpoint_url,
        "redis_url": parse_redis_url,
    }
    if kind in parsers:
        parsed = parsers[kind](text)
        return parsed if isinstance(parsed, str) else text
    return text


def _range(bare: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(bare.ge, "at least"), (bare.gt, "more than"), (bare.le, "at most"), (bare.lt, "less than")]
    words = [f"{word} {bound:g}" for bound, word in bounds if bound is not None]
    return f" ({' and '.join(words)})" if words else ""


def _check_range(number: float, bare: inspect.IntType | inspect.FloatType) -> None:
    too_small = (bare.ge is not None and number < bare.ge) or (bare.gt is not None and number <= bare.gt)
    too_large = (bare.le is not None and number > bare.le) or (bare.lt is not None and number >= bare.lt)
    if too_small or too_large:
        raise ValueError(f"{number:g} is out of range{_range(bare)}")
    if abs(number) >= 2**63:
        raise ValueError("is too large")
