"""The page docs/configuration.md, made from the schema by `make docs`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import inspect

from conf.binding import describe, unwrap
from conf.schema import KIND, RESTART, Band, Config
from conf.values import format_duration, format_size

INTRODUCTION = """\
# Configuration

<!-- Made by `make docs` from conf/schema.py; change it there. -->

One YAML file, given by `llmgw-gateway --config FILE`. `llmgw-ctl config check FILE` reads a file as the
gateway would, and reports everything that is wrong with it, each with its line. Start from
[minimal.yaml](../conf/examples/minimal.yaml); [full.yaml](../conf/examples/full.yaml) shows every key.

- **Durations** are `500ms`, `30s`, `5m`, `2h`, `1h30m`, or a number of seconds. **Sizes** are `512KiB`,
  `64MiB`, `10MB`, or a number of bytes.
- **Unknown keys and keys written twice are errors**, so that a slip of the pen is not a setting silently
  lost.
- **Environment variables** override the file: `LLMGW_ROUTER__RETRIES=3` is `router.retries`. `__` goes
  one level down, and a number names an item of a list: `LLMGW_ENDPOINTS__0__API_KEY`. The value is YAML;
  a list or a mapping can be given whole: `LLMGW_MODELS='[{name: chat-model}]'`. An unknown `LLMGW_`
  variable is an error.
- **SIGHUP** makes the gateway read its file again. A file with an error changes nothing, and the log says
  what is wrong. A good one takes effect for the next request; streams under way go on. Keys marked
  **restart** wait for the next start, and the log names them.
"""


def render() -> str:
    """Return the page."""
    return INTRODUCTION + "".join(f"\n{section}" for section in _sections(inspect.type_info(Config), ""))


def _sections(info: inspect.Type, key: str) -> Iterator[str]:
    assert isinstance(info, inspect.StructType)
    rows = []
    inner: list[tuple[str, inspect.StructType]] = []
    for field in info.fields:
        rows.append(_row(field))
        path, struct = _struct_of(field.type, f"{key}.{field.name}" if key else field.name)
        if struct is not None:
            inner.append((path, struct))
    title = f"## `{key}`" if key else "## Top level"
    text = (info.cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    header = "| Key | Value | Default | Meaning |\n|---|---|---|---|\n"
    yield f"{title}\n\n{text}\n\n{header}{''.join(rows)}"
    for path, struct in inner:
        yield from _sections(struct, path)


def _struct_of(annotated: inspect.Type, path: str) -> tuple[str, inspect.StructType | None]:
    """Find the mapping that a value of this type consists of, and the path of its keys."""
    bare, _ = unwrap(annotated)
    match bare:
        case inspect.StructType():
            return path, bare
        case inspect.VarTupleType():
            return _struct_of(bare.item_type, f"{path}[]")
        case inspect.DictType():
            return _struct_of(bare.value_type, f"{path}.<name>")
        case inspect.UnionType():
            found = (_struct_of(option, path) for option in bare.types)
            return next((each for each in found if each[1] is not None), (path, None))
        case _:
            return path, None


def _row(field: inspect.Field) -> str:
    assert isinstance(field.type, inspect.Metadata)
    text = str((field.type.extra_json_schema or {}).get("description", ""))
    bare, extra = unwrap(field.type)
    if extra.get(RESTART):
        text += " **restart**"
    cells = (f"`{field.name}`", describe(field.type) + _range(bare), _default(field, extra.get(KIND)), text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _range(bare: inspect.Type) -> str:
    if not isinstance(bare, inspect.IntType | inspect.FloatType):
        return ""
    if bare.ge is not None and bare.le is not None:
        return f", {bare.ge:g} to {bare.le:g}"
    return ", more than 0" if bare.gt == 0 else ""


def _default(field: inspect.Field, kind: str | None) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    match value:
        case None:
            return "none"
        case msgspec.Struct():
            return "see below"
        case dict():
            pairs = ", ".join(
                f"{k}: {'...' if isinstance(v, msgspec.Struct) else v}" for k, v in value.items()
            )
            return f"`{{{pairs}}}`"
        case tuple():
            names = (item.name if isinstance(item, Band) else str(item) for item in value)
            return f"`[{', '.join(names)}]`"
        case bool():
            return f"`{str(value).lower()}`"
        case float() if kind == "duration":
            return f"`{format_duration(value)}`"
        case int() if kind == "size":
            return f"`{format_size(value)}`"
        case "":
            return "empty"
        case _:
            return f"`{value}`"


if __name__ == "__main__":
    print(render(), end="")
