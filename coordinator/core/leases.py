"""Hands a grant over: from the coordinator's count to the worker's, exactly once.

Rules:
    - A grant counts from the moment it is given. While it is under way the coordinator counts it, in its own
      cells; the worker adds it to its own cells *before* it acknowledges, and only then does the coordinator
      take it off. For a moment both count it: a cap is never exceeded, at worst a slot is free a bit later.
    - It ends once: acknowledged (the worker holds the lease and gives it back itself), cancelled before the
      acknowledgement, or lost with its worker; the last two free the slot at once. An event for a grant that
      has ended, or never was, changes nothing. Messages of a worker stay in order, so these are only the
      harmless ones: a cancellation that crossed the grant, a worker that is found dead twice.
    - A worker that cancelled a request and then gets its grant drops it without a word.

Invariant: what is counted for a lane and for a pool is the number of its grants under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

import msgspec


class LeaseState(Enum):
    """Where a grant is."""

    GRANTED = "granted"
    """Given, and counted by the coordinator."""
    HELD = "held"
    """Taken: a lease, counted by its worker."""
    RETURNED = "returned"
    """Counted by nobody."""


class LeaseEvent(Enum):
    """What happens to a grant."""

    ACK = "ack"
    """The worker has added it to its own cells."""
    CANCEL = "cancel"
    """The client has left before the worker knew of the grant."""
    GONE = "gone"
    """The worker has died, or its connection is closed."""


TRANSITIONS: Final[Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]]] = {
    LeaseState.GRANTED: {
        LeaseEvent.ACK: LeaseState.HELD,
        LeaseEvent.CANCEL: LeaseState.RETURNED,
        LeaseEvent.GONE: LeaseState.RETURNED,
    },
    LeaseState.HELD: {},
    LeaseState.RETURNED: {},
}
"""State -> event -> next state; an event that is missing changes nothing."""


class Grant(msgspec.Struct, frozen=True):
    """A yes on its way to a worker.

    Attributes:
        id: of the waiter.
        worker: slot of the worker.
        lane: index of the lane.
        pool: index of the lane's pool.
    """

    id: int
    worker: int
    lane: int
    pool: int


class Ended(NamedTuple):
    """A grant that is under way no more; the coordinator takes it off its own cells.

    Attributes:
        grant: which.
        state: `HELD`, or `RETURNED`: then somebody else may run at once.
    """

    grant: Grant
    state: LeaseState


class GrantLedger:
    """The grants under way."""

    __slots__ = ("_by_worker", "_grants", "_leases", "_pending")

    def __init__(self) -> None:
        self._grants: dict[int, Grant] = {}
        self._by_worker: dict[int, dict[int, Grant]] = {}
        self._pending: Counter[int] = Counter()
        self._leases: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._grants)

    def __contains__(self, grant_id: int) -> bool:
        return grant_id in self._grants

    def __repr__(self) -> str:
        return f"GrantLedger(pending={dict(self._pending)}, leases={dict(self._leases)})"

    def pending(self, lane: int) -> int:
        """Return the grants under way in a lane: what the coordinator's pending cell holds."""
        return self._pending[lane]

    def leases(self, pool: int) -> int:
        """Return the grants under way in a pool: what the coordinator's lease cell holds."""
        return self._leases[pool]

    def give(self, grant: Grant) -> None:
        """Count a grant, before its message is sent.

        Raises:
            ValueError: a grant of this id is under way.
        """
        if grant.id in self._grants:
            raise ValueError(f"grant {grant.id} is under way already")
        self._grants[grant.id] = grant
        self._by_worker.setdefault(grant.worker, {})[grant.id] = grant
        self._pending[grant.lane] += 1
        self._leases[grant.pool] += 1

    def take(self, grant_id: int, event: LeaseEvent) -> Ended | None:
        """Apply an event; None if it changes nothing."""
        grant = self._grants.get(grant_id)
        if grant is None:
            return None
        state = TRANSITIONS[LeaseState.GRANTED].get(event)
        if state is None:
            return None
        self._end(grant)
        return Ended(grant, state)

    def lose_worker(self, worker: int) -> list[Ended]:
        """End every grant on its way to a worker that is gone."""
        lost = tuple(self._by_worker.get(worker, ()))
        return [ended for grant_id in lost if (ended := self.take(grant_id, LeaseEvent.GONE))]

    def check(self) -> None:
        """Assert the invariant; for tests."""
        assert +self._pending == Counter(grant.lane for grant in self._grants.values())
        assert +self._leases == Counter(grant.pool for grant in self._grants.values())
        assert sum(map(len, self._by_worker.values())) == len(self._grants)

    def _end(self, grant: Grant) -> None:
        del self._grants[grant.id]
        mine = self._by_worker[grant.worker]
        del mine[grant.id]
        if not mine:
            del self._by_worker[grant.worker]
        self._pending[grant.lane] -= 1
        self._leases[grant.pool] -= 1
