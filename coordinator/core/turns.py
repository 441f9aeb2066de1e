"""Whose turn it is: the tenants of one band, by requests or by service.

Rules:
    - Only tenants with waiters have a turn. A tenant that begins to wait goes to the end, so nobody gains by
      leaving and coming back.
    - `RoundRobin`: one request each, in turn. A tenant with n others gets every (n + 1)th grant at least.
    - `LeastService`: the tenant first that attained least service of late, where service is tokens (input and
      twice the output) that halve every 60 s; ties in turn. What a request costs is charged when it is
      granted, by an estimate; the rest can be charged or given back later.
    - Both cost O(1) or O(log tenants) a turn. Service that has faded is forgotten.

Sources: plan §7.2.3; llm-d's program-aware fairness (least attained service); case B69.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

HALF_LIFE_S: Final = 60.0
"""In what time attained service counts half."""

# Service below this many tokens is as good as none.
_FADED_TOKENS: Final = 1.0
# Stored service grows with time instead of fading; after so long it is scaled down, before it overflows.
_RESCALE_AFTER_S: Final = 64.0 * HALF_LIFE_S
# Outdated entries in the heap that are always allowed, so that small heaps are not rebuilt all the time.
_SLACK: Final = 64


class Turns(Protocol):
    """The order of the tenants of a band."""

    def join(self, tenant: str, now: float) -> None:
        """Give a turn to a tenant that had no waiters and now has."""
        ...

    def leave(self, tenant: str) -> None:
        """Take the turn from a tenant that has no waiters left."""
        ...

    def first(self) -> str:
        """Return whose turn it is; there is at least one tenant."""
        ...

    def served(self, tenant: str, cost: float, now: float) -> None:
        """Count a request of a tenant whose turn it was; it may have left with it."""
        ...

    def charge(self, tenant: str, cost: float, now: float) -> None:
        """Count service that a tenant got beside what it was charged; less than 0 gives some back."""
        ...

    def forget(self, now: float) -> None:
        """Drop what is no longer worth remembering; to be called now and then."""
        ...

    def order(self) -> Sequence[str]:
        """Return all tenants, first whose turn it is. O(tenants)."""
        ...


class RoundRobin:
    """One request each, in turn."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        # First is whose turn it is. An OrderedDict, since the front of a plain dict gets slow to find.
        self._order: OrderedDict[str, None] = OrderedDict()

    def join(self, tenant: str, now: float) -> None:
        """Put a tenant at the end."""
        self._order[tenant] = None

    def leave(self, tenant: str) -> None:
        """Take a tenant out."""
        del self._order[tenant]

    def first(self) -> str:
        """Return whose turn it is."""
        return next(iter(self._order))

    def served(self, tenant: str, cost: float, now: float) -> None:
        """Put a tenant that had its turn at the end."""
        if tenant in self._order:
            self._order.move_to_end(tenant)

    def charge(self, tenant: str, cost: float, now: float) -> None:
        """Do nothing: a request is a request."""

    def forget(self, now: float) -> None:
        """Do nothing: nothing is remembered of tenants without waiters."""

    def order(self) -> Sequence[str]:
        """Return the tenants in turn."""
        return tuple(self._order)


class LeastService:
    """The tenant first that attained least service of late.

    All service fades alike, so the order of tenants does not change while nobody is served. Stored is
    service x 2^(time since `_epoch` / half-life): what was served earlier stays as it is and what is served
    later counts more.
    """

    __slots__ = ("_epoch", "_heap", "_service", "_turn", "_waiting")

    def __init__(self, now: float) -> None:
        self._epoch = now
        self._service: dict[str, float] = {}
        # Tenant with waiters -> its only valid entry in the heap: (service, turn, tenant).
        self._waiting: dict[str, tuple[float, int, str]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._turn = 0

    def attained(self, tenant: str, now: float) -> float:
        """Return the service of a tenant in tokens, faded to `now`."""
        return self._service.get(tenant, 0.0) * self._fade(now)

    def join(self, tenant: str, now: float) -> None:
        """Put a tenant where its service says."""
        self._push(tenant)

    def leave(self, tenant: str) -> None:
        """Take a tenant out; its service stays."""
        del self._waiting[tenant]
        self._tidy()

    def first(self) -> str:
        """Return who has least service."""
        heap, waiting = self._heap, self._waiting
        while waiting.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2]

    def served(self, tenant: str, cost: float, now: float) -> None:
        """Charge a tenant for its request, and put it behind those of equal service."""
        self.charge(tenant, cost, now)

    def charge(self, tenant: str, cost: float, now: float) -> None:
        """Add service, or give some back; there is no less than none."""
        if now - self._epoch > _RESCALE_AFTER_S:
            self.forget(now)
        grown = self._service.get(tenant, 0.0) + cost / self._fade(now)
        if grown > 0.0:
            self._service[tenant] = grown
        else:
            self._service.pop(tenant, None)
        if tenant in self._waiting:
            self._push(tenant)
            self._tidy()

    def forget(self, now: float) -> None:
        """Drop service that has faded, and keep the stored figures small. O(tenants)."""
        fade = self._fade(now)
        left = ((tenant, grown * fade) for tenant, grown in self._service.items())
        self._service = {tenant: tokens for tenant, tokens in left if tokens >= _FADED_TOKENS}
        self._epoch = now
        # Whoever waits keeps its turn among equals.
        self._waiting = {
            tenant: (self._service.get(tenant, 0.0), turn, tenant)
            for tenant, (_, turn, _) in self._waiting.items()
        }
        self._rebuild()

    def order(self) -> Sequence[str]:
        """Return the tenants by what they attained so far."""
        return tuple(tenant for _, _, tenant in sorted(self._waiting.values()))

    def _fade(self, now: float) -> float:
        return float(0.5 ** ((now - self._epoch) / HALF_LIFE_S))

    def _push(self, tenant: str) -> None:
        self._turn += 1
        entry = (self._service.get(tenant, 0.0), self._turn, tenant)
        self._waiting[tenant] = entry
        heapq.heappush(self._heap, entry)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = list(self._waiting.values())
        heapq.heapify(self._heap)
