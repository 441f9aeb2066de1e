from __future__ import annotations

import pytest

from gateway.core import errors
from gateway.core.retry import Outcome, classify, of_status


def engine_error(status: int) -> errors.UpstreamStatus:
    return errors.from_upstream(status, b"application/json", b"{}")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422, 499])
def test_b47_client_error_is_neutral_and_not_tried_elsewhere(status: int) -> None:
    verdict = classify(engine_error(status)).verdict
    assert not verdict.may_retry
    assert not verdict.cools_down
    assert not verdict.is_failure


@pytest.mark.parametrize("status", [400, 404, 422])
def test_b49_client_error_is_no_success_that_would_end_a_series_of_failures(status: int) -> None:
    assert not classify(engine_error(status)).verdict.is_success
    assert of_status(200).verdict.is_success


@pytest.mark.parametrize("status", [429, 503])
def test_back_pressure_rests_the_endpoint_without_being_a_failure(status: int) -> None:
    verdict = classify(engine_error(status)).verdict
    assert verdict.may_retry
    assert verdict.cools_down
    assert not verdict.is_failure


@pytest.mark.parametrize("status", [500, 501, 502, 504, 599])
def test_other_server_errors_are_failures_and_not_tried_elsewhere(status: int) -> None:
    verdict = classify(engine_error(status)).verdict
    assert verdict.is_failure
    assert not verdict.may_retry


def test_connection_that_failed_before_a_byte_is_tried_elsewhere() -> None:
    verdict = classify(errors.UpstreamUnreachable()).verdict
    assert verdict.may_retry
    assert verdict.cools_down
    assert verdict.is_failure


@pytest.mark.parametrize(
    "error",
    [
        errors.UpstreamTimeout(),
        errors.UpstreamProtocol(),
        errors.UpstreamInterrupted(),
        errors.StreamBroken(),
    ],
)
def test_engine_that_may_have_served_the_request_is_a_failure_and_not_tried_elsewhere(
    error: errors.ApiError,
) -> None:
    verdict = classify(error).verdict
    assert verdict.is_failure
    assert not verdict.may_retry


@pytest.mark.parametrize(
    "error",
    [
        errors.QueueFull(),
        errors.RateLimited("tokens"),
        errors.ShuttingDown(),
        errors.NoEndpoint("m"),
        errors.BadKey(),
    ],
)
def test_what_the_gateway_refuses_itself_is_nothing_to_an_endpoint(error: errors.ApiError) -> None:
    assert classify(error) is Outcome.REFUSED_HERE
    verdict = Outcome.REFUSED_HERE.verdict
    assert verdict == type(verdict)()


def test_every_outcome_has_a_verdict() -> None:
    assert all(outcome.verdict is not None for outcome in Outcome)
