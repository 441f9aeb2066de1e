"""Read the configuration: file, environment, schema, rules.

The only place that reads the environment. `load` reports everything that is wrong at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Mapping as Environment
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from conf.binding import Binder
from conf.check import Breach, check
from conf.errors import ConfigError, Problem
from conf.overrides import ADMIN_VARIABLE, apply_overrides
from conf.plain import is_wanted, plain_tree
from conf.schema import Config, Router, RoutingProfile, Timeouts
from conf.tree import Mapping, Origin, Scalar, read_yaml

_DECODER = msgspec.msgpack.Decoder(Config)


def load(path: Path | None, environ: Environment[str, str] | None = None) -> Config:
    """Read and check a configuration. Blocks on the file.

    Args:
        path: YAML file; None for a configuration made of the environment alone, see `conf.plain`.
        environ: variables, for overrides too; None for the process's own.

    Raises:
        ConfigError: with every problem, in the order of the file.
    """
    name = str(path) if path is not None else "environment"
    variables = os.environ if environ is None else environ
    problems: list[Problem] = []
    if path is None and is_wanted(variables):
        root = plain_tree(variables, problems)
    else:
        root, problems = _read(path, name)
    root = apply_overrides(root, variables, problems)
    binder = Binder(problems)
    config = _complete(binder.bind(root, Config), binder)
    reported = {problem.key for problem in problems}
    for key, message in (*check(config), *_unreadable_files(config)):
        problem = _origin(binder, key, root.origin).problem(key, message)
        if problem.key not in reported:  # else its value is a stand-in
            problems.append(problem)
    if problems:
        # Breaches of rules were found after the rest; overrides have no line and come last.
        raise ConfigError(sorted(dict.fromkeys(problems), key=lambda p: (p.path != name, p.line or 0)))
    return config


def admin_url(environ: Environment[str, str] | None = None) -> str | None:
    """Return the admin listener that `LLMGW_ADMIN` names for llmgw-ctl; None without it."""
    return (os.environ if environ is None else environ).get(ADMIN_VARIABLE) or None


def encode(config: Config) -> bytes:
    """Pack a configuration for the shared segment (msgpack)."""
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> Config:
    """Unpack what `encode` made.

    Raises:
        msgspec.ValidationError: it was made by another version of the schema.
    """
    return _DECODER.decode(data)


def _read(path: Path | None, name: str) -> tuple[Mapping, list[Problem]]:
    """Read the file as a tree, and what is wrong in it.

    Raises:
        ConfigError: there is nothing in it that could be checked any further.
    """
    origin = Origin(name, None)
    if path is None:
        return Mapping({}, {}, origin), []
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([origin.problem("", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([Origin(name, line).problem("", "is not UTF-8")]) from error
    problems: list[Problem] = []
    tree = read_yaml(text, origin, problems)
    if isinstance(tree, Scalar) and tree.is_null:
        tree = Mapping({}, {}, origin)
    elif tree is not None and not isinstance(tree, Mapping):
        message = "needs a mapping of keys, such as `listen: 127.0.0.1:8080`"
        raise ConfigError([tree.origin.problem("", message)])
    if tree is None:
        raise ConfigError(problems)
    return tree, problems


def _complete(config: Config, binder: Binder) -> Config:
    """Fill in what one part of the configuration takes from another."""
    router = config.router
    if "chat" not in router.profiles:
        profiles = {"chat": RoutingProfile(), **router.profiles}
        router = msgspec.structs.replace(router, profiles=profiles)
    models = tuple(
        msgspec.structs.replace(model, timeouts=_inherit(model.timeouts, router, binder, index))
        for index, model in enumerate(config.models)
    )
    endpoints = tuple(
        endpoint if endpoint.id else msgspec.structs.replace(endpoint, id=urlsplit(endpoint.url).netloc)
        for endpoint in config.endpoints
    )
    return msgspec.structs.replace(config, router=router, models=models, endpoints=endpoints)


def _inherit(own: Timeouts | None, router: Router, binder: Binder, index: int) -> Timeouts | None:
    """Take the deadlines that a model does not name from the router's."""
    if own is None:
        return None
    names = (
        name for name in Timeouts.__struct_fields__ if f"models[{index}].timeouts.{name}" in binder.origins
    )
    return msgspec.structs.replace(router.timeouts, **{name: getattr(own, name) for name in names})


def _origin(binder: Binder, key: str, default: Origin) -> Origin:
    """Find where `key` or the nearest thing around it was written."""
    while key and key not in binder.origins:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return binder.origins.get(key, default)


def _unreadable_files(config: Config) -> Iterator[Breach]:
    for index, endpoint in enumerate(config.endpoints):
        if endpoint.tls is None or not endpoint.tls.ca:
            continue
        try:
            Path(endpoint.tls.ca).open("rb").close()
        except OSError as error:
            yield f"endpoints[{index}].tls.ca", f"cannot be read: {error.strerror}"
