"""Names of plugins as the configuration spells them, and what they stand for.

`inflight` is always among the scorers: it is the one figure that is not seconds old, and without it all
requests between two scrapes go to the same endpoint (plan §7.6). A profile may set its weight, also to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from conf import schema
from conf.schema import RoutingProfile
from gateway.core.schedule.filters.draining import Draining
from gateway.core.schedule.filters.excluded import Excluded
from gateway.core.schedule.filters.health import Health
from gateway.core.schedule.pickers.max_score import MaxScore
from gateway.core.schedule.pickers.p2c import PowerOfTwoChoices
from gateway.core.schedule.pickers.round_robin import RoundRobin
from gateway.core.schedule.pickers.softmax import Softmax
from gateway.core.schedule.pipeline import Filter, Picker, Pipeline, Scorer, WeightedScorer
from gateway.core.schedule.scorers.inflight import Inflight
from gateway.core.schedule.scorers.kv import Kv
from gateway.core.schedule.scorers.queue import Queue

FILTERS: Final[Mapping[str, Callable[[], Filter]]] = MappingProxyType(
    {"health": Health, "draining": Draining, "excluded": Excluded}
)
SCORERS: Final[Mapping[str, Callable[[], Scorer]]] = MappingProxyType(
    {"inflight": Inflight, "queue": Queue, "kv": Kv}
)
PICKERS: Final[Mapping[str, Callable[[schema.Picker], Picker]]] = MappingProxyType(
    {
        "max-score": lambda _: MaxScore(),
        "p2c": lambda _: PowerOfTwoChoices(),
        "round-robin": lambda _: RoundRobin(),
        "softmax": lambda settings: Softmax(settings.temperature),
    }
)
ALWAYS_SCORED: Final = "inflight"


def build_pipeline(profile: RoutingProfile) -> Pipeline:
    """Make the pipeline of a routing profile; each call makes pickers with turns of their own.

    Raises:
        KeyError: a name that `conf.check` should have refused.
    """
    weights = {ALWAYS_SCORED: 1.0, **profile.scorers}
    return Pipeline(
        [FILTERS[name]() for name in profile.filters],
        [WeightedScorer(SCORERS[name](), weight) for name, weight in weights.items() if weight > 0.0],
        PICKERS[profile.picker.type](profile.picker),
    )
