"""The metric contract: what an engine's Prometheus text says, in common names.

Supporting an engine means being able to fill `waiting` and `running`; everything else is a gain. Rules:
    - A mapping belongs to an engine, never to the cluster. It gives for each field the places to look at, in
      order; the first place that occurs in the text counts. Engines rename metrics between versions, so old
      names stay in the list, and the configuration can replace any of them.
    - `waiting` and `running` must be there. `kv_usage` must be there if the mapping names it; a mapping that
      leaves it out says that the engine has no such metric. The others may be missing.
    - What is there but unusable (NaN, Inf, not a number, out of range) is a violation, whatever the field.
      A field with a violation is None: half a sum would pass for a small load.
    - Nothing an engine sends raises. Garbage is a set of violations.

Shares of one engine: series that differ in a data-parallel rank (`engine`, `dp_rank`) are different requests
and are added up (`kv_usage`: averaged); series that differ only in a rank that works on the same requests
(`tp_rank`, `pp_rank`, `moe_ep_rank`) are copies, of which the highest counts.

SGLang with priority scheduling publishes its gauges once as the total (`priority=""`) and once per priority:
then the total alone counts. Its counters have the same label but no total, and are added up.

Sources: plan §7.6; recordings of vLLM 0.32, SGLang 0.5.23 and llama.cpp (tests/corpus/metrics).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from conf.errors import LlmgwError

# A place: `NAME`, `NAME{LABEL}` (the number is that label's value, as in info metrics), or with conditions,
# `NAME{LABEL="VALUE"}`.
_PLACE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>[^{}]*)\})?")
_CONDITION = re.compile(r'(?P<label>[a-zA-Z_][a-zA-Z0-9_]*)(?:="(?P<value>[^"]*)")?')
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\(.)")
_COPY_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")


class MappingError(LlmgwError):
    """A mapping names a field or a place that cannot be; says which."""


class Fault(Enum):
    """What is wrong with a field."""

    MISSING = "missing"
    NOT_A_NUMBER = "not a number"
    NOT_FINITE = "not finite"
    OUT_OF_RANGE = "out of range"


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a text breaks the contract.

    Equal violations of two scrapes are the same violation: no values inside, so that a warning can be given
    once and taken back once.

    Attributes:
        field: contract field.
        fault: what is wrong.
        places: where it was looked for, or the one place where the fault is.
    """

    field: str
    fault: Fault
    places: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.field} is {self.fault.value} ({', '.join(self.places)})"


@dataclass(frozen=True, slots=True)
class LoraState:
    """LoRA adapters of an engine.

    Attributes:
        max_adapters: how many can be active at once; None if not said.
        running: adapters that requests run on.
        waiting: adapters that requests wait for.
    """

    max_adapters: int | None
    running: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine says about itself; None where it does not say or says nonsense.

    Attributes:
        waiting: requests queued inside the engine.
        running: requests being computed.
        kv_usage: share of the KV cache in use, 0..1.
        prompt_tokens: prompt tokens since its start.
        cached_tokens: of those, tokens found in the prefix cache.
        generation_tokens: tokens generated since its start.
        block_size: tokens in a KV block.
        num_blocks: KV blocks, over all ranks.
        max_context: tokens a request may have, prompt and answer.
        lora: adapters; None if the engine serves none.
    """

    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generation_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    max_context: int | None = None
    lora: LoraState | None = None

    @property
    def is_schedulable(self) -> bool:
        """Whether the two numbers are there without which nothing can be decided."""
        return self.waiting is not None and self.running is not None


class Reading(NamedTuple):
    """A parsed text: what was understood, and what breaks the contract."""

    stats: EngineStats
    violations: tuple[Violation, ...]


class _Sum(Enum):
    """How series of one place become one number."""

    GAUGE = "add up ranks; the total of all priorities where there is one"
    COUNTER = "add up everything"
    MEAN = "average over ranks"
    FIRST = "every rank says the same"


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    sum: _Sum
    is_required: bool = False  # wherever the mapping names it
    highest: float = math.inf


_WAITING = _Field("waiting", _Sum.GAUGE, is_required=True)
_RUNNING = _Field("running", _Sum.GAUGE, is_required=True)
# Rounding takes engines a little over 1; a hundred means per cent, and must not pass for "full".
_KV_USAGE = _Field("kv_usage", _Sum.MEAN, is_required=True, highest=1.5)
_PROMPT_TOKENS = _Field("prompt_tokens", _Sum.COUNTER)
_CACHED_TOKENS = _Field("cached_tokens", _Sum.COUNTER)
_GENERATION_TOKENS = _Field("generation_tokens", _Sum.COUNTER)
_BLOCK_SIZE = _Field("block_size", _Sum.FIRST)
_NUM_BLOCKS = _Field("num_blocks", _Sum.GAUGE)
_KV_TOKENS = _Field("kv_tokens", _Sum.GAUGE)
_MAX_CONTEXT = _Field("max_context", _Sum.FIRST)
_FIELDS = {
    field.name: field
    for field in (
        _WAITING, _RUNNING, _KV_USAGE, _PROMPT_TOKENS, _CACHED_TOKENS, _GENERATION_TOKENS,
        _BLOCK_SIZE, _NUM_BLOCKS, _KV_TOKENS, _MAX_CONTEXT,
    )
}  # fmt: skip
LORA = "lora"
# What a mapping can name. `kv_tokens` stands in for `num_blocks` where an engine counts tokens.
FIELDS = (*_FIELDS, LORA)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number stands.

    Attributes:
        text: as written, for messages.
        needle: the metric's name with the line break before it.
        label: the label whose value is the number; None: the sample's value.
        conditions: (label, value) pairs that a series must have.
    """

    text: str
    needle: bytes
    label: str | None
    conditions: tuple[tuple[str, str], ...]


MetricMapping = Mapping[str, tuple[Place, ...]]


def _place(text: str) -> Place:
    match = _PLACE.fullmatch(text)
    if match is None:
        raise MappingError(f'{text!r} is no metric name; allowed: NAME, NAME{{LABEL}}, NAME{{LABEL="VALUE"}}')
    label, conditions = None, []
    for part in filter(None, (part.strip() for part in (match["labels"] or "").split(","))):
        condition = _CONDITION.fullmatch(part)
        if condition is None or (condition["value"] is None and label is not None):
            raise MappingError(f'{text!r}: cannot read {part!r}; allowed: one LABEL, and LABEL="VALUE"')
        if condition["value"] is None:
            label = condition["label"]
        else:
            conditions.append((condition["label"], condition["value"]))
    return Place(text, b"\n" + match["name"].encode(), label, tuple(conditions))


def _mapping(fields: Mapping[str, str | Sequence[str]]) -> dict[str, tuple[Place, ...]]:
    mapping = {}
    for field, places in fields.items():
        if field not in FIELDS:
            raise MappingError(f"{field!r} is no field of the metric contract; allowed: {', '.join(FIELDS)}")
        texts = (places,) if isinstance(places, str) else tuple(places)
        mapping[field] = tuple(_place(text) for text in texts if text)
    return mapping


_VLLM = {
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    # gpu_ until 0.10
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "generation_tokens": "vllm:generation_tokens_total",
    "block_size": "vllm:cache_config_info{block_size}",
    "num_blocks": "vllm:cache_config_info{num_gpu_blocks}",
    LORA: "vllm:lora_requests_info",
}
# Which of its metrics is which field, by engine.
BUILT_IN: Mapping[str, MetricMapping] = MappingProxyType({
    "vllm": _mapping(_VLLM),
    "sglang": _mapping({
        "waiting": "sglang:num_queue_reqs",
        "running": "sglang:num_running_reqs",
        "kv_usage": "sglang:token_usage",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "cached_tokens": "sglang:cached_tokens_total",
        "generation_tokens": "sglang:generation_tokens_total",
        "block_size": "sglang:page_size",
        "kv_tokens": "sglang:max_total_num_tokens",
        "max_context": "sglang:context_len",
    }),
    # No kv_usage: llama.cpp stopped publishing a cache ratio, and naming it would fail every scrape.
    "llamacpp": _mapping({
        "waiting": "llamacpp:requests_deferred",
        "running": "llamacpp:requests_processing",
        "prompt_tokens": "llamacpp:prompt_tokens_total",
        "cached_tokens": "llamacpp:prompt_tokens_cached_total",
        "generation_tokens": "llamacpp:tokens_predicted_total",
    }),
    # The simulated engine speaks vLLM.
    "sim": _mapping(_VLLM),
})  # fmt: skip


def mapping_for(
    engine: str, overrides: Mapping[str, Mapping[str, str | Sequence[str]]] = MappingProxyType({})
) -> MetricMapping:
    """Return the mapping of `engine`, with the configuration's fields in place of the built-in ones.

    Args:
        engine: name in the configuration; one we do not know is read with vLLM's names.
        overrides: engine -> field -> place or places; an empty place says "this engine has no such metric".

    Raises:
        MappingError: an override names a field or a place that cannot be.
    """
    return {**BUILT_IN.get(engine, BUILT_IN["vllm"]), **_mapping(overrides.get(engine, {}))}


class _Series(NamedTuple):
    labels: Mapping[str, str]
    value: str


def parse(text: bytes, mapping: MetricMapping) -> Reading:
    """Read an engine's metrics.

    Costs a search per place, not a parse of the text, which may have 100 KB of histograms.

    Args:
        text: body of the engine's `/metrics`, in Prometheus' text format or something else.
        mapping: from `mapping_for`.
    """
    if not text.startswith(b"\n"):
        text = b"\n" + text
    violations: list[Violation] = []
    numbers: dict[str, float | None] = {
        name: _number(text, field, mapping.get(name, ()), violations) for name, field in _FIELDS.items()
    }
    block_size = _integer(numbers["block_size"])
    num_blocks = _integer(numbers["num_blocks"])
    kv_tokens = _integer(numbers["kv_tokens"])
    if num_blocks is None and kv_tokens and block_size:
        num_blocks = kv_tokens // block_size
    kv_usage = numbers["kv_usage"]
    stats = EngineStats(
        waiting=_integer(numbers["waiting"]),
        running=_integer(numbers["running"]),
        kv_usage=None if kv_usage is None else min(kv_usage, 1.0),
        prompt_tokens=_integer(numbers["prompt_tokens"]),
        cached_tokens=_integer(numbers["cached_tokens"]),
        generation_tokens=_integer(numbers["generation_tokens"]),
        block_size=block_size or None,
        num_blocks=num_blocks or None,
        max_context=_integer(numbers["max_context"]) or None,
        lora=_lora(text, mapping.get(LORA, ())),
    )
    return Reading(stats, tuple(violations))


def _integer(number: float | None) -> int | None:
    return None if number is None else round(number)


def _number(
    text: bytes, field: _Field, places: tuple[Place, ...], violations: list[Violation]
) -> float | None:
    for place in places:
        series = list(_series(text, place))
        if not series:
            continue
        number = _combine(field, place, series)
        if isinstance(number, Fault):
            violations.append(Violation(field.name, number, (place.text,)))
            return None
        if number is not None:
            return number
    if places and field.is_required:
        violations.append(Violation(field.name, Fault.MISSING, tuple(place.text for place in places)))
    return None


def _combine(field: _Field, place: Place, series: list[_Series]) -> float | Fault | None:
    """Make one number of a metric's series; None where it does not say."""
    if field.sum is not _Sum.COUNTER and any(one.labels.get("priority") == "" for one in series):
        series = [one for one in series if one.labels.get("priority") == ""]
    shares: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in series:
        if place.label is not None:
            value = labels.get(place.label, "")
            if value in ("", "None"):  # not settled yet, or a version without it
                continue
        try:
            number = float(value)
        except ValueError:
            return Fault.NOT_A_NUMBER
        if not math.isfinite(number):
            return Fault.NOT_FINITE
        # Some engines' gauges dip below 0 by a rounding error.
        if not -0.01 <= number <= field.highest:
            return Fault.OUT_OF_RANGE
        share = tuple(sorted(pair for pair in labels.items() if pair[0] not in _COPY_RANKS))
        shares[share] = max(number, shares.get(share, 0.0))
    if not shares:
        return None
    match field.sum:
        case _Sum.MEAN:
            return sum(shares.values()) / len(shares)
        case _Sum.FIRST:
            return next(iter(shares.values()))
        case _:
            return sum(shares.values())


def _lora(text: bytes, places: tuple[Place, ...]) -> LoraState | None:
    """Read vLLM's info metric: a series per state ever seen, valued with its time; the last counts."""
    for place in places:
        latest: _Series | None = None
        latest_at = -math.inf
        for series in _series(text, place):
            try:
                at = float(series.value)
            except ValueError:
                continue
            if at >= latest_at:  # never true for NaN
                latest, latest_at = series, at
        if latest is not None:
            labels = latest.labels
            most = labels.get("max_lora", "")
            return LoraState(
                max_adapters=int(most) if most.isdecimal() else None,
                running=_names(labels.get("running_lora_adapters", "")),
                waiting=_names(labels.get("waiting_lora_adapters", "")),
            )
    return None


def _names(joined: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in joined.split(",")) if name)


def _series(text: bytes, place: Place) -> Iterator[_Series]:
    """Yield the series of a metric: lines that begin with its name, then labels or white space."""
    needle = place.needle
    start = text.find(needle)
    while start >= 0:
        after = start + len(needle)
        end = text.find(b"\n", after)
        if end < 0:
            end = len(text)
        if text[after : after + 1] in (b"{", b" ", b"\t"):
            series = _read_line(text[after:end].decode("utf-8", "replace"))
            if all(series.labels.get(label) == value for label, value in place.conditions):
                yield series
        start = text.find(needle, end)


def _read_line(rest: str) -> _Series:
    """Split `{label="value",...} value [timestamp]`; a line that is not so gets a value that is no number."""
    labels: dict[str, str] = {}
    rest = rest.lstrip()
    if rest.startswith("{"):
        at = 1
        while match := _LABEL.match(rest, at):
            value = match[2]
            labels[match[1]] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
            at = match.end()
        close = rest.find("}", at)
        rest = rest[close + 1 :] if close >= 0 and not rest[at:close].strip() else ""
    words = rest.split(None, 1)
    # float() takes 1_0, which is no number in Prometheus' format.
    return _Series(labels, words[0].replace("_", "?") if words else "")


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
