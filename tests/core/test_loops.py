"""The compiled loops against the same in plain numpy and Python."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core import loops
from kvyard.core.loops import (
    BARE,
    CACHED,
    DONE,
    FORGOTTEN,
    NEWER,
    NO_CONTENTS,
    Blocks,
    Filled,
    _compiled,
    _direct,
    _place_decodes,
    _publish,
    _take,
    _take_in,
    compact,
    find_filled,
    gather,
    place_decodes,
    publish,
    release,
    release_rows,
    share,
    take,
    take_in,
    unpublish,
)
from kvyard.core.plan import IntArray, TokenArray
from numba import njit, types
from numba.core import caching
from numba.core.dispatcher import Dispatcher

SIZE = 4
seeds = st.integers(0, 2**32)


def resting(pool: Blocks) -> list[int]:
    """Cached blocks that nobody holds, the oldest first."""
    end, found = len(pool.stack), []
    block = int(pool.entries[end, NEWER])
    while block != end:
        found.append(block)
        block = int(pool.entries[block, NEWER])
    return found


def bare(pool: Blocks) -> list[int]:
    """The stack, its top last."""
    blocks: list[int] = pool.stack[: pool.counts[BARE]].tolist()
    return blocks


def cached(count: int) -> Blocks:
    """A pool whose blocks can get names."""
    return Blocks.of(count, cached=True)


def taken(pool: Blocks, count: int) -> list[int]:
    """Blocks for one holder each."""
    table = np.zeros((1, count), np.int32)
    take(pool, table, 0, 0, count)
    found: list[int] = table[0].tolist()
    return found


def name(pool: Blocks, *numbers: int) -> None:
    """Give each of these blocks a name of its own."""
    names = [[number, 0, 0, 0] for number in numbers]
    publish(pool, blocks(*numbers), np.array(names, np.int32).reshape(-1), 0)


def unname(pool: Blocks, *numbers: int) -> None:
    """Take their names from those that have one."""
    unpublish(pool, blocks(*numbers))


def blocks(*numbers: int) -> TokenArray:
    """A table."""
    return np.array(numbers, np.int32)


@settings(max_examples=100)
@given(count=st.integers(1, 12), seed=seeds)
def test_the_pool_is_a_stack_and_a_queue(count: int, seed: int) -> None:
    """Against lists: the bare blocks a stack, the cached ones that nobody holds in the order of their release."""
    random, pool = Random(seed), cached(count)
    stack, line = list(range(count - 1, -1, -1)), list[int]()
    held: list[list[int]] = []
    for _ in range(40):
        free = len(stack) + len(line)
        action = random.random()
        if action < 0.5 and free:
            wanted = random.randint(1, free)
            expected = [stack.pop() for _ in range(min(wanted, len(stack)))]
            expected += [line.pop(0) for _ in range(wanted - len(expected))]
            assert taken(pool, wanted) == expected
            assert not pool.named[expected].any()
            held.append(expected)
        elif action < 0.8 and held:
            table = held.pop(random.randrange(len(held)))
            for block in table:
                (name if random.random() < 0.5 else unname)(pool, block)
            assert release(pool, blocks(*table)) == DONE
            stack += [block for block in table if not pool.named[block]]
            line += [block for block in reversed(table) if pool.named[block]]
        elif line:
            hit = random.choice(line)
            line.remove(hit)
            share(pool, blocks(hit))
            held.append([hit])
        assert (bare(pool), resting(pool)) == (stack, line)
        assert pool.counts[[BARE, CACHED]].tolist() == [len(stack), len(line)]
        assert sorted(np.flatnonzero(pool.holders).tolist()) == sorted(block for table in held for block in table)


def test_a_shared_block_comes_free_with_its_last_holder() -> None:
    pool = cached(3)
    table = taken(pool, 2)
    name(pool, table[0])
    share(pool, blocks(table[0]))
    assert pool.holders.tolist() == [2, 1, 0]
    assert release(pool, blocks(*table)) == DONE
    assert (bare(pool), resting(pool)) == ([2, 1], [])
    assert release(pool, blocks(table[0])) == DONE
    assert resting(pool) == [0]


def test_what_nobody_holds_is_told_and_changes_nothing_more() -> None:
    pool = Blocks.of(3)
    assert release(pool, blocks(1)) == 1
    assert bare(pool) == [2, 1, 0]


def columns(rows: int, random: Random, most: int) -> tuple[IntArray, IntArray]:
    """Lengths of running sequences, and the tokens that their blocks hold."""
    total = np.array([random.randint(1, most) for _ in range(rows)], np.int64)
    held = -(-(total - np.array([random.randint(0, 1) for _ in range(rows)])) // SIZE)
    return total, np.maximum(held, 0) * SIZE


@settings(max_examples=100)
@given(rows=st.integers(0, 10), free=st.integers(0, 12), named=st.integers(0, 12), seed=seeds)
def test_decodes_are_placed_as_far_as_blocks_reach(rows: int, free: int, named: int, seed: int) -> None:
    random, pool = Random(seed), cached(free)
    first = taken(pool, min(named, free))
    name(pool, *first)
    release(pool, blocks(*first))
    order = np.array(random.sample(range(12), rows), np.int64)
    total, capacity = columns(12, random, 20)
    granted, placed_step = np.zeros(12, np.int64), np.zeros(12, np.int64)
    picked = np.full(14, -1, np.int64)
    tables = np.full((12, 8), -1, np.int32)
    before, hungry = capacity.copy(), [*reversed(bare(pool)), *resting(pool)]
    expected: list[int] = []
    stack = len(bare(pool))
    for row in order.tolist():
        if total[row] > capacity[row] and len(expected) == len(hungry):
            break
        expected += [row] if total[row] > capacity[row] else []
    placed = place_decodes(pool, order, total, capacity, granted, placed_step, picked, tables, SIZE, 7, 2)
    assert pool.counts[FORGOTTEN] == max(0, len(expected) - stack)
    assert not pool.named[hungry[: len(expected)]].any()
    done = order[:placed]
    assert placed == rows or total[order[placed]] > before[order[placed]]
    assert picked[2 : 2 + placed].tolist() == done.tolist()
    assert np.flatnonzero(granted).tolist() == sorted(done.tolist())
    assert set(placed_step[done].tolist()) <= {7}
    assert [int(tables[row, before[row] // SIZE]) for row in expected] == hungry[: len(expected)]
    assert (capacity - before)[expected].tolist() == [SIZE] * len(expected)
    assert (total[done] <= capacity[done]).all()
    assert pool.counts[[BARE, CACHED]].sum() == free - len(expected)


@settings(max_examples=100)
@given(rows=st.integers(0, 10), known=st.booleans(), seed=seeds)
def test_output_is_taken_in_as_numpy_would(rows: int, known: bool, seed: int) -> None:
    random = Random(seed)
    slots = np.array(random.sample(range(12), rows), np.int64)
    computed_before = np.array([random.randint(0, 5) for _ in range(rows)], np.int64)
    granted = np.array([random.randint(1, 4) for _ in range(rows)], np.int64)
    samples = np.array([random.random() < 0.7 for _ in range(rows)], np.bool_)
    count = int(samples.sum())
    tokens = np.array([random.randint(0, 99) for _ in range(count)], np.int32)
    stop = np.array([random.random() < 0.3 for _ in range(count)], np.bool_)
    computed, total = np.full(12, -1, np.int64), np.full(12, -1, np.int64)
    limit = np.array([random.randint(1, 12) for _ in range(12)], np.int64)
    prompt = np.array([random.random() < 0.5 for _ in range(12)], np.bool_)
    contents = np.full((12, 16), -1, np.int32) if known else NO_CONTENTS
    over, stopped = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
    was_prompt, upto = prompt.copy(), computed_before + granted
    ended, prompts = take_in(
        slots, granted, computed_before, samples, computed, total, limit, prompt, contents, tokens, stop,
        over, stopped,
    )  # fmt: skip
    sampling = slots[samples]
    assert computed[slots].tolist() == upto.tolist()
    assert total[sampling].tolist() == (upto[samples] + 1).tolist()
    assert set(total[slots[~samples]].tolist()) <= {-1}
    ends = stop | (upto[samples] + 1 >= limit[sampling])
    assert over[:ended].tolist() == sampling[ends].tolist()
    assert stopped[:ended].tolist() == stop[ends].tolist()
    assert prompts == int(was_prompt[sampling].sum())
    assert not prompt[sampling].any()
    assert (prompt[slots[~samples]] == was_prompt[slots[~samples]]).all()
    if known:
        assert contents[sampling, upto[samples]].tolist() == tokens.tolist()
        assert int((contents >= 0).sum()) == count


@settings(max_examples=60)
@given(rows=st.integers(0, 10), seed=seeds)
def test_a_plans_columns_are_gathered(rows: int, seed: int) -> None:
    random = Random(seed)
    slots = np.array(random.sample(range(12), rows), np.int64)
    id, granted, computed = (np.array([random.randint(0, 3) for _ in range(12)], np.int64) for _ in range(3))
    total = np.array([random.randint(0, 6) for _ in range(12)], np.int64)
    ids, grants, before = (np.zeros(rows, np.int64) for _ in range(3))
    samples = np.zeros(rows, np.bool_)
    gather(slots, id, granted, computed, total, ids, grants, before, samples)
    assert [column.tolist() for column in (ids, grants, before)] == [
        column[slots].tolist() for column in (id, granted, computed)
    ]
    assert samples.tolist() == ((computed + granted)[slots] == total[slots]).tolist()


@settings(max_examples=60)
@given(rows=st.integers(0, 10), seed=seeds)
def test_rows_that_fill_a_block_and_rows_that_live(rows: int, seed: int) -> None:
    random = Random(seed)
    slots = np.array(random.sample(range(12), rows), np.int64)
    total = np.array([random.randint(1, 16) for _ in range(12)], np.int64)
    tables = np.arange(12 * 4, dtype=np.int32).reshape(12, 4)
    tokens = np.arange(12 * 16, dtype=np.int32).reshape(12, 16)
    out = Filled.of(12, SIZE)
    full = [row for row in slots.tolist() if total[row] % SIZE == 0]
    assert find_filled(slots, total, tables, tokens, out) == len(full)
    assert out.rows[: len(full)].tolist() == full
    assert out.counts[: len(full)].tolist() == [total[row] // SIZE for row in full]
    assert out.blocks[: len(full)].tolist() == [tables[row, total[row] // SIZE - 1] for row in full]
    assert out.tokens[: len(full)].tolist() == [tokens[row, total[row] - SIZE : total[row]].tolist() for row in full]
    live = np.array([random.random() < 0.5 for _ in range(12)], np.bool_)
    kept = np.zeros(12, np.int64)
    assert kept[: compact(slots, live, kept)].tolist() == slots[live[slots]].tolist()


def test_the_tables_of_rows_are_given_back_in_their_order() -> None:
    pool = Blocks.of(6)
    table = taken(pool, 5)
    tables = np.array([table[:3], [*table[3:], 99]], np.int32)
    assert release_rows(pool, np.array([1, 0]), np.array([12, 8]), tables, SIZE) == DONE
    assert bare(pool) == [5, 3, 4, 0, 1, 2]
    assert pool.counts[CACHED] == 0
    assert release_rows(pool, np.array([0]), np.array([12, 8]), tables, SIZE) == 0


def test_without_a_folder_to_keep_it_in_a_loop_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    def double(value: int) -> int:
        return 2 * value

    with pytest.raises(RuntimeError, match="cannot cache"):
        njit(types.int64(types.int64), cache=True)(double)
    assert _direct(_compiled(types.int64, types.int64)(double))(21) == 42


@pytest.mark.parametrize("loop", [_take, _publish, _place_decodes, _take_in], ids=lambda loop: loop.__name__)
def test_no_loop_counts_references(loop: Dispatcher) -> None:
    """With the counting, a loop takes up to 15 times as long; the option against it is numba's own."""
    assert loop.targetoptions["_nrt"] is False
    (signature,) = loop.nopython_signatures
    counts = []
    for options in (loops._PLAIN, loops._BARE):  # compiled anew: numba does not show the code of what it has kept
        (assembly,) = njit(signature, **options)(loop.py_func).inspect_asm().values()
        counts.append("NRT_decref" in assembly)
    assert counts == [True, False]


def test_a_numba_without_that_option_compiles_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loops._BARE, "_nrt_is_gone", False)

    def double(value: int) -> int:
        return 2 * value

    assert _direct(_compiled(types.int64, types.int64)(double))(21) == 42
