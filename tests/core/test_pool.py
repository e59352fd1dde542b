"""The block pool: conservation, the exact order of the free blocks, and sharing."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core.loops import YOUNGER
from kvyard.core.pool import BlockPool
from kvyard.core.prefix import PrefixIndex


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def cached_pool(blocks: int) -> tuple[BlockPool, PrefixIndex]:
    pool = BlockPool(blocks, cached=True)
    assert pool.index is not None
    return pool, pool.index


def publish(index: PrefixIndex, block: int, name: bytes) -> None:
    index.publish(np.array([block], np.int32), name)


def test_a_fresh_pool_hands_out_the_blocks_in_order() -> None:
    pool = BlockPool(5)
    assert pool.take(2) == [0, 1]
    assert pool.take(3) == [2, 3, 4]
    assert (pool.free, pool.used) == (0, 5)


@pytest.mark.parametrize("shared", [False, True])
def test_bare_blocks_are_a_stack_and_the_tail_goes_first(shared: bool) -> None:
    pool = cached_pool(8)[0] if shared else BlockPool(8)
    table = pool.take(4)
    pool.release(table)
    assert pool.take(4) == table[::-1]


def test_bare_blocks_go_before_cached_ones_and_cached_ones_by_age() -> None:
    pool, index = cached_pool(6)
    first, second = pool.take(2), pool.take(2)
    for block in first + second:
        publish(index, block, digest(block))
    pool.release(second)
    pool.release(first)
    assert pool.free == 6
    assert pool.free_cached == 4
    assert pool.take(2) == [4, 5], "the bare ones"
    # Then the least recently used: what was released first, its tail before its head.
    assert pool.take(4) == [*second[::-1], *first[::-1]]
    assert index.evicted == 4


def test_half_published_tables_split_into_both_kinds() -> None:
    pool, index = cached_pool(4)
    table = pool.take(3)
    publish(index, table[0], digest(0))
    pool.release(table)
    assert pool.free_cached == 1
    assert pool.take(3) == [2, 1, 3]


def test_a_shared_block_is_free_when_its_last_holder_goes() -> None:
    pool, index = cached_pool(3)
    table = pool.take(2)
    publish(index, table[0], digest(0))
    pool.share(table[:1])
    assert pool.exclusive(table) == 1
    pool.release(table)
    assert pool.used == 1
    pool.release(table[:1])
    assert (pool.used, pool.free_cached) == (0, 1)
    assert pool.idle(table[:1]) == 1
    pool.share(table[:1])
    assert (pool.used, pool.free_cached) == (1, 0)
    assert pool.idle(table[:1]) == 0


def test_prefix_03_a_block_with_a_new_owner_has_lost_its_name() -> None:
    pool, index = cached_pool(1)
    (block,) = pool.take(1)
    publish(index, block, digest(7))
    pool.release([block])
    assert index.find(digest(7)) == block
    assert pool.take(1) == [block]
    assert index.find(digest(7)) is None


def test_more_than_there_is_cannot_be_taken() -> None:
    with pytest.raises(RuntimeError, match="asked of a pool"):
        BlockPool(2).take(3)


def test_the_audit_finds_what_is_wrong() -> None:
    pool = BlockPool(4)
    table = pool.take(2)
    assert pool.audit([table]) == []
    lost = ["block 0 counts 1 holders and has 0", "block 1 counts 1 holders and has 0"]
    assert pool.audit([]) == ["2 blocks are neither held nor free", *lost]
    assert pool.audit([table, table]) == ["block 0 counts 1 holders and has 2", "block 1 counts 1 holders and has 2"]
    pool.release(table)
    pool.state.stack[0] = table[0]
    assert "a block is free twice" in pool.audit([])


def test_the_audit_finds_a_name_that_leads_nowhere() -> None:
    pool, index = cached_pool(4)
    table = pool.take(3)
    for block in table:
        publish(index, block, digest(1))
    assert pool.audit([table]) == []
    lost = "not all of the blocks [0, 1, 2], which have one digest, can be found"
    heads = pool.state.heads.copy()
    pool.state.heads[:] = -1
    assert pool.audit([table]) == ["the prefix index and the blocks differ in which digests there are", lost]
    pool.state.heads[:] = heads
    pool.state.entries[1, YOUNGER] = 0
    assert pool.audit([table]) == [lost]
    pool.state.named[3] = True
    assert "a bare block has content" in pool.audit([table])


def test_a_pool_that_does_not_cache_keeps_nothing_for_it() -> None:
    pool = BlockPool(1000)
    assert pool.index is None
    assert pool.state.entries.size + pool.state.heads.size < 10


def test_a_block_that_nobody_holds_cannot_be_given_back() -> None:
    pool = BlockPool(4)
    table = pool.take(2)
    pool.release(table)
    with pytest.raises(RuntimeError, match="block 0 was given back although nobody holds it"):
        pool.release(table)
    assert pool.audit([]) == []


@settings(max_examples=100)
@given(blocks=st.integers(1, 20), seed=st.integers(0, 2**32), shared=st.booleans())
def test_blocks_are_conserved_whatever_happens(blocks: int, seed: int, shared: bool) -> None:
    random = Random(seed)
    pool = BlockPool(blocks, cached=shared)
    index = pool.index
    tables: list[list[int]] = []
    for _ in range(60):
        free_before = pool.free
        action = random.random()
        if action < 0.4:
            count = random.randrange(free_before + 1)
            taken = pool.take(count)
            assert len(set(taken)) == count
            assert pool.free == free_before - count
            tables.append(taken)
        elif action < 0.6 and tables:
            pool.release(tables.pop(random.randrange(len(tables))))
        elif action < 0.8 and index is not None:
            named = [block for block in range(blocks) if index.digest(block) is not None]
            hits = random.sample(named, random.randrange(len(named) + 1))
            idle = pool.idle(hits)
            pool.share(hits)
            assert pool.free == free_before - idle
            tables.append(hits)
        elif index is not None and tables:
            for block in random.choice(tables):
                publish(index, block, digest(random.randrange(6)))
        assert pool.audit(tables) == []
        assert pool.used + pool.free == blocks
    for table in tables:
        pool.release(table)
    assert pool.used == 0
    assert sorted(pool.take(blocks)) == list(range(blocks))
