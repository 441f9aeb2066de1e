"""What follows from looks at an endpoint; a scripted sequence of answers stands for the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.core.contract import mapping_for
from coordinator.core.health import Health
from coordinator.core.judge import MODELS_VALID_S, EndpointJudge, Report, Told
from coordinator.core.look import Answer, Failure, Look, Reply
from tests.support.clock import FakeClock

CORPUS = Path(__file__).parents[2] / "corpus" / "metrics"
OK = Answer(200)
LISTED = Answer(200, b'{"data":[{"id":"m","max_model_len":4096}]}')
EMPTY = Answer(200, b'{"data":[]}')


def metrics(
    *, waiting: str = "2", running: str = "3", kv: str | None = "0.5", generated: int = 100
) -> Answer:
    lines = [
        f"vllm:num_requests_waiting {waiting}",
        f"vllm:num_requests_running {running}",
        f"vllm:generation_tokens_total {generated}",
        *([f"vllm:kv_cache_usage_perc {kv}"] if kv is not None else []),
    ]
    return Answer(200, "\n".join(lines).encode())


class Bench:
    """A judge, and a clock that moves two seconds per look."""

    def __init__(self, clock: FakeClock, *, engine: str = "vllm", state: Health = Health.UNKNOWN) -> None:
        self.clock = clock
        self.judge = EndpointJudge(
            engine=engine, served_model="m", mapping=mapping_for(engine), now=clock.now, state=state
        )

    def look(
        self, health: Reply = OK, models: Reply | None = LISTED, metrics_: Reply | None = None
    ) -> Report:
        now = self.clock.advance(2.0)
        asked = models if self.judge.wants_models(now) else None
        return self.judge.take(Look(health, asked, metrics() if metrics_ is None else metrics_), now)


@pytest.fixture
def bench(clock: FakeClock) -> Bench:
    return Bench(clock)


def told(report: Report) -> list[Told]:
    return [notice.told for notice in report.notices]


def test_healthy_engine_with_its_model_and_metrics_is_ready(bench: Bench) -> None:
    report = bench.look()
    assert (report.health, report.reason, report.has_fresh_metrics) == (Health.READY, "", True)
    assert (report.stats.waiting, report.stats.running, report.stats.kv_usage) == (2, 3, 0.5)
    assert report.max_context == 4096


def test_b103_restarting_engine_is_ready_only_when_its_model_is_listed_again(bench: Bench) -> None:
    bench.look()
    refused = bench.look(Failure.REFUSED, None)
    loading = bench.look(OK, EMPTY)
    back = bench.look(OK, LISTED)
    assert [refused.health, loading.health, back.health] == [Health.DOWN, Health.DOWN, Health.READY]
    assert [refused.reason, loading.reason] == ["refused", "no_model_loaded"]


def test_b103_engine_without_its_model_is_down_from_the_first_look(bench: Bench) -> None:
    assert bench.look(OK, EMPTY).health is Health.DOWN


def test_unhealthy_engine_is_down_at_once(bench: Bench) -> None:
    bench.look()
    report = bench.look(Answer(503, b'{"error":{"message":"Loading model"}}'))
    assert (report.health, report.reason) == (Health.DOWN, "unhealthy")


def test_engine_that_refuses_the_key_is_down_and_says_so(bench: Bench) -> None:
    report = bench.look(OK, Answer(401))
    assert (report.health, report.reason) == (Health.DOWN, "key_refused")


@pytest.mark.parametrize("reply", [Answer(500, b"oops"), Failure.TIMEOUT, Failure.BROKEN])
def test_b67_endpoint_without_metrics_is_stale_for_ever_and_stays_usable(bench: Bench, reply: Reply) -> None:
    bench.look()
    reports = [bench.look(metrics_=reply) for _ in range(10)]
    assert {report.health for report in reports} == {Health.STALE}
    assert not any(report.has_fresh_metrics for report in reports)
    assert reports[-1].failures == 10
    assert [told(report) for report in reports] == [[Told.STATE], *[[]] * 9]


def test_b67_figures_of_a_stale_endpoint_are_the_last_good_ones_with_their_age(bench: Bench) -> None:
    good = bench.look()
    stale = bench.look(metrics_=Failure.TIMEOUT)
    assert stale.stats == good.stats
    assert stale.scraped_at == good.scraped_at < bench.clock.now


def test_b67_metrics_that_return_make_the_endpoint_ready_again(bench: Bench) -> None:
    bench.look(metrics_=Failure.TIMEOUT)
    report = bench.look()
    assert (report.health, report.failures, report.has_fresh_metrics) == (Health.READY, 0, True)


def test_b85_engine_without_kv_is_ready_and_warned_of_once_and_when_it_clears(bench: Bench) -> None:
    first = bench.look(metrics_=metrics(kv=None))
    second = bench.look(metrics_=metrics(kv=None))
    cleared = bench.look()
    assert first.health is Health.READY
    assert first.stats.kv_usage is None
    assert Told.VIOLATION in told(first)
    assert told(second) == []
    assert told(cleared) == [Told.VIOLATION_OVER]
    assert [notice.is_degraded for notice in cleared.notices] == [False]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_b85_engine_with_nonsense_for_running_is_stale_and_flagged(bench: Bench, value: str) -> None:
    report = bench.look(metrics_=metrics(running=value))
    assert (report.health, report.reason) == (Health.STALE, "contract_violated")
    assert [violation.field for violation in report.violations] == ["running"]


def test_violation_stays_told_while_metrics_cannot_be_read(bench: Bench) -> None:
    bench.look(metrics_=metrics(kv=None))
    bench.look(metrics_=Failure.TIMEOUT)
    assert Told.VIOLATION not in told(bench.look(metrics_=metrics(kv=None)))


def test_silent_engine_is_stale_then_down(bench: Bench) -> None:
    bench.look()
    states = [bench.look(Failure.TIMEOUT, None).health for _ in range(4)]
    assert states == [Health.STALE, Health.STALE, Health.DOWN, Health.DOWN]


def test_endpoint_an_earlier_coordinator_saw_down_stays_so_until_it_answers(clock: FakeClock) -> None:
    bench = Bench(clock, state=Health.DOWN)
    assert bench.look(Failure.TIMEOUT, None).health is Health.DOWN
    assert bench.look().health is Health.READY


def test_list_of_models_is_asked_for_now_and_then(bench: Bench) -> None:
    assert bench.judge.wants_models(bench.clock.now)
    bench.look()
    assert not bench.judge.wants_models(bench.clock.now + MODELS_VALID_S - 0.1)
    assert bench.judge.wants_models(bench.clock.now + MODELS_VALID_S)


def test_model_that_vanishes_from_a_running_engine_takes_it_out(bench: Bench) -> None:
    bench.look()
    bench.clock.advance(MODELS_VALID_S)
    assert bench.look(OK, EMPTY).health is Health.DOWN


def test_counters_that_went_back_tell_of_a_restart_between_two_looks(bench: Bench) -> None:
    bench.look(metrics_=metrics(generated=100))
    assert not bench.look(metrics_=metrics(generated=100)).is_restarted
    assert bench.look(metrics_=metrics(generated=3)).is_restarted
    assert bench.judge.wants_models(bench.clock.now)


def test_server_without_health_route_is_judged_by_its_models(bench: Bench) -> None:
    assert bench.look(Answer(404)).health is Health.READY


def test_name_that_is_only_trusted_is_told_once(clock: FakeClock) -> None:
    bench = Bench(clock, engine="llamacpp")
    weights = Answer(200, b'{"data":[{"id":"weights.gguf"}]}')
    first = bench.look(OK, weights)
    bench.clock.advance(MODELS_VALID_S)
    second = bench.look(OK, weights)
    notice = next(notice for notice in first.notices if notice.told is Told.NAME_TRUSTED)
    assert notice.detail == "m (listed: weights.gguf)"
    assert Told.NAME_TRUSTED not in told(second)


def test_recording_of_a_loaded_vllm_makes_it_ready(bench: Bench) -> None:
    text = (CORPUS / "vllm_0.32_under_load.txt").read_bytes()
    report = bench.look(metrics_=Answer(200, text))
    assert (report.health, report.violations, report.stats.waiting) == (Health.READY, (), 8)
