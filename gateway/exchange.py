"""One request and what became of it, from the first byte of its head to its log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.connection import ClientConnection, RequestHead


@dataclass(slots=True)
class Exchange:
    """A request under way; owned by its connection's greenlet.

    Times are monotonic seconds, 0 for "not yet". Tokens are None when no engine reported them.

    Attributes:
        is_answered: bytes of the response have been handed to the client's socket, so that
            nothing else may answer.
        outcome: for metrics and log: `ok`, `client_gone`, `stream_broken`, or an error's code.
        asked_model: name in the client's body, where that is not routed by.
        served_model: name that went to the engine.
        band: name of its priority class; None until admission has looked.
        tenant: whose turn it takes inside the band.
        queue_position: its place when it began to wait; 0: it did not.
        failure: what a hot route raised, on its way to falcon's error handlers.
        retries: attempts at further endpoints.
    """

    connection: ClientConnection
    head: RequestHead
    request_id: str
    received_at: float = field(default_factory=time.monotonic)
    is_answered: bool = False
    status: int = 0
    outcome: str = "ok"
    reason: str | None = None
    model: str | None = None
    asked_model: str | None = None
    served_model: str | None = None
    pool: str | None = None
    replica: str | None = None
    is_stream: bool = False
    queue_s: float = 0.0
    dispatched_at: float = 0.0
    first_at: float = 0.0
    retries: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    failure: Exception | None = None
    band: str | None = None
    tenant: str = ""
    queue_position: int = 0

    @property
    def served_tokens(self) -> int:
        """What fairness by service charges: prompt and twice the completion."""
        return (self.prompt_tokens or 0) + 2 * (self.completion_tokens or 0)

    def own_header_lines(self) -> bytes:
        """Return the gateway's own response headers, as lines ending in CRLF."""
        if self.replica is None:
            return b"x-request-id: %b\r\n" % self.request_id.encode("ascii")
        served = f"x-llmgw-served-model: {self.served_model}\r\n" if self.served_model else ""
        position = f"x-llmgw-queue-position: {self.queue_position}\r\n" if self.queue_position else ""
        return (
            f"x-request-id: {self.request_id}\r\n"
            f"x-llmgw-replica: {self.replica}\r\n"
            f"x-llmgw-pool: {self.pool}\r\n"
            f"{served}"
            f"x-llmgw-queue-ms: {self.queue_s * 1000:.0f}\r\n"
            f"{position}"
        ).encode("latin-1", "replace")
