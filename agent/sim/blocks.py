"""The KV blocks of a simulated engine, with vLLM's prefix cache. Pure.

Rules:
    - A block holds `block_size` tokens. The hash of a full block of a prompt covers everything before it, so
      an equal hash means an equal prefix.
    - A block is in use (by one sequence or several that share it), idle (in no use, still filled and found by
      its hash), or free. Usage counts blocks in use alone, as vLLM's gauge does.
    - A new sequence shares the longest run of known blocks from its start, and takes the rest from the free
      ones, then from the idle ones, longest idle first. Of one sequence, later blocks go before earlier ones.

Invariant: in use + idle + free = `num_blocks`, none negative (`check`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Allocation:
    """Blocks of one sequence; made and given back by `BlockPool`.

    Attributes:
        shared: how many of its first blocks were there already.
        hashes: its blocks that can be found by hash, in order.
        unnamed: how many more it has.
    """

    shared: int
    hashes: list[int]
    unnamed: int


class BlockPool:
    """Blocks of one engine.

    Args:
        num_blocks: size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.in_use = 0
        self._users: dict[int, int] = {}  # hash of a block in use -> sequences that use it
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.in_use / self.num_blocks if self.num_blocks else 0.0

    @property
    def idle(self) -> int:
        """Blocks that are only kept in case a prompt comes back."""
        return len(self._idle)

    def try_allocate(self, hashes: Sequence[int], blocks: int, most_shared: int) -> Allocation | None:
        """Take `blocks` blocks for a sequence; None if there are not enough.

        Args:
            hashes: of its full prompt blocks, in order; at most `blocks`.
            blocks: all it will need.
            most_shared: share no more than this; an engine computes at least the last token itself.
        """
        users, idle = self._users, self._idle
        shared = woken = 0
        for block_hash in hashes[:most_shared]:
            if block_hash in users:
                shared += 1
            elif block_hash in idle:
                shared += 1
                woken += 1
            else:
                break
        fresh = blocks - shared
        if self.in_use + woken + fresh > self.num_blocks:
            return None
        for block_hash in hashes[:shared]:
            known = users.get(block_hash)
            if known is None:
                del idle[block_hash]
                users[block_hash] = 1
            else:
                users[block_hash] = known + 1
        self.in_use += woken + fresh
        excess = self.in_use + len(idle) - self.num_blocks
        while excess > 0:
            idle.popitem(last=False)
            excess -= 1
        held = list(hashes[:shared])
        for block_hash in hashes[shared:]:
            # A block that is known behind a gap stays what it is; this sequence computes its own, unnamed.
            if block_hash not in users and block_hash not in idle:
                users[block_hash] = 1
                held.append(block_hash)
        return Allocation(shared, held, blocks - len(held))

    def release(self, allocation: Allocation, generated: Iterable[int] = ()) -> None:
        """Give a sequence's blocks back; those that have a hash stay idle.

        Args:
            allocation: not to be used again.
            generated: hashes of full blocks that continue the prompt's, filled by the answer.
        """
        users, idle = self._users, self._idle
        tail: list[int] = []
        for block_hash in generated:
            if len(tail) < allocation.unnamed and block_hash not in users and block_hash not in idle:
                tail.append(block_hash)
        for block_hash in reversed(tail):
            idle[block_hash] = None
        self.in_use -= allocation.unnamed
        for block_hash in reversed(allocation.hashes):
            left = users[block_hash] - 1
            if left:
                users[block_hash] = left
            else:
                del users[block_hash]
                idle[block_hash] = None
                self.in_use -= 1

    def forget(self) -> None:
        """Drop every idle block, as an engine's `/reset_prefix_cache` does."""
        self._idle.clear()

    def check(self) -> None:
        """Raise AssertionError where the invariant does not hold."""
        assert 0 <= len(self._users) <= self.in_use, (len(self._users), self.in_use)
        assert self.in_use + len(self._idle) <= self.num_blocks, (self.in_use, self.idle, self.num_blocks)
        assert not self._users.keys() & self._idle.keys()
        assert all(count > 0 for count in self._users.values())
