from __future__ import annotations

import random
from typing import Any

import pytest

from conf import schema
from conf.schema import Picker, RoutingProfile
from gateway.core.schedule import pipeline
from gateway.core.schedule.pipeline import (
    DOWN,
    DRAINING,
    READY,
    STALE,
    STUCK,
    UNKNOWN,
    Choice,
    Fleet,
    NoCandidate,
    Pipeline,
    Request,
    WeightedScorer,
)
from gateway.core.schedule.registry import FILTERS, PICKERS, SCORERS, build_pipeline
from shm.endpoints import EndpointState

NOW = 100.0


def fleet(size: int, **columns: Any) -> Fleet:
    defaults: dict[str, Any] = {
        "now": NOW,
        "slots": [10 + i for i in range(size)],
        "ids": [f"e{i}" for i in range(size)],
        "state": [READY] * size,
        "inflight": [0] * size,
        "waiting": [0.0] * size,
        "running": [0.0] * size,
        "kv": [0.0] * size,
        "weight": [1.0] * size,
        "cooldown_until": [0.0] * size,
    }
    return Fleet(**{**defaults, **columns})


def choose(endpoints: Fleet, *, excluded: set[int] | None = None, seed: int = 1, **profile: Any) -> Choice:
    rng = random.Random(seed)
    return build_pipeline(RoutingProfile(**profile)).choose(
        Request(excluded=excluded or set()), endpoints, rng
    )


def chosen(endpoints: Fleet, *, draws: int = 200, **profile: Any) -> dict[int, int]:
    """How often each endpoint was chosen."""
    built, rng = build_pipeline(RoutingProfile(**profile)), random.Random(7)
    counts: dict[int, int] = {}
    for _ in range(draws):
        index = built.choose(Request(), endpoints, rng).index
        counts[index] = counts.get(index, 0) + 1
    return counts


def test_states_are_those_of_the_endpoint_table() -> None:
    values = {state.name: float(state) for state in EndpointState}
    assert values == {name: getattr(pipeline, name) for name in values}


# Filters.


@pytest.mark.parametrize(
    ("state", "usable"),
    [(UNKNOWN, True), (READY, True), (STALE, True), (DOWN, False), (DRAINING, False), (STUCK, False)],
)
def test_endpoint_is_used_unless_it_is_known_to_be_down_or_draining(state: float, usable: bool) -> None:
    if usable:
        assert choose(fleet(1, state=[state])).index == 0
    else:
        with pytest.raises(NoCandidate):
            choose(fleet(1, state=[state]))


def test_cooldown_keeps_an_endpoint_out_until_its_time() -> None:
    assert choose(fleet(2, cooldown_until=[NOW + 0.1, NOW])).index == 1


def test_endpoint_that_was_tried_is_not_chosen_again() -> None:
    assert choose(fleet(3), excluded={10, 12}).index == 1


def test_choice_counts_what_each_filter_took() -> None:
    endpoints = fleet(
        5, state=[DOWN, DRAINING, READY, READY, READY], cooldown_until=[0.0, 0.0, NOW + 1, 0.0, 0.0]
    )
    choice = choose(endpoints, excluded={13})
    assert choice.index == 4
    assert choice.considered == 1
    assert choice.filtered == (("health", 2), ("draining", 1), ("excluded", 1))


def test_filters_of_the_profile_alone_apply() -> None:
    assert choose(fleet(1, state=[DOWN]), filters=("draining",)).index == 0


def test_no_candidate_says_which_filter_took_the_last_one() -> None:
    with pytest.raises(NoCandidate) as caught:
        choose(fleet(2, state=[DOWN, DRAINING]))
    assert caught.value.reason == "draining"
    assert caught.value.filtered == (("health", 1), ("draining", 1))
    assert caught.value.usable_at is None


def test_no_candidate_says_when_the_first_cooldown_ends() -> None:
    endpoints = fleet(
        5,
        state=[READY, READY, DOWN, READY, DRAINING],
        cooldown_until=[NOW + 9, NOW + 5, NOW + 1, NOW + 2, NOW + 1],
    )
    with pytest.raises(NoCandidate) as caught:
        choose(endpoints, excluded={13})
    assert caught.value.usable_at == NOW + 5


def test_model_without_endpoints_has_no_candidate() -> None:
    with pytest.raises(NoCandidate) as caught:
        choose(fleet(0))
    assert caught.value.reason == "empty"


# Scorers.


def test_least_loaded_endpoint_wins() -> None:
    assert chosen(fleet(3, inflight=[5, 4, 6])) == {1: 200}


def test_load_counts_per_weight() -> None:
    assert chosen(fleet(2, inflight=[6, 4], weight=[2.0, 1.0])) == {0: 200}


def test_short_queue_wins_and_a_long_one_scores_nothing() -> None:
    profile = {"scorers": {"inflight": 0.0, "queue": 1.0}}
    assert chosen(fleet(3, waiting=[2.0, 1.0, 3.0]), **profile) == {1: 200}
    assert set(chosen(fleet(2, waiting=[4.0, 400.0]), **profile)) == {0, 1}


def test_free_kv_cache_wins_and_above_the_ceiling_nothing_counts() -> None:
    profile = {"scorers": {"inflight": 0.0, "kv": 1.0}}
    assert chosen(fleet(3, kv=[0.5, 0.4, 0.6]), **profile) == {1: 200}
    assert set(chosen(fleet(2, kv=[0.91, 0.99]), **profile)) == {0, 1}


@pytest.mark.parametrize("scorer", ["queue", "kv"])
def test_unknown_endpoint_scores_between_an_idle_and_a_full_one_and_a_stale_one_least(scorer: str) -> None:
    endpoints = fleet(
        4, state=[READY, READY, UNKNOWN, STALE], waiting=[0.0, 4.0, 0.0, 0.0], kv=[0.0, 0.95, 0.0, 0.0]
    )
    scores = SCORERS[scorer]().score(Request(), endpoints)
    assert scores == [1.0, 0.0, 0.5, 0.0]


def test_engine_that_publishes_no_kv_usage_scores_in_the_middle() -> None:
    assert SCORERS["kv"]().score(Request(), fleet(2, kv=[float("nan"), 0.2])) == [0.5, 0.8]


def test_weights_decide_between_scorers() -> None:
    endpoints = fleet(2, inflight=[16, 0], waiting=[0.0, 4.0])
    assert chosen(endpoints, scorers={"inflight": 1.0, "queue": 3.0}) == {0: 200}
    assert chosen(endpoints, scorers={"inflight": 3.0, "queue": 1.0}) == {1: 200}


def test_own_load_counts_even_in_a_profile_that_does_not_name_it() -> None:
    assert chosen(fleet(2, inflight=[3, 2]), scorers={"queue": 1.0}) == {1: 200}


class Fixed:
    """A scorer that says what it is told."""

    name = "fixed"
    needs = frozenset(("kv",))

    def score(self, request: Request, candidates: Fleet) -> list[float]:
        return list(candidates.kv)


@pytest.mark.parametrize(
    ("scores", "best"),
    [([5.0, 1.0], {0, 1}), ([-5.0, 0.0], {0, 1}), ([float("nan"), 0.1], {1}), ([float("inf"), 0.9], {0})],
)
def test_scores_are_cut_to_the_range_and_nan_is_the_worst(scores: list[float], best: set[int]) -> None:
    built = Pipeline([], [WeightedScorer(Fixed(), 1.0)], PICKERS["max-score"](Picker()))
    rng = random.Random(3)
    assert {built.choose(Request(), fleet(2, kv=scores), rng).index for _ in range(50)} == best


def test_scores_stand_beside_the_endpoints_that_the_filters_left() -> None:
    endpoints = fleet(
        5, state=[DOWN, READY, DOWN, READY, READY], inflight=[0, 3, 0, 2, 1], weight=[9.0, 1.0, 9.0, 1.0, 1.0]
    )
    assert chosen(endpoints) == {4: 200}


# Pickers.


def test_ties_break_at_random() -> None:
    counts = chosen(fleet(4), draws=2000)
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 400


def test_p2c_never_takes_the_worst_and_spreads_over_the_others() -> None:
    counts = chosen(fleet(4, inflight=[0, 1, 2, 3]), picker=Picker(type="p2c"), draws=2000)
    assert set(counts) == {0, 1, 2}
    assert counts[0] > counts[1] > counts[2]


def test_p2c_breaks_ties_at_random() -> None:
    counts = chosen(fleet(2), picker=Picker(type="p2c"), draws=2000)
    assert min(counts.values()) > 800


def test_round_robin_takes_turns_whatever_the_load() -> None:
    counts = chosen(fleet(4, inflight=[0, 9, 9, 9]), picker=Picker(type="round-robin"), draws=400)
    assert counts == {0: 100, 1: 100, 2: 100, 3: 100}


def test_round_robin_counts_turns_per_model() -> None:
    built, rng = build_pipeline(RoutingProfile(picker=Picker(type="round-robin"))), random.Random(1)
    one, other = fleet(2), fleet(2, slots=[20, 21])
    seen: dict[str, set[int]] = {"one": set(), "other": set()}
    for _ in range(2):
        seen["one"].add(built.choose(Request(), one, rng).index)
        seen["other"].add(built.choose(Request(), other, rng).index)
    assert seen == {"one": {0, 1}, "other": {0, 1}}


def test_softmax_prefers_better_ones_the_more_the_colder() -> None:
    endpoints = fleet(2, inflight=[0, 16])
    warm = chosen(endpoints, picker=Picker(type="softmax", temperature=1.0), draws=2000)
    cold = chosen(endpoints, picker=Picker(type="softmax", temperature=0.05), draws=2000)
    assert 0.65 < warm[0] / 2000 < 0.8  # e / (1 + e) = 0.73
    assert cold == {0: 2000}


def test_same_seed_chooses_the_same() -> None:
    for picker in PICKERS:
        picks = [choose(fleet(9), seed=5, picker=Picker(type=picker)).index for _ in range(2)]  # type: ignore[arg-type]
        assert picks[0] == picks[1]


# The registry.


def test_registry_has_what_the_configuration_allows() -> None:
    assert set(FILTERS) == set(schema.FILTERS)
    assert set(SCORERS) == set(schema.SCORERS)
    assert set(PICKERS) == set(schema.PICKERS)


def test_plugins_have_the_names_they_are_registered_by() -> None:
    assert all(FILTERS[name]().name == name for name in FILTERS)
    assert all(SCORERS[name]().name == name for name in SCORERS)
    assert all(PICKERS[name](Picker()).name == name for name in PICKERS)


def test_pipeline_names_the_columns_it_needs_and_reads_no_other() -> None:
    built = build_pipeline(RoutingProfile(scorers={"queue": 1.0}))
    assert built.needs == {"state", "cooldown_until", "inflight", "weight", "waiting"}
    unneeded = {"ids": (), "running": (), "kv": ()}
    assert built.choose(Request(), fleet(3, **unneeded), random.Random(1)).considered == 3
    assert build_pipeline(RoutingProfile(picker=Picker(type="round-robin"))).needs == {
        "state",
        "cooldown_until",
    }
