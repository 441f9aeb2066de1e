"""What a reload changes, and what of it waits for a restart. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from conf.binding import unwrap
from conf.schema import RESTART, Config


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """The difference between two configurations.

    Attributes:
        changed: dotted keys whose values differ, sorted; items of lists by their name or id:
            `router.retries`, `endpoints[node1-a].url`, `models[chat]` (new or gone).
        needs_restart: those of `changed` that running processes cannot take over.
    """

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def diff(old: Config, new: Config) -> ReloadPlan:
    """Compare two configurations."""
    changed = tuple(sorted(_changes("", old, new)))
    fixed = restart_keys()
    restart = tuple(key for key in changed if any(_is_within(key, each) for each in fixed))
    return ReloadPlan(changed, restart)


def restart_keys() -> frozenset[str]:
    """Return the dotted keys that need a restart, as the schema marks them; what is below a key does too."""
    return frozenset(_restart_keys(msgspec.inspect.type_info(Config), ""))


def _restart_keys(info: msgspec.inspect.Type, prefix: str) -> Iterator[str]:
    if not isinstance(info, msgspec.inspect.StructType):
        return
    for field in info.fields:
        bare, extra = unwrap(field.type)
        if extra.get(RESTART):
            yield f"{prefix}{field.name}"
        else:
            yield from _restart_keys(bare, f"{prefix}{field.name}.")


def _is_within(key: str, outer: str) -> bool:
    return key == outer or (key.startswith(outer) and key[len(outer)] in ".[")


def _changes(key: str, old: Any, new: Any) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
        for name in old.__struct_fields__:
            yield from _changes(f"{key}.{name}" if key else name, getattr(old, name), getattr(new, name))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from _member(f"{key}.{name}", old.get(name), new.get(name))
    elif (old_items := _by_name(old)) is not None and (new_items := _by_name(new)) is not None:
        names = {**old_items, **new_items}
        for name in names:
            yield from _member(f"{key}[{name}]", old_items.get(name), new_items.get(name))
        if old_items.keys() == new_items.keys() and list(old_items) != list(new_items):
            yield key  # the order alone
    else:
        yield key


def _member(key: str, old: Any, new: Any) -> Iterator[str]:
    if old is None or new is None:
        yield key
    else:
        yield from _changes(key, old, new)


def _by_name(items: Any) -> dict[str, msgspec.Struct] | None:
    """Index a list of models or endpoints; None for any other value."""
    if not isinstance(items, tuple) or not all(isinstance(item, msgspec.Struct) for item in items):
        return None
    return {str(getattr(item, "id", None) or getattr(item, "name", "")): item for item in items}
