"""The simulated engine's KV blocks: sharing, eviction order, and that none is lost."""

from __future__ import annotations

import random

from agent.sim.blocks import Allocation, BlockPool


def take(
    pool: BlockPool, hashes: list[int], blocks: int | None = None, most_shared: int = 1000
) -> Allocation:
    allocation = pool.try_allocate(hashes, len(hashes) if blocks is None else blocks, most_shared)
    assert allocation is not None
    pool.check()
    return allocation


def test_blocks_of_a_running_sequence_are_shared() -> None:
    pool = BlockPool(10)
    first = take(pool, [1, 2, 3], 4)
    second = take(pool, [1, 2, 9], 4)
    assert (first.shared, second.shared, pool.in_use) == (0, 2, 6)
    pool.release(first)
    assert (pool.in_use, pool.idle) == (4, 1)
    pool.release(second)
    assert (pool.in_use, pool.idle) == (0, 4)


def test_idle_blocks_are_found_again_and_no_longer_idle() -> None:
    pool = BlockPool(10)
    pool.release(take(pool, [1, 2, 3]))
    again = take(pool, [1, 2, 3, 4])
    assert (again.shared, pool.in_use, pool.idle) == (3, 4, 0)


def test_no_more_is_shared_than_allowed() -> None:
    pool = BlockPool(10)
    pool.release(take(pool, [1, 2, 3]))
    assert take(pool, [1, 2, 3], 4, most_shared=2).shared == 2


def test_prefix_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(20)
    pool.release(take(pool, [1, 2, 3]))
    gap = take(pool, [1, 77, 3], 3)
    assert (gap.shared, gap.hashes, gap.unnamed) == (1, [1, 77], 1)
    pool.release(gap)
    pool.check()
    assert pool.idle == 4


def test_full_pool_says_no_and_changes_nothing() -> None:
    pool = BlockPool(4)
    take(pool, [1, 2, 3])
    assert pool.try_allocate([1, 2, 8, 9], 4, 4) is None
    pool.check()
    assert (pool.in_use, pool.usage) == (3, 0.75)
    assert take(pool, [1, 2, 8]).shared == 2


def test_idle_block_that_is_needed_itself_does_not_count_as_room() -> None:
    pool = BlockPool(4)
    pool.release(take(pool, [1, 2]))
    take(pool, [8, 9])
    assert pool.try_allocate([1, 2, 3], 3, 2) is None
    pool.check()
    assert take(pool, [1, 2], 2).shared == 2


def test_longest_idle_goes_first_and_of_one_sequence_its_end() -> None:
    pool = BlockPool(6)
    pool.release(take(pool, [1, 2, 3]))
    pool.release(take(pool, [11, 12, 13]))
    pool.release(take(pool, [1]))  # block 1 is fresh again
    take(pool, [21, 22, 23])
    pool.check()
    assert pool.idle == 3
    again = pool.try_allocate([11, 12, 13], 3, 3)
    assert again is not None
    # 3 and 2 went first, then the end of the second sequence.
    assert again.shared == 2


def test_generated_blocks_can_be_found_by_the_next_turn() -> None:
    pool = BlockPool(10)
    pool.release(take(pool, [1, 2], 5), [3, 4])
    pool.check()
    assert take(pool, [1, 2, 3, 4, 5]).shared == 4


def test_no_more_generated_blocks_are_kept_than_were_taken() -> None:
    pool = BlockPool(10)
    pool.release(take(pool, [1], 2), [2, 3, 4])
    pool.check()
    assert pool.idle == 2


def test_forgetting_leaves_what_is_in_use() -> None:
    pool = BlockPool(10)
    pool.release(take(pool, [1, 2]))
    take(pool, [5])
    pool.forget()
    pool.check()
    assert (pool.idle, pool.in_use) == (0, 1)


def test_entries_of_blocks_used_over_and_over_do_not_pile_up() -> None:
    pool = BlockPool(100)
    for _ in range(5000):
        pool.release(take(pool, [1, 2, 3]))
    assert pool._entries < 5000


def test_no_block_is_lost_over_many_random_sequences() -> None:
    rng = random.Random(5)
    pool = BlockPool(60)
    running: list[Allocation] = []
    for _ in range(3000):
        if running and rng.random() < 0.5:
            pool.release(running.pop(rng.randrange(len(running))), rng.sample(range(200, 260), 2))
        else:
            # Like chained hashes: the same start, then a branch.
            branch = rng.randrange(6)
            hashes = [*range(rng.randrange(1, 5)), *(branch * 10 + 100 + i for i in range(rng.randrange(6)))]
            allocation = pool.try_allocate(hashes, len(hashes) + rng.randrange(3), rng.randrange(12))
            if allocation is not None:
                running.append(allocation)
        pool.check()
    for allocation in running:
        pool.release(allocation)
    pool.check()
    assert pool.in_use == 0
