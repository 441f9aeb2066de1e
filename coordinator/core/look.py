"""One look at an endpoint: what its engine answered to each question, or why it did not.

The shell (coordinator.scrape) asks, the core judges; these are the facts that pass between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Failure(Enum):
    """Why a question has no answer."""

    REFUSED = "refused"  # nobody listens there
    TIMEOUT = "timeout"  # no connection, or no whole answer, in time
    UNREACHABLE = "unreachable"  # no route, no such name
    TLS = "tls"  # a certificate that is not trusted, or no TLS at all
    BROKEN = "broken"  # the connection ended early, or what came is not HTTP
    TOO_LARGE = "too_large"  # more bytes than anything we ask for can have


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response, whole.

    Attributes:
        status: as sent.
        body: decoded of its transfer coding; at most what the shell accepts.
    """

    status: int
    body: bytes = b""

    @property
    def is_ok(self) -> bool:
        """Whether the status is 200, the only one that these questions have for yes."""
        return self.status == 200


Reply = Answer | Failure


@dataclass(frozen=True, slots=True)
class Look:
    """What one round of questions brought.

    Attributes:
        health: of `/health`, always asked.
        models: of `/v1/models`; None: not asked.
        metrics: of `/metrics`; None: not asked, since the answers before it left nothing to learn.
    """

    health: Reply
    models: Reply | None = None
    metrics: Reply | None = None
