"""The loops of a step over many rows and blocks, compiled: one call each, where numpy needs a dozen.

Between two model steps the processor's caches are full of other things, and then each call of numpy costs a
microsecond, whatever the length of its arrays. Each loop does what its docstring says and nothing else; what is
rare (lookahead, pressure) stays in Python beside its caller.

Numba keeps what it compiled in its cache folder; the first time, or where there is none, it takes two seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit, typeof, types

from kvyard.core.plan import BoolArray, IntArray, TokenArray

F = TypeVar("F", bound=Callable[..., Any])

OLDER, NEWER = 0, 1
BARE, CACHED = 0, 1
DONE = -1


class Blocks(NamedTuple):
    """The state of a pool of n blocks; `kvyard.core.pool` says what it means."""

    stack: TokenArray
    """[n]: the bare blocks, as many as `counts[BARE]`, the next one to be taken last."""
    links: TokenArray
    """[2, n + 1]: the ring of cached blocks that nobody holds; n stands between the newest and the oldest."""
    holders: TokenArray
    """[n]: how many hold each block."""
    named: BoolArray
    """[n]: its content can be found."""
    counts: IntArray
    """[2]: bare blocks, cached blocks that nobody holds."""

    @classmethod
    def of(cls, count: int) -> Blocks:
        """So many blocks, all of them bare."""
        return cls(
            stack=np.arange(count - 1, -1, -1, dtype=np.int32),
            links=np.full((2, count + 1), count, np.int32),
            holders=np.zeros(count, np.int32),
            named=np.zeros(count, np.bool_),
            counts=np.array([count, 0], np.int64),
        )


class Filled(NamedTuple):
    """Rows whose last block has become full."""

    rows: IntArray
    counts: IntArray
    """Their full blocks."""
    blocks: IntArray
    """The last one of these."""
    tokens: TokenArray
    """[rows, block_size]: what is in it."""

    @classmethod
    def of(cls, rows: int, block_size: int) -> Filled:
        """Room for so many."""
        made, counts, blocks = (np.zeros(rows, np.int64) for _ in range(3))
        return cls(made, counts, blocks, np.zeros((rows, block_size), np.int32))


_POOL, _FILLED = typeof(Blocks.of(1)), typeof(Filled.of(1, 1))  # type: ignore[no-untyped-call]  # numba has no types
_COLUMN, _NUMBERS, _TABLE, _FLAGS = types.int64[::1], types.int32[::1], types.int32[:, ::1], types.boolean[::1]
_I = types.int64
_PAIR = types.UniTuple(_I, 2)  # type: ignore[no-untyped-call]  # numba has no types


def _compiled(*signature: Any) -> Callable[[F], F]:  # noqa: ANN401 - numba has no types
    """Compiled for these types alone, result first, when this module is imported."""
    result, *parameters = signature
    types = result(*parameters)

    def compiled(loop: F) -> F:
        made: F
        try:
            made = njit(types, cache=True, error_model="numpy")(loop)
        except Exception:  # no folder to keep it in, or what is kept there cannot be read
            made = njit(types, error_model="numpy")(loop)
        return made

    return compiled


def _part(loop: F) -> F:
    """Compiled with the loops that call it, and kept with them."""
    made: F = njit(loop, error_model="numpy")
    return made


def _direct(loop: F) -> F:
    """A compiled loop without numba's look at the types of what it is given, which costs up to 1 us.

    So they must be right: each argument of exactly the type in the signature, arrays in one piece.
    """
    (overload,) = loop.overloads.values()  # type: ignore[attr-defined]  # numba has no types
    direct: F = overload.entry_point
    return direct


# ---- blocks --------------------------------------------------------------------------------------------------


@_part
def _unlink(pool: Blocks, block: int) -> None:
    """Take a cached block that nobody holds out of the ring."""
    links = pool.links
    older, newer = links[OLDER, block], links[NEWER, block]
    links[NEWER, older] = newer
    links[OLDER, newer] = older
    pool.counts[CACHED] -= 1


@_part
def _link(pool: Blocks, block: int) -> None:
    """Put a cached block into the ring as the newest."""
    links = pool.links
    end = len(pool.stack)
    newest = links[OLDER, end]
    links[OLDER, block], links[NEWER, block] = newest, end
    links[NEWER, newest] = block
    links[OLDER, end] = block
    pool.counts[CACHED] += 1


@_part
def _pop(pool: Blocks) -> int:
    """The next free block, for one holder; there is one."""
    counts = pool.counts
    if counts[BARE]:
        counts[BARE] -= 1
        block = int(pool.stack[counts[BARE]])
    else:
        block = int(pool.links[NEWER, len(pool.stack)])
        _unlink(pool, block)
    pool.holders[block] = 1
    return block


@_compiled(_I, _POOL, _TABLE, _I, _I, _I)
def _take(pool: Blocks, tables: TokenArray, row: int, begin: int, end: int) -> int:
    """Put free blocks into a row's table from `begin` to `end`; there are as many.

    Those before the place that is returned were bare, the others have content that must be forgotten.
    """
    bare = min(begin + int(pool.counts[BARE]), end)
    for at in range(begin, end):
        tables[row, at] = _pop(pool)
    return bare


@_compiled(types.void, _POOL, _NUMBERS)
def _share(pool: Blocks, hits: TokenArray) -> None:
    """One more holder for each of these cached blocks."""
    for block in hits:
        if not pool.holders[block]:
            _unlink(pool, block)
        pool.holders[block] += 1


@_compiled(_I, _POOL, _NUMBERS)
def _release(pool: Blocks, table: TokenArray) -> int:
    """One holder less for each block of `table`; the first one that nobody holds, which ends it, or DONE.

    Of those that come free the bare ones go on the stack, the tail last, and the others into the ring, the head last.
    """
    for block in table:
        if not pool.holders[block]:
            return int(block)
        pool.holders[block] -= 1
        if not pool.holders[block] and not pool.named[block]:
            pool.stack[pool.counts[BARE]] = block
            pool.counts[BARE] += 1
    for at in range(len(table) - 1, -1, -1):
        block = table[at]
        if not pool.holders[block] and pool.named[block]:
            _link(pool, block)
    return DONE


@_compiled(_I, _POOL, _COLUMN, _COLUMN, _TABLE, _I)
def _release_rows(pool: Blocks, rows: IntArray, capacity: IntArray, tables: TokenArray, block_size: int) -> int:
    """`release` for the tables of these rows."""
    for row in rows:
        fault = _release(pool, tables[row, : capacity[row] // block_size])
        if fault != DONE:
            return fault
    return DONE


# ---- rows ----------------------------------------------------------------------------------------------------


@_compiled(_PAIR, _POOL, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _TABLE, _NUMBERS, _I, _I, _I)
def _place_decodes(
    pool: Blocks,
    rows: IntArray,
    total: IntArray,
    capacity: IntArray,
    granted: IntArray,
    placed_step: IntArray,
    picked: IntArray,
    tables: TokenArray,
    reclaimed: TokenArray,
    block_size: int,
    step: int,
    picks: int,
) -> tuple[int, int]:
    """Grant a token to each of `rows` in order, and a free block to those whose blocks are full.

    Ends early when a block is needed and none is free. Returns the rows placed, and how many blocks with content
    were taken for them, which are put into `reclaimed`.
    """
    cached = 0
    for at in range(len(rows)):
        row = rows[at]
        held = capacity[row]
        if total[row] > held:
            if not pool.counts[BARE] + pool.counts[CACHED]:
                return at, cached
            bare = pool.counts[BARE] > 0
            block = _pop(pool)
            if not bare:
                reclaimed[cached] = block
                cached += 1
            tables[row, held // block_size] = block
            capacity[row] = held + block_size
        granted[row] = 1
        placed_step[row] = step
        picked[picks + at] = row
    return len(rows), cached


@_compiled(_I, _COLUMN, _COLUMN, _TABLE, _TABLE, _FILLED)
def _find_filled(rows: IntArray, total: IntArray, tables: TokenArray, tokens: TokenArray, out: Filled) -> int:
    """How many of `rows` fill a block with their last known token; they are told in `out`."""
    found, size = 0, out.tokens.shape[1]
    for row in rows:
        upto = total[row]
        if upto % size:
            continue
        out.rows[found], out.counts[found] = row, upto // size
        out.blocks[found] = tables[row, upto // size - 1]
        for at in range(size):
            out.tokens[found, at] = tokens[row, upto - size + at]
        found += 1
    return found


@_compiled(_I, _COLUMN, _FLAGS, _COLUMN)
def _compact(rows: IntArray, live: BoolArray, out: IntArray) -> int:
    """Those of `rows` that are live, in order; how many there are."""
    kept = 0
    for row in rows:
        if live[row]:
            out[kept] = row
            kept += 1
    return kept


@_compiled(types.void, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _FLAGS)
def _gather(
    rows: IntArray,
    id: IntArray,
    granted: IntArray,
    computed: IntArray,
    total: IntArray,
    out_ids: IntArray,
    out_granted: IntArray,
    out_computed: IntArray,
    out_samples: BoolArray,
) -> None:
    """A plan's columns for `rows`: a row samples when its chunk reaches its last known token."""
    for at in range(len(rows)):
        row = rows[at]
        out_ids[at] = id[row]
        out_granted[at] = granted[row]
        out_computed[at] = computed[row]
        out_samples[at] = computed[row] + granted[row] == total[row]


@_compiled(
    _PAIR, _COLUMN, _COLUMN, _COLUMN, _FLAGS, _COLUMN, _COLUMN, _COLUMN, _FLAGS, _TABLE, _NUMBERS,
    _FLAGS, _COLUMN, _FLAGS,
)  # fmt: skip
def _take_in(
    rows: IntArray,
    granted: IntArray,
    computed_before: IntArray,
    samples: BoolArray,
    computed: IntArray,
    total: IntArray,
    limit: IntArray,
    prompt: BoolArray,
    contents: TokenArray,
    tokens: TokenArray,
    stop: BoolArray,
    over: IntArray,
    stopped: BoolArray,
) -> tuple[int, int]:
    """What a step computed, and the next of `tokens` for each of `rows` that samples.

    There is a token and a stop flag for each that samples. Whoever stops or is at its length is put into `over`, and
    into `stopped` whether it stops. Returns how many of them there are, and how many prompts ended. Where `contents`
    has no columns, tokens are not kept.
    """
    place, ended, prompts = 0, 0, 0
    keep = contents.shape[1] > 0
    for at in range(len(rows)):
        row = rows[at]
        upto = computed_before[at] + granted[at]
        computed[row] = upto
        if not samples[at]:
            continue
        if prompt[row]:
            prompt[row] = False
            prompts += 1
        if keep:
            contents[row, upto] = tokens[place]
        total[row] = upto + 1
        if stop[place] or upto + 1 >= limit[row]:
            over[ended], stopped[ended] = row, stop[place]
            ended += 1
        place += 1
    return ended, prompts


NO_CONTENTS: TokenArray = np.zeros((1, 0), np.int32)
"""For `take_in` where only lengths are known."""


# ---- what the core calls ----------------------------------------------------------------------------------------

take = _direct(_take)
share = _direct(_share)
release = _direct(_release)
release_rows = _direct(_release_rows)
place_decodes = _direct(_place_decodes)
find_filled = _direct(_find_filled)
compact = _direct(_compact)
gather = _direct(_gather)
take_in = _direct(_take_in)
