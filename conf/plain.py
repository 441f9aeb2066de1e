"""Plain proxy mode: a configuration made of a few `GATEWAY_` variables, for a gateway without a file.

The variables become the tree that a file would have given, so that they are checked as a file is, and
`LLMGW_` variables override them. What comes out is an ordinary configuration: two bands whose ceilings hold
nobody back, and a pool with a hard cap for each upstream. `Config.plain_proxy` tells the workers to relay
requests as they are; what that means is in gateway.plain.

Empty variables count as unset. Other variables that begin with `GATEWAY_` are none of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Environment
from typing import Final
from urllib.parse import urlsplit

from conf.errors import Problem
from conf.tree import Mapping, Node, Origin, Scalar, Sequence
from conf.values import parse_listen

DEFAULT: Final = "default"
"""Name of the upstream of `/v1/*`: of its endpoint, its pool and its model."""
SYNTHESIS: Final = "synthesis"
"""The same for `/synthesis/v1/*`."""
INTERACTIVE: Final = "interactive"
BACKGROUND: Final = "background"

UPSTREAM_URL: Final = "GATEWAY_UPSTREAM_URL"
UPSTREAM_API_KEY: Final = "GATEWAY_UPSTREAM_API_KEY"
SYNTHESIS_URL: Final = "GATEWAY_SYNTHESIS_UPSTREAM_URL"
SYNTHESIS_API_KEY: Final = "GATEWAY_SYNTHESIS_API_KEY"
MAX_CONCURRENT: Final = "GATEWAY_MAX_CONCURRENT"
SYNTHESIS_MAX_CONCURRENT: Final = "GATEWAY_SYNTHESIS_MAX_CONCURRENT"
QUEUE_TIMEOUT: Final = "GATEWAY_QUEUE_TIMEOUT_S"
LISTEN: Final = "GATEWAY_LISTEN"

# The defaults of the mode; docs/plain-proxy.md has the same table.
DEFAULTS: Final = {
    MAX_CONCURRENT: "16",
    SYNTHESIS_MAX_CONCURRENT: "8",
    QUEUE_TIMEOUT: "120",
    LISTEN: ":8000",
}
_UPSTREAMS: Final = {
    DEFAULT: (UPSTREAM_URL, UPSTREAM_API_KEY),
    SYNTHESIS: (SYNTHESIS_URL, SYNTHESIS_API_KEY),
}
_CAPS: Final = {DEFAULT: MAX_CONCURRENT, SYNTHESIS: SYNTHESIS_MAX_CONCURRENT}
_VARIABLES: Final = (*_UPSTREAMS[DEFAULT], *_UPSTREAMS[SYNTHESIS], *DEFAULTS)

_NO_CEILING = "1000000000"
_NO_LIMIT = "1000000000"
_LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_HERE: Final = _LOOPBACK | {"", "::", "0.0.0.0"}


def is_wanted(environ: Environment[str, str]) -> bool:
    """Whether the environment asks for this mode: it names an upstream."""
    return any(environ.get(name, "").strip() for name in (UPSTREAM_URL, SYNTHESIS_URL))


def plain_tree(environ: Environment[str, str], problems: list[Problem]) -> Mapping:
    """Return the configuration that the variables stand for, as a tree.

    Args:
        environ: variables.
        problems: what is wrong with them is appended; what the schema can tell is not looked for here.
    """
    given = _Variables(environ)
    problems += _breaches(given)
    names = [DEFAULT, SYNTHESIS] if given.has(SYNTHESIS_URL) else [DEFAULT]
    plan = {
        "plain_proxy": "true",
        "listen": given.scalar(LISTEN),
        "auth": {"enabled": "false"},
        "router": {
            "retries": "0",
            "inject_usage": "false",
            "response_model": "served",
            "admission": {
                "bands": [
                    {"name": INTERACTIVE, "priority": "200", "saturation_ceiling": _NO_CEILING},
                    {"name": BACKGROUND, "priority": "100", "saturation_ceiling": _NO_CEILING},
                ],
                "default_band": INTERACTIVE,
                "queue_ttl": given.scalar(QUEUE_TIMEOUT),
                "queue_capacity_per_band": _NO_LIMIT,
                "queue_capacity": _NO_LIMIT,
            },
        },
        "pools": {name: {"max_concurrent": given.scalar(_CAPS[name])} for name in names},
        "models": [{"name": name} for name in names],
        "endpoints": [_endpoint(given, name) for name in names],
    }
    tree = _node(plan)
    assert isinstance(tree, Mapping)
    return tree


class _Variables:
    """The variables of the mode, with their defaults."""

    def __init__(self, environ: Environment[str, str]) -> None:
        self._texts = {name: environ.get(name, "").strip() or DEFAULTS.get(name, "") for name in _VARIABLES}

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def has(self, name: str) -> bool:
        return bool(self._texts[name])

    def scalar(self, name: str) -> Scalar:
        """Return its value for the tree; complaints about it will name the variable."""
        return Scalar(self._texts[name], True, _origin(name))


def _endpoint(given: _Variables, name: str) -> dict[str, object]:
    # An upstream is asked for nothing but what clients ask it for: it may be anybody's API.
    keys: dict[str, object] = {"id": name, "pool": name, "model": name, "probe": "false"}
    url, api_key = _UPSTREAMS[name]
    keys["url"] = given.scalar(url)
    if given.has(api_key):
        keys["api_key"] = given.scalar(api_key)
    return keys


def _breaches(given: _Variables) -> list[Problem]:
    """What the schema cannot tell of this mode's variables."""
    found = []
    for name in (UPSTREAM_URL, SYNTHESIS_URL):
        if given.has(name) and _is_own_address(given[name], given[LISTEN]):
            found.append(_origin(name).problem("", f"is this gateway's own address, see {LISTEN}"))
    for name in (UPSTREAM_API_KEY, SYNTHESIS_API_KEY):
        if not re.fullmatch(r"[\x21-\x7e]*", given[name]):
            found.append(_origin(name).problem("", "contains what cannot stand in a header"))
    return found


def _is_own_address(url: str, listen: str) -> bool:
    try:
        own, parts = parse_listen(listen), urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return False  # reported by the schema
    return own.port == port and parts.hostname in _LOOPBACK and own.host in _HERE


def _origin(variable: str) -> Origin:
    return Origin("environment", None, variable)


def _node(plan: object) -> Node:
    """Make a tree of nodes of a tree of texts."""
    origin = _origin(UPSTREAM_URL)
    if isinstance(plan, dict):
        entries = {key: _node(value) for key, value in plan.items()}
        return Mapping(entries, dict.fromkeys(entries, origin), origin)
    if isinstance(plan, list):
        return Sequence(tuple(map(_node, plan)), origin)
    if isinstance(plan, Scalar):
        return plan
    assert isinstance(plan, str)
    return Scalar(plan, True, origin)
