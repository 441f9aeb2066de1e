"""Invariants of reading a configuration."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError, Problem
from conf.load import decode, encode, load
from conf.schema import Config, Endpoint, Model, Router, Timeouts
from conf.values import format_duration, format_size, parse_duration, parse_size

NAMES = st.text(string.ascii_letters + string.digits + "-._", min_size=1, max_size=12)
SECONDS = st.integers(0, 10**6).map(lambda ms: ms / 1000)
TIMEOUTS = st.builds(Timeouts, connect=SECONDS, idle=SECONDS, total=SECONDS)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw a valid configuration."""
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=6))
    split = draw(st.integers(1, len(names)))
    models = [
        Model(
            name=name, aliases=tuple(names[split:]) if i == 0 else (), fallbacks=tuple(names[i + 1 : split])
        )
        for i, name in enumerate(names[:split])
    ]
    ids = draw(
        st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,9}", fullmatch=True), unique=True, max_size=4)
    )
    endpoints = [
        Endpoint(
            id=endpoint_id,
            model=draw(st.sampled_from(names[:split])),
            url=draw(st.sampled_from(["http://10.0.0.1:8000", "https://[::1]", "http://n/engine"])),
            api_key=draw(
                st.none() | st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1)
            ),
            weight=draw(st.floats(0.001, 1000)),
        )
        for endpoint_id in ids
    ]
    return Config(
        workers=draw(st.integers(1, 256)),
        max_body_bytes=draw(st.integers(1, 2**40)),
        drain_timeout=draw(SECONDS),
        auth=msgspec.structs.replace(Config().auth, enabled=False),
        router=Router(retries=draw(st.integers(0, 10)), timeouts=draw(TIMEOUTS)),
        models=tuple(models),
        endpoints=tuple(endpoints),
    )


def load_text(text: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(text)
        return load(path, {})


@given(configs())
def test_a_valid_configuration_survives_yaml_and_the_segment(config: Config) -> None:
    text = yaml.safe_dump(msgspec.to_builtins(config), allow_unicode=True)
    assert load_text(text) == config
    assert decode(encode(config)) == config


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["models", "endpoints", "name", "id", "url", "router", "x"]), inner)
    ),
    max_leaves=12,
)
TOP_LEVEL = st.dictionaries(
    st.sampled_from([*Config.__struct_fields__, "unknown"]), TREES | st.lists(TREES, max_size=3), max_size=6
)


@given(TOP_LEVEL)
def test_whatever_a_file_holds_it_is_used_or_refused_with_a_line(tree: dict[str, object]) -> None:
    text = yaml.safe_dump(tree)
    problems: tuple[Problem, ...] = ()
    try:
        config = load_text(text)
        assert decode(encode(config)) == config
    except ConfigError as error:
        problems = error.problems or (Problem("", None, "", ""),)
    for problem in problems:
        assert 1 <= (problem.line or 0) <= text.count("\n") + 1
        assert problem.message


@given(st.text(max_size=60))
def test_whatever_a_text_holds_nothing_but_a_configuration_error_is_raised(text: str) -> None:
    with pytest.raises(ConfigError):
        load_text(text)


@given(st.integers(0, 10**9))
def test_a_formatted_duration_reads_back(ms: int) -> None:
    assert parse_duration(format_duration(ms / 1000)) == pytest.approx(ms / 1000, rel=1e-6)


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size
