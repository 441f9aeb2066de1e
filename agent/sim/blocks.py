"""The KV blocks of a simulated engine, with vLLM's prefix cache. Pure.

Rules:
    - A block holds `block_size` tokens. The hash of a full block of a prompt covers everything before it, so
      an equal hash means an equal prefix.
    - A block is in use (by one sequence or several that share it), idle (in no use, still filled and found by
      its hash), or free. Usage counts blocks in use alone, as vLLM's gauge does.
    - A new sequence shares the longest run of known blocks from its start, and takes the rest from the free
      ones, then from the idle ones, longest idle first. Of one sequence, later blocks go before earlier ones.

Invariant: in use + idle + free = `num_blocks`, none negative (`check`).

A request of 2 KB touches some thirty blocks twice, and this is the largest part of its cost. So the usual
case, blocks that nobody else uses, goes through whole sets at once, and the order of the idle blocks is kept
by batches (what one sequence gave back) instead of by block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec


class Allocation(msgspec.Struct, frozen=True, gc=False):
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
        self._used: set[int] = set()  # hashes of blocks in use
        self._further_users: dict[int, int] = {}  # of them, those with several users: users beyond the first
        self._idle: dict[int, int] = {}  # hash of an idle block -> the batch that made it so
        # (batch, its hashes, next to evict last), oldest first. A block that was used again in the meantime,
        # or is idle by a later batch, stays in the older one as a dead entry.
        self._batches: deque[tuple[int, list[int]]] = deque()
        self._batch = 0
        self._entries = 0  # of all batches

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
            hashes: of its full prompt blocks, in order; at most `blocks`, all different.
            blocks: all it will need.
            most_shared: share no more than this; an engine computes at least the last token itself.
        """
        used, idle = self._used, self._idle
        woken = []
        shared = 0
        for block_hash in hashes[:most_shared]:
            if block_hash in idle:
                woken.append(block_hash)
            elif block_hash not in used:
                break
            shared += 1
        taken = len(woken) + blocks - shared
        if self.in_use + taken > self.num_blocks:
            return None
        if len(woken) < shared:
            further = self._further_users
            for block_hash in hashes[:shared]:
                if block_hash in used:
                    further[block_hash] = further.get(block_hash, 0) + 1
        for block_hash in woken:
            del idle[block_hash]
        self.in_use += taken
        excess = self.in_use + len(idle) - self.num_blocks
        if excess > 0:
            self._evict(excess)
        new = list(hashes[shared:])
        if not used.isdisjoint(new) or not idle.keys().isdisjoint(new):
            # A block that is known behind a gap stays what it is; this sequence computes its own, unnamed.
            new = [block_hash for block_hash in new if block_hash not in used and block_hash not in idle]
        used.update(new)
        used.update(woken)
        held = [*hashes[:shared], *new]
        return Allocation(shared, held, blocks - len(held))

    def release(self, allocation: Allocation, generated: Iterable[int] = ()) -> None:
        """Give a sequence's blocks back; those that have a hash stay idle.

        Args:
            allocation: not to be used again.
            generated: hashes of full blocks, all different, that continue the prompt's, filled by the answer.
        """
        used, idle, further = self._used, self._idle, self._further_users
        last = allocation.hashes
        if further and not further.keys().isdisjoint(last):
            last = []
            for block_hash in allocation.hashes:
                others = further.get(block_hash)
                if others is None:
                    last.append(block_hash)
                elif others == 1:
                    del further[block_hash]
                else:
                    further[block_hash] = others - 1
        tail = [one for one in generated if one not in used and one not in idle][: allocation.unnamed]
        self.in_use -= allocation.unnamed + len(last)
        used.difference_update(last)
        self._batch += 1
        batch = last + tail
        idle.update(dict.fromkeys(batch, self._batch))
        self._batches.append((self._batch, batch))
        self._entries += len(batch)
        if self._entries > 4 * len(idle) + 4096:
            self._drop_dead_entries()

    def forget(self) -> None:
        """Drop every idle block, as an engine's `/reset_prefix_cache` does."""
        self._idle.clear()
        self._batches.clear()
        self._entries = 0

    def check(self) -> None:
        """Raise AssertionError where the invariant does not hold."""
        assert 0 <= len(self._used) <= self.in_use, (len(self._used), self.in_use)
        assert self.in_use + len(self._idle) <= self.num_blocks, (self.in_use, self.idle, self.num_blocks)
        assert self._idle.keys().isdisjoint(self._used)
        assert self._further_users.keys() <= self._used
        assert self._entries == sum(len(hashes) for _, hashes in self._batches)
        alive = [one for batch, hashes in self._batches for one in hashes if self._idle.get(one) == batch]
        assert sorted(alive) == sorted(self._idle)

    def _evict(self, blocks: int) -> None:
        idle = self._idle
        while blocks > 0:
            batch, hashes = self._batches[0]
            victims = hashes[-blocks:]
            del hashes[-blocks:]
            self._entries -= len(victims)
            alive = [one for one in victims if idle.get(one) == batch]
            for block_hash in alive:
                del idle[block_hash]
            blocks -= len(alive)
            if not hashes:
                self._batches.popleft()

    def _drop_dead_entries(self) -> None:
        idle = self._idle
        alive = [
            (batch, [one for one in hashes if idle.get(one) == batch]) for batch, hashes in self._batches
        ]
        self._batches = deque(entry for entry in alive if entry[1])
        self._entries = len(idle)
