"""What follows from a look at an endpoint: its state, its figures, and what a person should be told.

Rules:
    - `/health` with 200 and the model listed make an endpoint fit; metrics that can be read make it READY
      (B103).
    - While it is fit, the list of models is asked for only now and then, and at once when the engine's
      counters went back: then another process answers than before.
    - A server without `/health` is judged by its list of models alone.
    - Figures of an endpoint that is STALE or DOWN are the last good ones; its state says what they are worth.
    - Each breach of the metric contract is told once when it begins and once when it ends, not in between,
      and not while the metrics cannot be read at all.

Sources: plan §7.6; cases B67, B85, B103.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from agent.core.contract import EngineStats, MetricMapping, Violation, parse
from coordinator.core.health import Health, HealthTracker, Sign
from coordinator.core.look import Answer, Failure, Look, Reply
from coordinator.core.models import Listing, Models, read_models

# How long a list of models is believed, in seconds.
MODELS_VALID_S = 30.0
_NO_ROUTE = frozenset({404, 405, 501})


class Told(Enum):
    """What a notice is about; the event of its log line."""

    STATE = "endpoint_state_changed"
    VIOLATION = "metric_contract_violated"
    VIOLATION_OVER = "metric_contract_restored"
    NAME_TRUSTED = "served_model_not_listed"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should be told, once.

    Attributes:
        told: what about.
        detail: closed texts and metric names, no values that change from look to look.
        is_degraded: whether it is worth a warning; else it is good news.
    """

    told: Told
    detail: str
    is_degraded: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of an endpoint after a look.

    Attributes:
        health: its state.
        before: its state before this look.
        reason: why it is not READY, from a closed set; empty if it is.
        since: monotonic seconds at which the state began.
        stats: the last figures that were read.
        max_context: tokens a request may have; None: not said.
        scraped_at: monotonic seconds of the last metrics that could be used; 0: none yet.
        failures: looks in a row whose metrics could not be used.
        violations: breaches of the contract in the last metrics that were read.
        is_restarted: another process answers than before; look again at once.
        notices: what to tell.
    """

    health: Health
    before: Health
    reason: str
    since: float
    stats: EngineStats
    max_context: int | None
    scraped_at: float
    failures: int
    violations: tuple[Violation, ...]
    is_restarted: bool = False
    notices: tuple[Notice, ...] = ()

    @property
    def has_fresh_metrics(self) -> bool:
        """Whether the figures are of the last look."""
        return self.failures == 0 and self.scraped_at > 0


class EndpointJudge:
    """Turns looks into reports; one per endpoint."""

    __slots__ = (
        "_engine",
        "_mapping",
        "_models_checked_at",
        "_name_was_trusted",
        "_served_model",
        "_tracker",
        "report",
    )

    def __init__(
        self,
        *,
        engine: str,
        served_model: str,
        mapping: MetricMapping,
        now: float,
        state: Health = Health.UNKNOWN,
    ) -> None:
        """Begin with what an earlier coordinator knew.

        Args:
            engine: kind of engine.
            served_model: name by which the engine knows the model.
            mapping: where the engine's metrics say what.
            now: monotonic seconds.
            state: as in the shared segment.
        """
        self._engine = engine
        self._served_model = served_model
        self._mapping = mapping
        self._tracker = HealthTracker(now, state)
        self._models_checked_at: float | None = None
        self._name_was_trusted = False
        self.report = Report(
            health=state,
            before=state,
            reason="" if state is Health.READY else "not_looked_at_yet",
            since=now,
            stats=EngineStats(),
            max_context=None,
            scraped_at=0.0,
            failures=0,
            violations=(),
        )

    def wants_models(self, now: float) -> bool:
        """Whether the next look must ask for the list of models."""
        checked_at = self._models_checked_at
        return checked_at is None or now - checked_at >= MODELS_VALID_S

    def take(self, look: Look, now: float) -> Report:
        """Judge one look.

        Args:
            look: every question that was due, with its answer.
            now: monotonic seconds, after the last answer.
        """
        notices: list[Notice] = []
        old = self.report
        unfit = self._unfit(look, now, notices)
        stats, scraped_at, violations = old.stats, old.scraped_at, old.violations
        is_restarted = False
        if unfit is None:
            blind = self._blind(look.metrics)
            if isinstance(look.metrics, Answer) and not blind:
                reading = parse(look.metrics.body, self._mapping)
                notices += _compare(violations, reading.violations)
                violations = reading.violations
                if reading.stats.is_schedulable:
                    is_restarted = _went_back(stats, reading.stats)
                    stats, scraped_at = reading.stats, now
                else:
                    blind = "contract_violated"
            sign, reason = (Sign.BLIND, blind) if blind else (Sign.GOOD, "")
        else:
            sign, reason = unfit
        before = self._tracker.take(sign, now)
        state = self._tracker.state
        if state is Health.DOWN or is_restarted:
            self._models_checked_at = None
        if state is not before:
            detail = f"{before.value} -> {state.value}" + (f": {reason}" if reason else "")
            notices.append(Notice(Told.STATE, detail, is_degraded=state is not Health.READY))
        self.report = replace(
            self.report,
            health=state,
            before=before,
            reason=reason,
            since=self._tracker.since,
            stats=stats,
            scraped_at=scraped_at,
            failures=0 if sign is Sign.GOOD else old.failures + 1,
            violations=violations,
            is_restarted=is_restarted,
            notices=tuple(notices),
        )
        return self.report

    def _unfit(self, look: Look, now: float, notices: list[Notice]) -> tuple[Sign, str] | None:
        """Say why no request should go there; None if nothing speaks against it."""
        health = look.health
        if isinstance(health, Failure):
            return _failed(health)
        if not health.is_ok and health.status not in _NO_ROUTE:
            return Sign.UNFIT, "unhealthy"
        if look.models is None:
            return None
        if isinstance(look.models, Failure):
            return _failed(look.models)
        models = read_models(look.models, self._served_model, self._engine)
        if models.listing.is_served:
            self._models_checked_at = now
            self.report = replace(self.report, max_context=models.max_context)
            self._tell_trusted(models, notices)
            return None
        # A list that cannot be read is a server in trouble, or none of ours; it says nothing about the model.
        sign = Sign.SILENT if models.listing is Listing.UNREADABLE else Sign.UNFIT
        return sign, models.listing.value

    def _tell_trusted(self, models: Models, notices: list[Notice]) -> None:
        if models.listing is Listing.TRUSTED and not self._name_was_trusted:
            self._name_was_trusted = True
            listed = ", ".join(models.names) or "nothing"
            notices.append(
                Notice(Told.NAME_TRUSTED, f"{self._served_model} (listed: {listed})", is_degraded=True)
            )

    def _blind(self, metrics: Reply | None) -> str:
        """Say why metrics cannot be read at all; empty if they can."""
        if isinstance(metrics, Answer):
            return "" if metrics.is_ok else "metrics_status"
        return f"metrics_{metrics.value}" if metrics is not None else "metrics_not_asked"


def _failed(failure: Failure) -> tuple[Sign, str]:
    return (Sign.GONE if failure is Failure.REFUSED else Sign.SILENT), failure.value


def _compare(old: tuple[Violation, ...], new: tuple[Violation, ...]) -> list[Notice]:
    begun = [Notice(Told.VIOLATION, str(each), is_degraded=True) for each in new if each not in old]
    over = [Notice(Told.VIOLATION_OVER, str(each), is_degraded=False) for each in old if each not in new]
    return begun + over


def _went_back(old: EngineStats, new: EngineStats) -> bool:
    """Whether a counter of the engine is smaller than it was: it has been started anew."""
    pairs = ((old.prompt_tokens, new.prompt_tokens), (old.generation_tokens, new.generation_tokens))
    return any(before is not None and after is not None and after < before for before, after in pairs)
