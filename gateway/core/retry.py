"""What follows from how a try at an endpoint ended: another try, a pause for the endpoint, a failure of its.

Rules:
    - Another endpoint is tried only while no byte has reached the client, and only where the request cannot
      have been served: the connection failed, or the engine itself said 429 or 503.
    - 429 and 503 of an engine are back-pressure: it rests for the cooldown, and that is no failure.
    - Other 4xx are the client's doing, and neutral: neither a failure of the endpoint nor a success that
      would end a series of failures.
    - Failures are connections that fail or break, time-outs, broken HTTP, and all other 5xx.
    - What the gateway itself refuses is never an outcome of an endpoint: it is not retried, cools nothing
      down and counts against nothing.

Source: STYLE 3.5 (column Elsewhere); TECH section 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.core import errors


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an outcome asks for.

    Attributes:
        may_retry: the request may be tried at another endpoint.
        cools_down: the endpoint leaves the candidates for the cooldown time.
        is_failure: counts against the endpoint's health.
        is_success: ends a series of failures.
    """

    may_retry: bool = False
    cools_down: bool = False
    is_failure: bool = False
    is_success: bool = False


class Outcome(Enum):
    """How a try at an endpoint ended; a closed set, used as a metric label."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    BACK_PRESSURE = "back_pressure"
    SERVER_ERROR = "server_error"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"
    INTERRUPTED = "interrupted"
    REFUSED_HERE = "refused_here"

    @property
    def verdict(self) -> Verdict:
        """What this outcome asks for."""
        return _VERDICTS[self]


_VERDICTS = {
    Outcome.OK: Verdict(is_success=True),
    Outcome.CLIENT_ERROR: Verdict(),
    Outcome.BACK_PRESSURE: Verdict(may_retry=True, cools_down=True),
    Outcome.SERVER_ERROR: Verdict(is_failure=True),
    Outcome.UNREACHABLE: Verdict(may_retry=True, cools_down=True, is_failure=True),
    Outcome.TIMEOUT: Verdict(cools_down=True, is_failure=True),
    Outcome.PROTOCOL: Verdict(is_failure=True),
    Outcome.INTERRUPTED: Verdict(is_failure=True),
    Outcome.REFUSED_HERE: Verdict(),
}


def of_status(status: int) -> Outcome:
    """Classify an engine's answer by its status."""
    if status < 400:
        return Outcome.OK
    if status in (429, 503):
        return Outcome.BACK_PRESSURE
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR


def classify(error: errors.ApiError) -> Outcome:
    """Classify the error that a try ended with."""
    if isinstance(error, errors.UpstreamStatus):
        return of_status(error.status)
    return _BY_CLASS.get(type(error), Outcome.REFUSED_HERE)


_BY_CLASS: dict[type[errors.ApiError], Outcome] = {
    errors.UpstreamUnreachable: Outcome.UNREACHABLE,
    errors.UpstreamTimeout: Outcome.TIMEOUT,
    errors.UpstreamProtocol: Outcome.PROTOCOL,
    errors.UpstreamInterrupted: Outcome.INTERRUPTED,
    errors.StreamBroken: Outcome.INTERRUPTED,
}
