"""Splits the hard cap of a pool among the instances of a cluster.

A *share* is how much of the cap an instance may use. The ledger (coordinator.ledger, in Redis) holds one per
instance and pool; the share *in force* is what this instance's workers see. An exchange states to the ledger
what the instance uses (`floor`) and what it would like (`want`), and brings back what it holds.

Invariant: what an instance holds in the ledger is never less than what it uses, that is the larger of its
share in force and its leases; and the ledger grants only what nobody holds. So the cap is never exceeded,
whichever messages are lost, late or repeated. It rests on the order of steps:

    - down: first in force, here; then, once fewer leases run, in the ledger. `PoolShare.state`
    - up: first in the ledger; then in force, when its answer to the *last* statement is here.
      `PoolShare.accept`
    - no answer: nothing changes here. Without Redis everyone keeps what is in force, and nobody gets more.

Leases as they are read may be more than what runs: a worker writes one down before it knows whether there is
room, and takes it back if not. So what is stated of them is not ours to use: only what the ledger grants on
top is, since then it has found the sum to be below the cap.

`plan_shares` decides who should have what. It needs no agreement: instances that see different figures plan
differently for a moment, and the ledger still refuses what is not free.

Rules of the plan:
    - Nobody gives while nobody lacks.
    - What is scarce goes to waiters, a higher band first, whatever instance it waits at; within a band by
      turns of the waiting tenants. Requests that run come after all waiters: they are not stopped, but what
      they give back goes to the waiter whose turn it is, and not to whoever arrives next at the same
      instance.
    - The rest is spread evenly, so that every instance has a fast path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec


class Need(msgspec.Struct, frozen=True):
    """What an instance has and lacks in a pool.

    Attributes:
        held: its share.
        leases: requests that run or are about to.
        waiters: by band, requests that nothing holds back but the share.
        tenants: by band, distinct tenants of those.
    """

    held: int = 0
    leases: int = 0
    waiters: tuple[int, ...] = ()
    tenants: tuple[int, ...] = ()

    @property
    def free(self) -> int:
        """How many requests may start without asking anybody."""
        return max(self.held - self.leases, 0)


class Statement(NamedTuple):
    """What an instance tells the ledger of a pool: it uses `floor`, would like `want` >= floor, of `cap`."""

    floor: int
    want: int
    cap: int


def plan_shares(cap: int, needs: Mapping[str, Need]) -> dict[str, int]:
    """Return the share that each instance should have; together never more than `cap`.

    Args:
        cap: of the pool.
        needs: by instance; the same figures give the same plan wherever it is made.
    """
    names = sorted(needs)
    if not names:
        return {}
    held = sum(need.held for need in needs.values())
    spare = cap - sum(need.leases for need in needs.values())
    # Half of an even part is enough of a fast path; a lease more or less moves no share.
    lacks = any(any(need.waiters) or 2 * need.free < spare // len(names) for need in needs.values())
    if held == cap and not lacks:
        return {name: needs[name].held for name in names}
    plan = dict.fromkeys(names, 0)
    left = cap
    for band in range(max(len(need.waiters) for need in needs.values())):
        wants = {name: _at(needs[name].waiters, band) for name in names}
        turns = {name: max(_at(needs[name].tenants, band), 1) for name in names}
        left -= _deal(plan, wants, turns, left)
    running = {name: needs[name].leases for name in names}
    left -= _deal(plan, running, running, left)
    _deal(plan, dict.fromkeys(names, left), dict.fromkeys(names, 1), left)
    return plan


def _at(figures: Sequence[int], band: int) -> int:
    return figures[band] if band < len(figures) else 0


def _deal(plan: dict[str, int], wants: Mapping[str, int], weights: Mapping[str, int], amount: int) -> int:
    """Add to `plan` what everybody wants, or of `amount` a part by weight where that is too little.

    Returns:
        How much was dealt.
    """
    open_wants = {name: want for name, want in wants.items() if want > 0}
    left = amount
    while left > 0 and open_wants:
        total = sum(weights[name] for name in open_wants)
        # The part of whoever wants no more than that goes back to the others.
        modest = [name for name, want in open_wants.items() if want * total <= left * weights[name]]
        if not modest:
            # Largest remainders, so that the parts add up.
            parts = {name: divmod(left * weights[name], total) for name in open_wants}
            extra = left - sum(part for part, _ in parts.values())
            order = sorted(open_wants, key=lambda name: (-parts[name][1], name))
            for rank, name in enumerate(order):
                plan[name] += parts[name][0] + (rank < extra)
            return amount
        for name in modest:
            want = open_wants.pop(name)
            plan[name] += want
            left -= want
    return amount - left


class PoolShare:
    """This instance's side of one pool: the order of steps that keeps the invariant.

    Attributes:
        cap: of the pool, for the cluster.
        in_force: what the workers see. The caller publishes it after every call that changes it, and lets the
            store be seen by all before it reads the leases for `state`.
    """

    __slots__ = ("_floor", "_most", "_target", "cap", "in_force")

    def __init__(self, cap: int, in_force: int = 0) -> None:
        """Start with what the workers see already (a coordinator that comes back), else with nothing."""
        self.cap = cap
        self.in_force = min(in_force, cap)
        self._target = self.in_force
        # Of the last statement; and what surely runs at most: of a predecessor's leases nothing is known.
        self._floor = self.in_force
        self._most: float = math.inf

    def aim(self, target: int) -> None:
        """Take over a plan: lower what is in force at once; what is more is asked for with `state`."""
        self._target = max(min(target, self.cap), 0)
        self.in_force = min(self.in_force, self._target)

    def state(self, leases: int) -> Statement:
        """Return what to tell the ledger.

        Args:
            leases: read after `in_force` was published; those above it are still to end, or are tries.
        """
        floor = int(max(self.in_force, min(leases, self._most)))
        self._floor = self._most = floor
        return Statement(floor, max(self._target, floor), self.cap)

    def accept(self, held: int) -> None:
        """Take over the answer to the last `state`; one to an earlier statement must not come here."""
        if held > self._floor:
            self.in_force = max(self.in_force, min(held, self._target))
            self._most = max(self._floor, self.in_force)
