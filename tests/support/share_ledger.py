"""The ledger of coordinator.ledger as a few lines of Python, for tests without Redis."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.core.shares import Statement
from coordinator.ledger import SETTLE_MS


class ModelLedger:
    """A server with a clock of its own.

    Attributes:
        now_ms: its time.
        numbers: last number of each instance, and when it came.
        shares: by pool and instance.
    """

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms
        self.lose_memory()

    def lose_memory(self) -> None:
        """Be a new run of the server."""
        self.born_ms = self.now_ms
        self.numbers: dict[str, tuple[int, int]] = {}
        self.shares: dict[str, dict[str, int]] = {}

    def exchange(
        self, instance: str, number: int, statements: Mapping[str, Statement], dead: Mapping[str, int]
    ) -> dict[str, int]:
        """Take in an exchange; return what the instance holds."""
        is_settled = self.now_ms - self.born_ms >= SETTLE_MS
        if number > self.numbers.get(instance, (-1, 0))[0]:
            for name, its in dead.items():
                found, came = self.numbers.get(name, (-1, 0))
                if found == its and self.now_ms - came >= SETTLE_MS:
                    del self.numbers[name]
                    for holders in self.shares.values():
                        holders.pop(name, None)
            for pool, holders in self.shares.items():
                if pool not in statements:
                    holders.pop(instance, None)
            for pool, (floor, want, cap) in statements.items():
                holders = self.shares.setdefault(pool, {})
                others = sum(share for name, share in holders.items() if name != instance)
                free = max(cap - others - floor, 0) if is_settled else 0
                holders[instance] = floor + min(want - floor, free)
            self.numbers[instance] = (number, self.now_ms)
        return {pool: holders[instance] for pool, holders in self.shares.items() if instance in holders}
