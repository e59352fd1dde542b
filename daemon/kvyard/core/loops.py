"""The loops of a step over many rows and blocks, compiled: one call each, where numpy needs a dozen.

Between two model steps the processor's caches are full of other things, and then each call of numpy costs a
microsecond, whatever the length of its arrays. Each loop does what its docstring says and nothing else; what is
rare (lookahead, pressure) stays in Python beside its caller. All of them are in this one file, because numba takes
what it kept for a loop as long as the loop's own file has not changed, whatever became of the parts it calls.

Numba keeps what it compiled in its cache folder; the first time, or where there is none, it takes two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit, typeof, types

from kvyard.core.plan import BoolArray, IntArray, TokenArray

F = TypeVar("F", bound=Callable[..., Any])

OLDER, NEWER, ELDER, YOUNGER, NAME = range(5)
BARE, CACHED, FORGOTTEN = 0, 1, 2
DONE = NOBODY = -1


class Blocks(NamedTuple):
    """The state of a pool of n blocks; `kvyard.core.pool` and `kvyard.core.prefix` say what it means."""

    stack: TokenArray
    """[n]: the bare blocks, as many as `counts[BARE]`, the next one to be taken last."""
    holders: TokenArray
    """[n]: how many hold each block."""
    named: BoolArray
    """[n]: it has a name, so its content can be found."""
    counts: IntArray
    """[3]: bare blocks, cached blocks that nobody holds, names forgotten since the start."""
    entries: TokenArray
    """[n + 1, 8]: what is known of a block with a name, in a row, which is one line of the processor's cache.

    OLDER and NEWER: its neighbours in the ring of cached blocks that nobody holds, in the order of their release; n
    stands between the newest and the oldest. ELDER and YOUNGER: the ring of the blocks with the same name, in the
    order in which they got it. From NAME on: the four words of its digest.
    """
    heads: TokenArray
    """[a power of two above 2n]: a hash table of the eldest block of each name, with NOBODY between.

    A name's home is its first word modulo the length; it stands there or, without a gap, behind it.
    """

    @classmethod
    def of(cls, count: int, *, cached: bool = False) -> Blocks:
        """So many blocks, all of them bare; they can get names if `cached`."""
        named = count if cached else 0
        entries = np.zeros((named + 1, 8), np.int32)
        entries[named, [OLDER, NEWER]] = named
        return cls(
            stack=np.arange(count - 1, -1, -1, dtype=np.int32),
            holders=np.zeros(count, np.int32),
            named=np.zeros(count, np.bool_),
            counts=np.array([count, 0, 0], np.int64),
            entries=entries,
            heads=np.full(1 << (2 * named).bit_length(), NOBODY, np.int32),
        )


class Filled(NamedTuple):
    """Rows whose last block has become full."""

    rows: IntArray
    counts: IntArray
    """Their full blocks."""
    blocks: TokenArray
    """The last one of these."""
    tokens: TokenArray
    """[rows, block_size]: what is in it."""

    @classmethod
    def of(cls, rows: int, block_size: int) -> Filled:
        """Room for so many."""
        made, counts = (np.zeros(rows, np.int64) for _ in range(2))
        return cls(made, counts, np.zeros(rows, np.int32), np.zeros((rows, block_size), np.int32))


_POOL, _FILLED = typeof(Blocks.of(1)), typeof(Filled.of(1, 1))  # type: ignore[no-untyped-call]  # numba has no types
_COLUMN, _NUMBERS, _TABLE, _FLAGS = types.int64[::1], types.int32[::1], types.int32[:, ::1], types.boolean[::1]
_I = types.int64
_PAIR = types.UniTuple(_I, 2)  # type: ignore[no-untyped-call]  # numba has no types


_PLAIN: dict[str, Any] = {"error_model": "numpy"}
_BARE: dict[str, Any] = {**_PLAIN, "_nrt": False}
"""Without numba's counting of references to arrays: the callers hold them, and nothing is allocated in a loop.

The counting, in every access through a tuple, makes a loop up to fifteen times slower. The option is numba's own and
not in its documentation, so it must do without.
"""


def _compiled(*signature: Any) -> Callable[[F], F]:  # noqa: ANN401 - numba has no types
    """Compiled for these types alone, result first, when this module is imported."""
    result, *parameters = signature
    signature = result(*parameters)
    # There may be no folder to keep it in, or what is kept there cannot be read.
    return partial(_first_that_works, signature, ({**_BARE, "cache": True}, _BARE, _PLAIN))


def _part(loop: F) -> F:
    """Compiled with the loops that call it, and kept with them."""
    return _first_that_works(None, (_BARE, _PLAIN), loop)


def _first_that_works(signature: Any, ways: Sequence[dict[str, Any]], loop: F) -> F:  # noqa: ANN401 - numba has no types
    """Compiled in the first of these ways in which numba does it; what the last one raises passes through."""
    for options in ways[:-1]:
        try:
            better: F = njit(signature, **options)(loop)
        except Exception:  # numba raises whatever it meets
            continue
        return better
    made: F = njit(signature, **ways[-1])(loop)
    return made


def _direct(loop: F) -> F:
    """A compiled loop without numba's look at the types of what it is given, which costs up to 1 us.

    So they must be right: each argument of exactly the type in the signature, arrays in one piece.
    """
    (overload,) = loop.overloads.values()  # type: ignore[attr-defined]  # numba has no types
    direct: F = overload.entry_point
    return direct


# ---- the names of blocks ---------------------------------------------------------------------------------------


@_part
def _seek(pool: Blocks, names: TokenArray, at: int) -> int:
    """The place in `heads` of the name whose words begin at `at`, or the empty one where it would stand."""
    heads, entries = pool.heads, pool.entries
    place = names[at] & (len(heads) - 1)
    while heads[place] != NOBODY:
        head = heads[place]
        same = True
        for word in range(4):
            same &= entries[head, NAME + word] == names[at + word]
        if same:
            break
        place = (place + 1) & (len(heads) - 1)
    return int(place)


@_part
def _clear(pool: Blocks, hole: int) -> None:
    """Empty a place in `heads`, and close the gap: what stands behind it must still be found from its home."""
    heads, entries = pool.heads, pool.entries
    mask = len(heads) - 1
    at = (hole + 1) & mask
    while heads[at] != NOBODY:
        home = entries[heads[at], NAME] & mask
        if (at - home) & mask >= (at - hole) & mask:
            heads[hole] = heads[at]
            hole = at
        at = (at + 1) & mask
    heads[hole] = NOBODY


@_part
def _name(pool: Blocks, block: int, names: TokenArray, at: int) -> None:
    """Give a block the name that begins at `at`, as the youngest of those that have it; it has none."""
    heads, entries = pool.heads, pool.entries
    place = _seek(pool, names, at)
    pool.named[block] = True
    for word in range(4):
        entries[block, NAME + word] = names[at + word]
    if heads[place] == NOBODY:
        heads[place] = block
        entries[block, ELDER] = entries[block, YOUNGER] = block
    else:
        eldest = heads[place]
        youngest = entries[eldest, ELDER]
        entries[block, ELDER], entries[block, YOUNGER] = youngest, eldest
        entries[youngest, YOUNGER] = entries[eldest, ELDER] = block


@_part
def _forget(pool: Blocks, block: int) -> None:
    """Take the name from a block that has one."""
    entries = pool.entries
    pool.named[block] = False
    pool.counts[FORGOTTEN] += 1
    place = _seek(pool, entries[block], NAME)
    elder, younger = entries[block, ELDER], entries[block, YOUNGER]
    if younger == block:
        _clear(pool, place)
        return
    entries[elder, YOUNGER], entries[younger, ELDER] = younger, elder
    if pool.heads[place] == block:
        pool.heads[place] = younger


@_compiled(_I, _POOL, _NUMBERS, _I)
def _find(pool: Blocks, names: TokenArray, number: int) -> int:
    """The eldest block with the name of this number in `names`, which has four words for each; or NOBODY."""
    return int(pool.heads[_seek(pool, names, 4 * number)])


@_compiled(types.void, _POOL, _NUMBERS, _NUMBERS, _I)
def _publish(pool: Blocks, blocks: TokenArray, names: TokenArray, begin: int) -> None:
    """Give `blocks` the names from number `begin` on; who has a name keeps it."""
    for at in range(len(blocks)):
        if not pool.named[blocks[at]]:
            _name(pool, blocks[at], names, 4 * (begin + at))


@_compiled(types.void, _POOL, _NUMBERS)
def _unpublish(pool: Blocks, blocks: TokenArray) -> None:
    """Take the names from those of `blocks` that have one."""
    for block in blocks:
        if pool.named[block]:
            _forget(pool, block)


# ---- blocks --------------------------------------------------------------------------------------------------


@_part
def _unlink(pool: Blocks, block: int) -> None:
    """Take a cached block that nobody holds out of the ring."""
    entries = pool.entries
    older, newer = entries[block, OLDER], entries[block, NEWER]
    entries[older, NEWER] = newer
    entries[newer, OLDER] = older
    pool.counts[CACHED] -= 1


@_part
def _link(pool: Blocks, block: int) -> None:
    """Put a cached block into the ring as the newest."""
    entries = pool.entries
    end = len(pool.stack)
    newest = entries[end, OLDER]
    entries[block, OLDER], entries[block, NEWER] = newest, end
    entries[newest, NEWER] = block
    entries[end, OLDER] = block
    pool.counts[CACHED] += 1


@_part
def _pop(pool: Blocks) -> int:
    """The next free block, for one holder; there is one. It will be written to, so its content is forgotten."""
    counts = pool.counts
    if counts[BARE]:
        counts[BARE] -= 1
        block = int(pool.stack[counts[BARE]])
    else:
        block = int(pool.entries[len(pool.stack), NEWER])
        _unlink(pool, block)
        _forget(pool, block)
    pool.holders[block] = 1
    return block


@_compiled(types.void, _POOL, _TABLE, _I, _I, _I)
def _take(pool: Blocks, tables: TokenArray, row: int, begin: int, end: int) -> None:
    """Put free blocks into a row's table from `begin` to `end`; there are as many."""
    for at in range(begin, end):
        tables[row, at] = _pop(pool)


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


@_compiled(_I, _POOL, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _TABLE, _I, _I, _I)
def _place_decodes(
    pool: Blocks,
    rows: IntArray,
    total: IntArray,
    capacity: IntArray,
    granted: IntArray,
    placed_step: IntArray,
    picked: IntArray,
    tables: TokenArray,
    block_size: int,
    step: int,
    picks: int,
) -> int:
    """Grant a token to each of `rows` in order, and a free block to those whose blocks are full.

    Ends early when a block is needed and none is free. Returns how many rows were placed.
    """
    for at in range(len(rows)):
        row = rows[at]
        held = capacity[row]
        if total[row] > held:
            if not pool.counts[BARE] + pool.counts[CACHED]:
                return at
            tables[row, held // block_size] = _pop(pool)
            capacity[row] = held + block_size
        granted[row] = 1
        placed_step[row] = step
        picked[picks + at] = row
    return len(rows)


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

find = _direct(_find)
publish = _direct(_publish)
unpublish = _direct(_unpublish)
take = _direct(_take)
share = _direct(_share)
release = _direct(_release)
release_rows = _direct(_release_rows)
place_decodes = _direct(_place_decodes)
find_filled = _direct(_find_filled)
compact = _direct(_compact)
gather = _direct(_gather)
take_in = _direct(_take_in)
