"""Rules of a configuration that no single key can tell.

Pure. Every rule yields `(key, message)` for all of its breaches; an empty text stands for a value that was
already reported, and is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from conf.binding import suggestion
from conf.plain import BACKGROUND, DEFAULT, INTERACTIVE, UPSTREAM_URL
from conf.schema import ENDPOINT_ID, ENGINES, FILTERS, MAX_BANDS, METRIC_FIELDS, SCORERS, Config, Model
from conf.values import ListenAddress, check_metric_place, parse_listen

Breach: TypeAlias = tuple[str, str]

# An instance that is silent for two seconds is taken for dead (coordinator.core.peer_rows).
MIN_EXCHANGE_S, MAX_EXCHANGE_S = 0.01, 0.5


def check(config: Config) -> Iterator[Breach]:
    """Yield every breach of a rule as a dotted key and a message."""
    yield from _auth(config)
    yield from _plain_proxy(config)
    yield from _listeners(config)
    yield from _positive_durations(config)
    yield from _admission(config)
    yield from _pools(config)
    yield from _redis(config)
    yield from _profiles(config)
    yield from _metrics(config)
    yield from _models(config)
    yield from _fallbacks(config)
    yield from _endpoints(config)


def _auth(config: Config) -> Iterator[Breach]:
    if config.auth.enabled:
        yield "auth.enabled", "keys are not available in this version; set auth.enabled: false"


def _plain_proxy(config: Config) -> Iterator[Breach]:
    bands = {band.name for band in config.router.admission.bands}
    models = {model.name for model in config.models}
    if config.plain_proxy and not ({INTERACTIVE, BACKGROUND} <= bands and DEFAULT in models):
        yield "plain_proxy", f"is not for files; give none, and set {UPSTREAM_URL}"


def _listeners(config: Config) -> Iterator[Breach]:
    try:
        client, admin = parse_listen(config.listen), parse_listen(config.admin_listen)
    except ValueError:
        return  # reported where it was read
    if client.port and client.port == admin.port and _overlap(client, admin):
        yield "admin_listen", f"port {admin.port} is taken by listen; each needs its own"


def _overlap(one: ListenAddress, other: ListenAddress) -> bool:
    return one.host == other.host or any(a.host in ("", "::", "0.0.0.0") for a in (one, other))


def _positive_durations(config: Config) -> Iterator[Breach]:
    router, client = config.router, config.client
    durations = {
        "client.header": client.header,
        "client.body": client.body,
        "client.write": client.write,
        "router.scrape_interval": router.scrape_interval,
        "router.stream_ping.interval": router.stream_ping.interval,
        "router.admission.queue_ttl": router.admission.queue_ttl,
    }
    for key, seconds in durations.items():
        if seconds <= 0:
            yield key, "must be more than 0"


def _admission(config: Config) -> Iterator[Breach]:
    admission = config.router.admission
    key = "router.admission.bands"
    if not 1 <= len(admission.bands) <= MAX_BANDS:
        yield key, f"needs 1 to {MAX_BANDS} bands"
    names: dict[str, int] = {}
    priorities: dict[int, int] = {}
    for index, band in enumerate(admission.bands):
        if band.name and band.name in names:
            yield f"{key}[{index}].name", f'"{band.name}" is already the name of bands[{names[band.name]}]'
        names.setdefault(band.name, index)
        if band.priority in priorities:
            first = priorities[band.priority]
            yield f"{key}[{index}].priority", f"{band.priority} is already the priority of bands[{first}]"
        priorities.setdefault(band.priority, index)
    # What cannot be ranked was reported where it was read.
    ranked = [
        (band.priority, band.saturation_ceiling, index)
        for index, band in enumerate(admission.bands)
        if isinstance(band.priority, int) and isinstance(band.saturation_ceiling, float)
    ]
    for (_, ceiling, upper), (_, lower_ceiling, index) in pairwise(sorted(ranked, reverse=True)):
        if lower_ceiling > ceiling:
            over = admission.bands[upper].name
            yield (
                f"{key}[{index}].saturation_ceiling",
                f'{lower_ceiling:g} is above the ceiling of "{over}", {ceiling:g}, which has more priority',
            )
    if admission.bands and "" not in names and admission.default_band not in names:
        yield "router.admission.default_band", f"unknown band; {suggestion(admission.default_band, names)}"
    if admission.queue_capacity < admission.queue_capacity_per_band:
        per_band = admission.queue_capacity_per_band
        yield "router.admission.queue_capacity", f"is less than queue_capacity_per_band, {per_band}"


def _pools(config: Config) -> Iterator[Breach]:
    used = {endpoint.pool for endpoint in config.endpoints if endpoint.pool}
    for name in config.pools:
        if name not in used:
            yield f"pools.{name}", f"no endpoint names this pool; {suggestion(name, used)}"


def _redis(config: Config) -> Iterator[Breach]:
    redis = config.redis
    if redis.tls and not (redis.url or "").lower().startswith("rediss:"):
        yield "redis.tls", "is only for a rediss:// url"
    if redis.password is not None and redis.url is None:
        yield "redis.password", "is only used with redis.url"
    if not MIN_EXCHANGE_S <= redis.exchange_interval <= MAX_EXCHANGE_S:
        yield "redis.exchange_interval", "must be between 10ms and 500ms"


def _profiles(config: Config) -> Iterator[Breach]:
    router = config.router
    if router.default_profile not in router.profiles:
        yield (
            "router.default_profile",
            f"unknown profile; {suggestion(router.default_profile, router.profiles)}",
        )
    for name, profile in router.profiles.items():
        key = f"router.profiles.{name}"
        for scorer in profile.scorers:
            if scorer not in SCORERS:
                yield f"{key}.scorers.{scorer}", f"unknown scorer; {suggestion(scorer, SCORERS)}"
        for index, filter_name in enumerate(profile.filters):
            if filter_name and filter_name not in FILTERS:
                yield f"{key}.filters[{index}]", f"unknown filter; {suggestion(filter_name, FILTERS)}"


def _metrics(config: Config) -> Iterator[Breach]:
    for engine, mapping in config.router.metrics.items():
        if engine not in ENGINES:
            yield f"router.metrics.{engine}", f"unknown engine; {suggestion(engine, ENGINES)}"
        for field, places in mapping.items():
            key = f"router.metrics.{engine}.{field}"
            if field not in METRIC_FIELDS:
                yield key, f"unknown contract field; {suggestion(field, METRIC_FIELDS)}"
            for index, place in enumerate((places,) if isinstance(places, str) else places):
                try:
                    check_metric_place(place)
                except ValueError as error:
                    yield key if isinstance(places, str) else f"{key}[{index}]", str(error)


def _models(config: Config) -> Iterator[Breach]:
    names: dict[str, int] = {}
    for index, model in enumerate(config.models):
        if model.name and model.name in names:
            first = names[model.name]
            yield f"models[{index}].name", f'"{model.name}" is already the name of models[{first}]'
        names.setdefault(model.name, index)
    owners: dict[str, str] = {}
    for index, model in enumerate(config.models):
        for place, alias in enumerate(model.aliases):
            key = f"models[{index}].aliases[{place}]"
            if alias and alias in names:
                yield key, f'"{alias}" is the name of a model, which the alias would shadow'
            elif alias and alias in owners:
                yield key, f'"{alias}" is already an alias ({owners[alias]})'
            owners.setdefault(alias, key)
        profile = model.routing_profile
        if profile and profile not in config.router.profiles:
            hint = suggestion(profile, config.router.profiles)
            yield f"models[{index}].routing_profile", f"unknown profile; {hint}"


def _fallbacks(config: Config) -> Iterator[Breach]:
    by_name = {model.name: model for model in config.models}
    for index, model in enumerate(config.models):
        for place, name in enumerate(model.fallbacks):
            key = f"models[{index}].fallbacks[{place}]"
            if not name:
                continue
            if name == model.name:
                yield key, "a model cannot be its own fallback"
            elif name not in by_name:
                yield key, _unknown_model(name, config)
            elif path := _path(by_name, name, model.name):
                yield key, f"the fallbacks run in a circle: {' -> '.join((model.name, *path))}"


def _path(by_name: dict[str, Model], start: str, goal: str) -> list[str]:
    """Return the names from `start` to `goal` along the fallbacks; empty where there is no way."""
    came_from: dict[str, str] = {start: ""}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name == goal:
            path = [name]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        for following in by_name[name].fallbacks:
            # A model that falls back to itself is a breach of its own.
            if following in by_name and following not in came_from:
                came_from[following] = name
                waiting.append(following)
    return []


def _unknown_model(name: str, config: Config) -> str:
    for model in config.models:
        if name in model.aliases:
            return f'"{name}" is an alias; name the model itself, "{model.name}"'
    return f'unknown model "{name}"; {suggestion(name, (m.name for m in config.models if m.name))}'


def _endpoints(config: Config) -> Iterator[Breach]:
    models = {model.name for model in config.models}
    ids: dict[str, int] = {}
    for index, endpoint in enumerate(config.endpoints):
        key = f"endpoints[{index}]"
        if endpoint.id and endpoint.id in ids:
            yield f"{key}.id", f'"{endpoint.id}" is already the id of endpoints[{ids[endpoint.id]}]'
        ids.setdefault(endpoint.id, index)
        if endpoint.id and not re.search(ENDPOINT_ID, endpoint.id):
            yield f"{key}.id", "is missing, and host and port of the url do not make a name; give it one"
        if endpoint.model and endpoint.model not in models:
            yield f"{key}.model", _unknown_model(endpoint.model, config)
        if endpoint.tls and endpoint.url and not endpoint.url.lower().startswith("https:"):
            yield f"{key}.tls", "is only for an https:// url"
