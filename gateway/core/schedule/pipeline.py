"""Chooses one endpoint of a model: filter, score, pick.

Rules:
    - A filter takes candidates away and never adds any. It has no side effects: what it took away is counted.
    - A score lies in [0, 1], 1 is best; what lies outside is cut to it, NaN counts as 0. The total of an
      endpoint is the sum of its scores times their weights.
    - The picker decides by the totals alone. Equal totals are decided at random, since all workers see nearly
      the same figures and would otherwise all send to the same endpoint.
    - A plugin names the columns it reads (`needs`), so that the caller need not read the others.

Invariant: the chosen index is one that every filter has left in.

Source: plan §7.3; the interfaces follow llm-d's endpoint picker.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from operator import add, itemgetter
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from conf.errors import LlmgwError

# Values of the column `state`, as `shm.endpoints.EndpointState` has them; a core may not import it, and a
# test compares the two.
UNKNOWN: Final = 0.0
READY: Final = 1.0
STALE: Final = 2.0
DOWN: Final = 3.0
DRAINING: Final = 4.0
STUCK: Final = 5.0


class Fleet(NamedTuple):
    """The endpoints of one model at one moment, as parallel columns; the same index is the same endpoint.

    Columns that nobody needs may be empty. Whoever makes a fleet owns the columns; nobody writes to them.

    Attributes:
        now: monotonic seconds.
        slots: places in the segment; a slot belongs to one model.
        ids: names.
        state: see the constants above.
        inflight: requests under way from all workers of this host.
        waiting: requests queued in the engine.
        running: requests in the engine's batch.
        kv: ratio of KV blocks in use; NaN where the engine does not say.
        weight: capacity in relation to the others, more than 0.
        cooldown_until: monotonic seconds; 0 for none.
    """

    now: float
    slots: Sequence[int]
    ids: Sequence[str]
    state: Sequence[float]
    inflight: Sequence[int]
    waiting: Sequence[float]
    running: Sequence[float]
    kv: Sequence[float]
    weight: Sequence[float]
    cooldown_until: Sequence[float]


class Request(msgspec.Struct, frozen=True):
    """What a decision knows of the request.

    Attributes:
        excluded: slots that must not be chosen, because this request has been there.
    """

    excluded: Collection[int] = ()


_COLUMNS: Final = Fleet._fields[1:]


class Filter(Protocol):
    """Says which endpoints may serve a request at all."""

    name: str
    needs: frozenset[str]

    def keep(self, request: Request, fleet: Fleet, candidates: list[int]) -> list[int]:
        """Return those of `candidates` (indices) that stay, in their order."""
        ...


class Scorer(Protocol):
    """Says how good an endpoint is in one respect."""

    name: str
    needs: frozenset[str]

    def score(self, request: Request, candidates: Fleet) -> list[float]:
        """Return one score per endpoint, in their order; 1 is best, 0 is worst.

        `candidates` holds at least two endpoints, and only the columns that some scorer needs.
        """
        ...


class Picker(Protocol):
    """Takes one of the candidates."""

    name: str
    uses_scores: bool

    def pick(self, fleet: Fleet, candidates: list[int], totals: list[float], rng: random.Random) -> int:
        """Return one of `candidates` (indices into `fleet`), of which there are at least two.

        `totals` stands beside `candidates`; it is empty unless `uses_scores`.
        """
        ...


class WeightedScorer(NamedTuple):
    """A scorer and how much its score counts."""

    scorer: Scorer
    weight: float


class Choice(msgspec.Struct, frozen=True):
    """A decision.

    Attributes:
        index: of the chosen endpoint in the fleet.
        considered: candidates that were left for the picker.
        filtered: (filter, how many it took away), only of filters that took any.
    """

    index: int
    considered: int
    filtered: tuple[tuple[str, int], ...]


class NoCandidate(LlmgwError):
    """No endpoint may serve the request now.

    Attributes:
        reason: name of the filter that took the last candidate; `empty` when there were none.
        filtered: as in `Choice`.
        usable_at: monotonic seconds at which the first cooldown ends of an endpoint that only its cooldown
            keeps out; None when waiting would not help.
    """

    def __init__(
        self, reason: str, filtered: tuple[tuple[str, int], ...] = (), usable_at: float | None = None
    ) -> None:
        self.reason = reason
        self.filtered = filtered
        self.usable_at = usable_at
        super().__init__(reason)


class Pipeline:
    """The filters, scorers and picker of one routing profile.

    Attributes:
        needs: columns of a fleet that its plugins read, beside `slots`, which is always there.
    """

    __slots__ = ("_filters", "_picker", "_score_needs", "_scorers", "needs")

    def __init__(self, filters: Sequence[Filter], scorers: Sequence[WeightedScorer], picker: Picker) -> None:
        self._filters = tuple(filters)
        self._scorers = tuple(scorers) if picker.uses_scores else ()
        self._picker = picker
        self._score_needs = frozenset[str]().union(*(scorer.needs for scorer, _ in self._scorers))
        self.needs = self._score_needs.union(*(each.needs for each in self._filters))

    def __repr__(self) -> str:
        filters = [each.name for each in self._filters]
        scorers = {scorer.name: weight for scorer, weight in self._scorers}
        return f"Pipeline(filters={filters}, scorers={scorers}, picker={self._picker.name})"

    def choose(self, request: Request, fleet: Fleet, rng: random.Random) -> Choice:
        """Decide. Pure but for a picker's own turn count and the state of `rng`; never blocks.

        Raises:
            NoCandidate: every endpoint was filtered out.
        """
        candidates = list(range(len(fleet.slots)))
        left = len(candidates)
        filtered: tuple[tuple[str, int], ...] = ()
        for each in self._filters:
            candidates = each.keep(request, fleet, candidates)
            count = len(candidates)
            if count != left:
                filtered += ((each.name, left - count),)
                left = count
        if left == 1:
            return Choice(candidates[0], 1, filtered)
        if not left:
            reason = filtered[-1][0] if filtered else "empty"
            raise NoCandidate(reason, filtered, _usable_at(request, fleet))
        totals: list[float] = []
        if self._scorers:
            scored = fleet if left == len(fleet.slots) else self._only(fleet, candidates)
            totals = self._totals(request, scored)
        elif self._picker.uses_scores:
            totals = [0.0] * left
        return Choice(self._picker.pick(fleet, candidates, totals, rng), left, filtered)

    def _only(self, fleet: Fleet, candidates: list[int]) -> Fleet:
        """Narrow to the candidates what scorers need; the other columns are empty."""
        take = itemgetter(*candidates)  # at least two, so it returns tuples
        columns: list[Any] = [
            take(column) if name in self._score_needs else ()
            for name, column in zip(_COLUMNS, fleet[1:], strict=True)
        ]
        return Fleet(fleet.now, *columns)

    def _totals(self, request: Request, candidates: Fleet) -> list[float]:
        totals: list[float] = []
        for scorer, weight in self._scorers:
            scores = scorer.score(request, candidates)
            # Three passes in C cost less than one look at each score; the sum tells NaN.
            if not (min(scores) >= 0.0 and max(scores) <= 1.0 and sum(scores) >= 0.0):
                scores = list(map(_clamp, scores))
            if not totals:
                totals = scores if weight == 1.0 else [weight * score for score in scores]
            elif weight == 1.0:
                totals = list(map(add, totals, scores))
            else:
                totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        return totals


def _clamp(score: float) -> float:
    """Cut to [0, 1]; NaN is 0."""
    if score >= 1.0:
        return 1.0
    return score if score > 0.0 else 0.0


def _usable_at(request: Request, fleet: Fleet) -> float | None:
    ends = [
        until
        for slot, state, until in zip(fleet.slots, fleet.state, fleet.cooldown_until, strict=False)
        if until > fleet.now and state not in (DOWN, DRAINING, STUCK) and slot not in request.excluded
    ]
    return min(ends, default=None)
