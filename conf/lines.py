"""The lines of requests; `conf.log` writes them.

Apart from it, because that is compiled: mypyc loses the keywords of a msgspec.Struct.
"""

from __future__ import annotations

import msgspec


class PlainLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is written of one request in plain proxy mode, behind `ts`. `None`: there was no such thing.

    Attributes:
        upstream: name of the upstream it went to, the endpoint's id.
        priority: as the client asked (`interactive`, `background`); `tenant`, `surface` and `user` are the
            client's `x-tenant-id`, `x-surface` and `x-user-id`.
        model: as the client asked.
        status: HTTP status; 499 where the client went away.
        queue_ms, upstream_ms: milliseconds, see `milliseconds`.
    """

    method: str
    path: str
    upstream: str | None = None
    priority: str | None = None
    tenant: str | None = None
    surface: str | None = None
    user: str | None = None
    model: str | None = None
    status: int
    queue_ms: float = 0.0
    upstream_ms: float | None = None
    streamed: bool = False


class AccessLine(PlainLine, frozen=True, kw_only=True):
    """What is written of one request.

    Attributes:
        served_model: as the engine was told.
        outcome: closed set, as in the metrics; `reason`: detail of an error.
        ttft_ms, duration_ms: milliseconds.
        bytes_out: body bytes sent to the client.
    """

    request_id: str
    outcome: str
    duration_ms: float
    served_model: str | None = None
    reason: str | None = None
    band: str | None = None
    pool: str | None = None
    replica: str | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    bytes_out: int = 0
    retries: int = 0
