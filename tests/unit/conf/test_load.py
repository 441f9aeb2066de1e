"""Reading a configuration: every kind of error says file, line, key and what is allowed."""
# ruff: noqa: E501  one row a kind of error

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from conf.errors import ConfigError, Problem
from conf.load import decode, encode, load
from conf.schema import Config, Endpoint, Model, Pool, RoutingProfile

BASE = """\
auth: {enabled: false}
models:
  - {name: chat-model, aliases: [gpt]}
endpoints:
  - {id: a, model: chat-model, url: http://127.0.0.1:9001}
"""

BANDS = """\
router:
  admission:
    default_band: live
    bands:
      - {name: live, priority: 2, saturation_ceiling: 1.0}
      - {name: bulk, priority: 1, saturation_ceiling: 0.5}
"""


def read(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "llmgw.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return load(path, environ)


def problems(tmp_path: Path, text: str, **environ: str) -> list[str]:
    """Return the problems of `text`, without the folder."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text, **environ)
    lines = str(error.value).split("\n")
    assert lines == [str(p) for p in error.value.problems]
    return [line.removeprefix(f"{tmp_path}/") for line in lines]


def test_the_smallest_file_takes_every_default_from_the_schema(tmp_path: Path) -> None:
    config = read(tmp_path, "auth: {enabled: false}")
    assert config == msgspec.structs.replace(Config(), auth=config.auth)


@pytest.mark.parametrize("name", ["minimal.yaml", "full.yaml"])
def test_the_examples_are_valid(name: str) -> None:
    example = files("conf") / "examples" / name
    assert load(Path(str(example)), {}).endpoints


def test_the_full_example_names_every_key() -> None:
    text = (files("conf") / "examples" / "full.yaml").read_text()

    def names(info: msgspec.inspect.Type) -> set[str]:
        match info:
            case msgspec.inspect.Metadata():
                return names(info.type)
            case msgspec.inspect.StructType():
                return {f.name for f in info.fields}.union(*(names(f.type) for f in info.fields))
            case msgspec.inspect.VarTupleType():
                return names(info.item_type)
            case msgspec.inspect.DictType():
                return names(info.value_type)
            case msgspec.inspect.UnionType():
                return set().union(*map(names, info.types))
            case _:
                return set()

    assert {name for name in names(msgspec.inspect.type_info(Config)) if f"{name}:" not in text} == set()


def test_values_keep_their_spelling_until_the_schema_reads_them(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """\
auth: {enabled: no}
max_body_bytes: 1MiB
drain_timeout: 1m30s
router:
  stream_ping: {mode: off}
  cooldown_seconds: 7
  profiles: {night: {scorers: {queue: 2}}}
models:
  - {name: 0123, aliases: [yes, 2024-01-01, 1:30]}
endpoints:
  - {id: 7, model: 0123, url: http://a:1/, weight: 2, api_key: 12345}
""",
    )
    assert config.max_body_bytes == 2**20
    assert config.drain_timeout == 90.0
    assert config.router.stream_ping.mode == "off"
    assert config.router.cooldown_seconds == 7.0
    assert config.models == (Model(name="0123", aliases=("yes", "2024-01-01", "1:30")),)
    assert config.endpoints == (
        Endpoint(id="7", model="0123", url="http://a:1", weight=2.0, api_key="12345"),
    )
    assert config.router.profiles == {
        "chat": RoutingProfile(),
        "night": RoutingProfile(scorers={"queue": 2.0}),
    }


def test_bands_rank_by_priority_wherever_they_stand(tmp_path: Path) -> None:
    text = """\
auth: {enabled: false}
router:
  admission:
    default_band: probe
    bands:
      - {name: bulk, priority: -5, saturation_ceiling: 0.5}
      - {name: probe, priority: 9, saturation_ceiling: 1000}
      - {name: live, priority: 3, saturation_ceiling: 0.5}
"""
    bands = read(tmp_path, text).router.admission.bands_by_rank
    assert [band.name for band in bands] == ["probe", "live", "bulk"]


def test_the_bands_of_the_schema_are_those_of_the_plan(tmp_path: Path) -> None:
    bands = read(tmp_path, BASE).router.admission.bands_by_rank
    assert [(band.name, band.priority, band.saturation_ceiling) for band in bands] == [
        ("platinum", 400, 1.0),
        ("gold", 300, 0.85),
        ("silver", 200, 0.6),
        ("bronze", 100, 0.3),
    ]


def test_a_pool_may_say_none_where_it_wants_no_figure_of_its_own(tmp_path: Path) -> None:
    text = BASE + "pools: {default: {max_concurrent: null, kv_ceiling: ~, stuck_after: 5m}}\n"
    assert read(tmp_path, text).pools == {"default": Pool(stuck_after=300.0)}


def test_a_model_takes_the_deadlines_it_does_not_name_from_the_router(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """\
auth: {enabled: false}
router: {timeouts: {idle: 7s, total: 9s}}
models: [{name: a, timeouts: {total: 20m}}, {name: b}]
""",
    )
    own = config.models[0].timeouts
    assert own is not None
    assert (own.idle, own.total) == (7.0, 1200.0)
    assert config.models[1].timeouts is None


def test_anchors_aliases_and_merge_keys_work(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """\
auth: {enabled: false}
models: [{name: m}]
endpoints:
  - &first {id: a, model: m, url: http://a:1, pool: p}
  - {<<: *first, id: b, url: http://b:1}
""",
    )
    assert [(e.id, e.url, e.pool) for e in config.endpoints] == [
        ("a", "http://a:1", "p"),
        ("b", "http://b:1", "p"),
    ]


# One row a kind of error: text, and the problem it must give.
BAD_FILES = {
    "no-yaml": ("listen: [\n", "llmgw.yaml:2: is not valid YAML: "),
    "tab": ("a:\n\t- b\n", "llmgw.yaml:2: is not valid YAML: "),
    "control-character": ("auth: {enabled: false}\ninstance: \x01\n", "llmgw.yaml:2: is not valid YAML: character"),
    "not-utf-8": ("auth: {}\ninstance: \udcff\n", "llmgw.yaml:2: is not UTF-8"),
    "no-mapping": ("- a\n", "llmgw.yaml:1: needs a mapping of keys"),
    "two-documents": ("auth: {enabled: false}\n---\na: b\n", "llmgw.yaml:2: is not valid YAML: expected a single"),
    "python-tag": (BASE + "instance: !!python/name:os.system x\n", "llmgw.yaml:6: the YAML tag"),
    "recursion": (BASE + "log: &x {level: *x}\n", "llmgw.yaml:6: is not valid YAML: an anchor contains itself"),
    "deep": ("[" * 5000, "llmgw.yaml: is nested too deeply"),
    "key-twice": (BASE + "workers: 1\nworkers: 2\n", "llmgw.yaml:7: workers: is written twice; the first is in line 6"),
    "key-no-name": (BASE + "[a]: 2\n", "llmgw.yaml:6: a key must be a name"),
    "bad-merge": (BASE + "log: {<<: 3}\n", "llmgw.yaml:6: <<: needs a mapping"),
    "unknown-key": (BASE + "wrokers: 1\n", 'llmgw.yaml:6: wrokers: unknown key; did you mean "workers"? allowed: admin_'),
    "unknown-nested-key": (
        BASE + "router:\n  timeouts:\n    idel: 1s\n",
        'llmgw.yaml:8: router.timeouts.idel: unknown key; did you mean "idle"? allowed: connect, ',
    ),
    "no-near-key": (BASE + "zzz: 1\n", "llmgw.yaml:6: zzz: unknown key; allowed: admin_listen, "),
    "int": (BASE + "workers: many\n", "llmgw.yaml:6: workers: needs a whole number (at least 1 and at most 256)"),
    "int-quoted": (BASE + 'workers: "2"\n', "llmgw.yaml:6: workers: needs a whole number"),
    "int-fraction": (BASE + "workers: 1.5\n", "llmgw.yaml:6: workers: needs a whole number"),
    "int-range": (BASE + "workers: 0\n", "llmgw.yaml:6: workers: 0 is out of range (at least 1 and at most 256)"),
    "int-huge": (BASE + f"max_connections: {2**63}\n", "llmgw.yaml:6: max_connections: is too large"),
    "empty": (BASE + "workers:\n", "llmgw.yaml:6: workers: is empty; it needs a whole number"),
    "list-for-value": (BASE + "workers: [1]\n", "llmgw.yaml:6: workers: needs a whole number, not a list"),
    "value-for-mapping": (BASE + "router: fast\n", "llmgw.yaml:6: router: needs a mapping, not a single value"),
    "value-for-list": ("auth: {enabled: false}\nmodels: a\n", "llmgw.yaml:2: models: needs a list"),
    "list-for-names": (BASE + "router:\n  profiles: [a]\n", "llmgw.yaml:7: router.profiles: needs a mapping, not a list"),
    "value-for-item": ("auth: {enabled: false}\nmodels: [a]\n", "llmgw.yaml:2: models[0]: needs a mapping"),
    "bool": ("auth: {enabled: 1}\n", "llmgw.yaml:1: auth.enabled: needs true or false"),
    "bool-quoted": ('auth: {enabled: "false"}\n', "llmgw.yaml:1: auth.enabled: needs true or false"),
    "choice": (BASE + "log: {level: warn}\n", 'llmgw.yaml:6: log.level: did you mean "warning"? allowed: debug, error, info, warning'),
    "duration": (BASE + "drain_timeout: soon\n", "llmgw.yaml:6: drain_timeout: needs a duration such as 500ms"),
    "duration-zero": (BASE + "router: {scrape_interval: 0}\n", "llmgw.yaml:6: router.scrape_interval: must be more than 0"),
    "size": (BASE + "max_body_bytes: 64M\n", "llmgw.yaml:6: max_body_bytes: needs a size such as"),
    "number": (BASE.replace("9001}", "9001, weight: heavy}"), "llmgw.yaml:5: endpoints[0].weight: needs a number (more than 0)"),
    "number-nan": (BASE.replace("9001}", "9001, weight: nan}"), "llmgw.yaml:5: endpoints[0].weight: needs a number"),
    "listen": (BASE + "listen: 8080\n", "llmgw.yaml:6: listen: needs an address such as"),
    "same-port": (BASE + "listen: :80\nadmin_listen: 127.0.0.1:80\n", "llmgw.yaml:7: admin_listen: port 80 is taken by listen"),
    "auth": ("workers: 1\n", "llmgw.yaml:1: auth.enabled: keys are not available in this version; set auth.enabled: false"),
    "auth-on": ("workers: 1\nauth:\n  enabled: true\n", "llmgw.yaml:3: auth.enabled: keys are not available"),
    "url": (BASE.replace("9001", "9001/v1"), "llmgw.yaml:5: endpoints[0].url: ends in /v1"),
    "missing": (BASE.replace("model: chat-model, url", "url"), "llmgw.yaml:5: endpoints[0].model: is missing"),
    "no_id_can_be_made": (
        BASE.replace("id: a, ", "").replace("127.0.0.1:9001", "höst:9001"),
        "llmgw.yaml:5: endpoints[0].id: is missing, and host and port of the url do not make a name",
    ),
    "id": (BASE.replace("id: a", "id: 'a b'"), "llmgw.yaml:5: endpoints[0].id: must match"),
    "engine": (BASE.replace("9001}", "9001, engine: vlm}"), 'llmgw.yaml:5: endpoints[0].engine: did you mean "vllm"? allowed: llamacpp, sglang, sim, vllm'),
    "endpoint-twice": (BASE + "  - {id: a, model: chat-model, url: http://a:1}\n", 'llmgw.yaml:6: endpoints[1].id: "a" is already the id of endpoints[0]'),
    "endpoint-model": (BASE.replace("model: chat-model", "model: chat-modle"), 'llmgw.yaml:5: endpoints[0].model: unknown model "chat-modle"; did you mean "chat-model"? allowed: chat-model'),
    "endpoint-alias": (BASE.replace("model: chat-model", "model: gpt"), 'llmgw.yaml:5: endpoints[0].model: "gpt" is an alias; name the model itself, "chat-model"'),
    "tls-http": (BASE.replace("9001}", "9001, tls: {}}"), "llmgw.yaml:5: endpoints[0].tls: is only for an https:// url"),
    "tls-ca": (BASE.replace("http:", "https:").replace("9001}", "9001, tls: {ca: /nowhere.pem}}"), "llmgw.yaml:5: endpoints[0].tls.ca: cannot be read: No such file"),
    "model-empty": (BASE.replace("[gpt]}", "[gpt]}\n  - {name: ''}"), "llmgw.yaml:4: models[1].name: must not be empty"),
    "model-twice": (BASE.replace("[gpt]}", "[gpt]}\n  - {name: chat-model}"), 'llmgw.yaml:4: models[1].name: "chat-model" is already the name of models[0]'),
    "alias-shadows": (BASE.replace("[gpt]}", "[gpt]}\n  - {name: gpt}"), 'llmgw.yaml:3: models[0].aliases[0]: "gpt" is the name of a model'),
    "alias-own-name": (BASE.replace("[gpt]", "[chat-model]"), 'llmgw.yaml:3: models[0].aliases[0]: "chat-model" is the name of a model'),
    "alias-twice": (BASE.replace("[gpt]}", "[gpt]}\n  - {name: b, aliases: [gpt]}"), 'llmgw.yaml:4: models[1].aliases[0]: "gpt" is already an alias (models[0].aliases[0])'),
    "fallback-unknown": (BASE.replace("[gpt]", "[gpt], fallbacks: [chat]"), 'llmgw.yaml:3: models[0].fallbacks[0]: unknown model "chat"; did you mean "chat-model"'),
    "fallback-self": (BASE.replace("[gpt]", "[gpt], fallbacks: [chat-model]"), "llmgw.yaml:3: models[0].fallbacks[0]: a model cannot be its own fallback"),
    "profile-unknown": (BASE.replace("[gpt]", "[gpt], routing_profile: cat"), 'llmgw.yaml:3: models[0].routing_profile: unknown profile; did you mean "chat"? allowed: chat'),
    "default-profile": (BASE + "router: {default_profile: x}\n", "llmgw.yaml:6: router.default_profile: unknown profile; allowed: chat"),
    "scorer": (BASE + "router: {profiles: {chat: {scorers: {inflite: 1}}}}\n", 'llmgw.yaml:6: router.profiles.chat.scorers.inflite: unknown scorer; did you mean "inflight"? allowed: inflight, kv, queue'),
    "scorer-negative": (BASE + "router: {profiles: {chat: {scorers: {kv: -1}}}}\n", "llmgw.yaml:6: router.profiles.chat.scorers.kv: -1 is out of range (at least 0)"),
    "filter": (BASE + "router: {profiles: {chat: {filters: [heath]}}}\n", 'llmgw.yaml:6: router.profiles.chat.filters[0]: unknown filter; did you mean "health"?'),
    "picker": (BASE + "router: {profiles: {chat: {picker: {type: p3c}}}}\n", 'llmgw.yaml:6: router.profiles.chat.picker.type: did you mean "p2c"? allowed: max-score, p2c'),
    "metrics-engine": (BASE + "router: {metrics: {vlm: {}}}\n", 'llmgw.yaml:6: router.metrics.vlm: unknown engine; did you mean "vllm"?'),
    "metrics-place": (BASE + "router: {metrics: {vllm: {waiting: [a, b c]}}}\n", "llmgw.yaml:6: router.metrics.vllm.waiting[1]: is no metric name; allowed: NAME"),
    "metrics-labels": (BASE + "router: {metrics: {vllm: {waiting: 'a{b,c}'}}}\n", "llmgw.yaml:6: router.metrics.vllm.waiting: has labels that cannot be read"),
    "band-none": (BASE + "router: {admission: {bands: []}}\n", "llmgw.yaml:6: router.admission.bands: needs 1 to 16 bands"),
    "band-many": (BASE + BANDS + "".join(f"      - {{name: b{n}, priority: -{n}, saturation_ceiling: 0.1}}\n" for n in range(15)), "llmgw.yaml:10: router.admission.bands: needs 1 to 16 bands"),
    "band-name": (BASE + BANDS.replace("name: bulk", "name: 'a b'"), "llmgw.yaml:11: router.admission.bands[1].name: must match"),
    "band-name-twice": (BASE + BANDS.replace("name: bulk", "name: live"), 'llmgw.yaml:11: router.admission.bands[1].name: "live" is already the name of bands[0]'),
    "band-priority-twice": (BASE + BANDS.replace("priority: 1", "priority: 2"), "llmgw.yaml:11: router.admission.bands[1].priority: 2 is already the priority of bands[0]"),
    "band-priority": (BASE + BANDS.replace("priority: 1", "priority: low"), "llmgw.yaml:11: router.admission.bands[1].priority: needs a whole number"),
    "band-ceiling": (BASE + BANDS.replace("0.5", "0"), "llmgw.yaml:11: router.admission.bands[1].saturation_ceiling: 0 is out of range (more than 0)"),
    "band-inverted": (BASE + BANDS.replace("0.5", "1.5"), 'llmgw.yaml:11: router.admission.bands[1].saturation_ceiling: 1.5 is above the ceiling of "live", 1, which has more priority'),
    "band-default": (BASE + BANDS.replace("default_band: live", "default_band: life"), 'llmgw.yaml:8: router.admission.default_band: unknown band; did you mean "live"? allowed: bulk, live'),
    "band-default-of-the-schema": (BASE + BANDS.replace("    default_band: live\n", ""), "llmgw.yaml:8: router.admission.default_band: unknown band; allowed: bulk, live"),
    "queue-ttl": (BASE + "router: {admission: {queue_ttl: 0}}\n", "llmgw.yaml:6: router.admission.queue_ttl: must be more than 0"),
    "queue-capacity": (BASE + "router: {admission: {queue_capacity: 100}}\n", "llmgw.yaml:6: router.admission.queue_capacity: is less than queue_capacity_per_band, 2000"),
    "aggregate": (BASE + "router: {admission: {aggregate: p99}}\n", 'llmgw.yaml:6: router.admission.aggregate: did you mean "p90"? allowed: mean, p90'),
    "kv-ceiling": (BASE + "router: {admission: {kv_ceiling: 90}}\n", "llmgw.yaml:6: router.admission.kv_ceiling: 90 is out of range (more than 0 and at most 1)"),
    "pool-unused": (BASE + "pools: {defaults: {}}\n", 'llmgw.yaml:6: pools.defaults: no endpoint names this pool; did you mean "default"? allowed: default'),
    "pool-cap": (BASE + "pools: {default: {max_concurrent: 0}}\n", "llmgw.yaml:6: pools.default.max_concurrent: 0 is out of range (at least 1)"),
    "pool-kv": (BASE + "pools: {default: {kv_ceiling: 2}}\n", "llmgw.yaml:6: pools.default.kv_ceiling: 2 is out of range (more than 0 and at most 1)"),
    "batch-capacity": (BASE.replace("9001}", "9001, batch_capacity: 0}"), "llmgw.yaml:5: endpoints[0].batch_capacity: 0 is out of range (at least 1)"),
    "metrics-field": (BASE + "router: {metrics: {vllm: {waitng: x}}}\n", 'llmgw.yaml:6: router.metrics.vllm.waitng: unknown contract field; did you mean "waiting"?'),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_an_error_is_reported_with_file_line_key_and_what_is_allowed(kind: str, tmp_path: Path) -> None:
    text, expected = BAD_FILES[kind]
    found = problems(tmp_path, text)
    assert [p for p in found if p.startswith(expected)], found
    assert len(found) == 1, found


def test_fallbacks_in_a_circle_are_shown(tmp_path: Path) -> None:
    text = """\
auth: {enabled: false}
models:
  - {name: a, fallbacks: [b]}
  - {name: b, fallbacks: [c]}
  - {name: c, fallbacks: [a]}
  - {name: d, fallbacks: [a]}
"""
    found = problems(tmp_path, text)
    assert found[0] == (
        "llmgw.yaml:3: models[0].fallbacks[0]: the fallbacks run in a circle: a -> b -> c -> a"
    )
    assert len(found) == 3  # each member of the circle; d only leads into it


def test_all_problems_are_reported_together_in_file_order(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """\
workers: x
listen: nowhere
models:
  - {name: a, colour: red}
endpoints:
  - {id: e, model: b, url: http://a:1}
  - {id: e, model: a, url: a:1}
""",
        LLMGW_NOPE="1",
    )
    assert [line.split(": ")[0:2] for line in found] == [
        ["llmgw.yaml:1", "workers"],
        ["llmgw.yaml:1", "auth.enabled"],
        ["llmgw.yaml:2", "listen"],
        ["llmgw.yaml:4", "models[0].colour"],
        ["llmgw.yaml:6", "endpoints[0].model"],
        ["llmgw.yaml:7", "endpoints[1].url"],
        ["llmgw.yaml:7", "endpoints[1].id"],
        ["environment", "LLMGW_NOPE"],
    ]


def test_a_bad_value_is_not_reported_a_second_time_for_its_stand_in(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "auth: {enabled: maybe}")) == 1
    text = "auth: {enabled: false}\nmodels: [{name: []}]\nendpoints: [{id: [], model: [], url: []}, {id: [], model: [], url: []}]"
    assert len(problems(tmp_path, text)) == 7


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "none.yaml", {"LLMGW_AUTH__ENABLED": "false"})
    assert error.value.problems == (
        Problem(str(tmp_path / "none.yaml"), None, "", "cannot be read: No such file or directory"),
    )


def test_a_folder_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, {"LLMGW_AUTH__ENABLED": "false"})


def test_an_expanding_file_is_read_in_no_time(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert all("unknown key" in line for line in problems(tmp_path, BASE + "\n".join(lines)))


def test_the_repr_of_an_endpoint_keeps_its_key_secret(tmp_path: Path) -> None:
    config = read(tmp_path, BASE.replace("9001}", "9001, api_key: sk-secret}"))
    assert config.endpoints[0].api_key == "sk-secret"
    assert "sk-secret" not in repr(config)


def test_the_repr_of_redis_keeps_its_passwords_secret(tmp_path: Path) -> None:
    text = "redis: {url: 'redis://:pw1-secret@h:1/0', password: pw2-secret}\n"
    config = read(tmp_path, BASE + text)
    assert config.redis.password == "pw2-secret"
    assert "redis://h:1/0" in repr(config)
    assert "secret" not in repr(config)


def test_redis_keys_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    text = "redis: {url: 'redis://h', tls: {}, exchange_interval: 2s, cluster_name: '{x}'}\n"
    assert [line.split(": ")[1] for line in problems(tmp_path, BASE + text)] == [
        "redis.cluster_name",
        "redis.tls",
        "redis.exchange_interval",
    ]
    assert "redis.password" in problems(tmp_path, BASE + "redis: {password: secret}\n")[0]


def test_a_packed_configuration_comes_back_the_same(tmp_path: Path) -> None:
    config = load(Path(str(files("conf") / "examples" / "full.yaml")), {})
    assert decode(encode(config)) == config


def test_a_packed_configuration_of_another_schema_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        decode(msgspec.msgpack.encode({"colour": "red"}))


# Overrides


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, BASE + "workers: 1\n", LLMGW_WORKERS="3", LLMGW_ROUTER__TIMEOUTS__IDLE="5s")
    assert (config.workers, config.router.timeouts.idle) == (3, 5.0)


def test_overrides_alone_make_a_configuration() -> None:
    config = load(
        None,
        {
            "LLMGW_AUTH__ENABLED": "false",
            "LLMGW_MODELS": "[{name: m}]",
            "LLMGW_ENDPOINTS__0": "{id: a, model: m, url: 'http://a:1'}",
            "LLMGW_ENDPOINTS__0__POOL": "fast",
            "PATH": "/bin",
        },
    )
    assert config.endpoints == (Endpoint(id="a", model="m", url="http://a:1", pool="fast"),)


def test_a_text_is_taken_from_the_environment_as_it_is(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        BASE,
        LLMGW_LISTEN="[::]:80",
        LLMGW_ENDPOINTS__0__API_KEY="{a: &b",
        LLMGW_ROUTER__STREAM_PING__MODE="off",
        LLMGW_MODELS__0__ROUTING_PROFILE="chat",
    )
    assert config.listen == "[::]:80"
    assert config.endpoints[0].api_key == "{a: &b"
    assert config.router.stream_ping.mode == "off"


def test_an_override_reaches_a_name_that_no_variable_can_spell(tmp_path: Path) -> None:
    text = BASE + "router: {profiles: {long-context: {scorers: {kv: 1}}}}\n"
    config = read(tmp_path, text, LLMGW_ROUTER__PROFILES__LONG_CONTEXT__PICKER__TYPE="p2c")
    assert config.router.profiles["long-context"].picker.type == "p2c"


def test_an_override_changes_no_other_place_that_shares_an_anchor(tmp_path: Path) -> None:
    text = BASE.replace("aliases: [gpt]", "timeouts: &t {idle: 9s}") + "router: {timeouts: *t}\n"
    config = read(tmp_path, text, LLMGW_ROUTER__TIMEOUTS__IDLE="1s")
    assert config.router.timeouts.idle == 1.0
    assert config.models[0].timeouts is not None
    assert config.models[0].timeouts.idle == 9.0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "LLMGW_ROUTER__RETRYS",
            "3",
            'unknown variable; did you mean "LLMGW_ROUTER__RETRIES"? allowed: LLMGW_',
        ),
        ("LLMGW_WORKRES", "3", 'unknown variable; did you mean "LLMGW_WORKERS"?'),
        ("LLMGW_", "3", "unknown variable; "),
        ("LLMGW_WORKERS__0", "3", "LLMGW_WORKERS has no keys below it"),
        ("LLMGW_ENDPOINTS__7__URL", "http://a:1", "7 is no index of this list; allowed: 0 to 1"),
        ("LLMGW_ENDPOINTS__A__URL", "http://a:1", "A is no index of this list"),
        ("LLMGW_WORKERS", "x", "needs a whole number"),
        ("LLMGW_WORKERS", "", "is empty; it needs a whole number"),
        ("LLMGW_WORKERS", "[", "is not valid YAML"),
        ("LLMGW_ROUTER__TIMEOUTS", "{idel: 1s}", 'unknown key; did you mean "idle"?'),
        ("LLMGW_ENDPOINTS__0__MODEL", "x", 'unknown model "x"'),
    ],
)
def test_a_bad_override_is_reported_with_its_name(
    name: str, value: str, expected: str, tmp_path: Path
) -> None:
    found = problems(tmp_path, BASE, **{name: value})
    assert len(found) == 1, found
    assert found[0].startswith(f"environment: {name}: {expected}")


@pytest.mark.parametrize("name", ["LLMGW_ADMIN", "LLMGW_COMPILED"])
def test_variables_of_other_readers_are_no_overrides(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, BASE, **{name: "0"}) == read(tmp_path, BASE)


def test_without_variables_given_the_process_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith("LLMGW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLMGW_WORKERS", "5")
    (tmp_path / "llmgw.yaml").write_text(BASE)
    assert load(tmp_path / "llmgw.yaml").workers == 5


@pytest.mark.parametrize("place", ["127.0.0.1:9001", "[::1]:9001", "node_1.example"])
def test_an_endpoint_without_an_id_is_called_by_host_and_port(place: str, tmp_path: Path) -> None:
    config = read(tmp_path, BASE.replace("id: a, ", "").replace("http://127.0.0.1:9001", f"'http://{place}'"))
    assert [endpoint.id for endpoint in decode(encode(config)).endpoints] == [place]
