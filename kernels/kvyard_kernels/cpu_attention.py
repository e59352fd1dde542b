"""Paged attention on the CPU: one routine with one order over the keys, for chunks and decodes alike.

A query's result depends on its position and its keys alone: every row has its own chain of multiply-adds
over the keys in ascending order, whichever rows share its tile. Softmax is taken in two passes over scores
that stay in cache, so nothing is rescaled on the way.

Layout of the pool, chosen for whole-vector loads: one block of one layer and one key/value head is
`keys [d, bs]` (transposed) or `values [bs, dp]`, dp being d rounded up to 16.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kvyard_kernels.cpu_memory import double_bits, f32, i32, i64, narrow, take
from kvyard_kernels.cpu_tiles import exponential_tile, score_tile, value_tile

PARAMETERS = (
    "counter", "lane", "items", "tiles", "starts", "lengths", "tables", "table_stride", "q", "heads", "kv_heads",
    "width", "keys", "values", "block_stride", "head_stride", "value_width", "block_size", "bf16", "scale", "window",
    "out", "out_bf16", "scratch", "scratch_stride", "tile_rows",
)  # fmt: skip
"""Names of the int64 parameters, in order."""

_MINUS_INFINITY = np.float32(-np.inf)

_score_12, _score_4, _score_3, _score_2, _score_1 = (score_tile(n, False) for n in (12, 4, 3, 2, 1))
_score_12h, _score_4h, _score_3h, _score_2h, _score_1h = (score_tile(n, True) for n in (12, 4, 3, 2, 1))
_value_4x4, _value_3x4, _value_1x4, _value_1x1 = (
    value_tile(r, v, False) for r, v in ((4, 4), (3, 4), (1, 4), (1, 1))
)
_value_4x4h, _value_3x4h, _value_1x4h, _value_1x1h = (
    value_tile(r, v, True) for r, v in ((4, 4), (3, 4), (1, 4), (1, 1))
)


@njit
def _together(left: int) -> int:
    """How many of `left` query rows are scored at once."""
    return 12 if left >= 12 else min(left, 4)


@njit
def _score(rows: int, q: int, keys: int, stride: int, width: int, out: int, out_stride: int, bf16: int) -> None:
    """Scores of `rows` queries against 16 keys; any split of the rows gives the same bits."""
    row = 0
    while row < rows:
        count = _together(rows - row)
        at, to = q + row * width * 4, out + row * out_stride * 4
        if count == 12:
            if bf16:
                _score_12h(at, keys, stride, width, to, out_stride)
            else:
                _score_12(at, keys, stride, width, to, out_stride)
        elif count == 4:
            if bf16:
                _score_4h(at, keys, stride, width, to, out_stride)
            else:
                _score_4(at, keys, stride, width, to, out_stride)
        elif count == 3:
            if bf16:
                _score_3h(at, keys, stride, width, to, out_stride)
            else:
                _score_3(at, keys, stride, width, to, out_stride)
        elif count == 2:
            if bf16:
                _score_2h(at, keys, stride, width, to, out_stride)
            else:
                _score_2(at, keys, stride, width, to, out_stride)
        elif bf16:
            _score_1h(at, keys, stride, width, to, out_stride)
        else:
            _score_1(at, keys, stride, width, to, out_stride)
        row += count


@njit
def _weigh(
    rows: int, weights: int, weight_stride: int, values: int, value_width: int, keys: int, out: int, bf16: int
) -> None:
    """Add the weighted values of `keys` keys to `out` `[rows, value_width]`."""
    size = 2 if bf16 else 4
    row = 0
    while row < rows:
        left = rows - row
        take_rows = 4 if left >= 4 else (3 if left == 3 else 1)
        at, to = weights + row * weight_stride * 4, out + row * value_width * 4
        column = 0
        while column < value_width:
            source, target = values + column * size, to + column * 4
            if value_width - column < 64:
                for r in range(take_rows):
                    one, into = at + r * weight_stride * 4, target + r * value_width * 4
                    if bf16:
                        _value_1x1h(one, weight_stride, source, value_width, keys, into, value_width)
                    else:
                        _value_1x1(one, weight_stride, source, value_width, keys, into, value_width)
                column += 16
                continue
            if take_rows == 4:
                if bf16:
                    _value_4x4h(at, weight_stride, source, value_width, keys, target, value_width)
                else:
                    _value_4x4(at, weight_stride, source, value_width, keys, target, value_width)
            elif take_rows == 3:
                if bf16:
                    _value_3x4h(at, weight_stride, source, value_width, keys, target, value_width)
                else:
                    _value_3x4(at, weight_stride, source, value_width, keys, target, value_width)
            elif bf16:
                _value_1x4h(at, weight_stride, source, value_width, keys, target, value_width)
            else:
                _value_1x4(at, weight_stride, source, value_width, keys, target, value_width)
            column += 64
        row += take_rows


@njit(fastmath={"nnan", "nsz", "reassoc"})
def _largest(row: int, first: int, end: int) -> float:
    """The largest of some scores; the order of a maximum does not matter, so vectors may be used."""
    scores = f32(row, end)
    largest = _MINUS_INFINITY
    for j in range(first, end):
        largest = max(largest, scores[j])
    return largest


@njit
def _softmax(scores: int, first: int, end: int, span: int) -> float:
    """Scores to weights in place: `exp(score - max)` for keys in `[first, end)`, 0 outside; their sum.

    `span` is the length of the row, a multiple of 16, so that all keys run through whole vectors.
    """
    row = f32(scores, span)
    for j in range(first):
        row[j] = _MINUS_INFINITY
    for j in range(end, span):
        row[j] = _MINUS_INFINITY
    return exponential_tile(scores, _largest(scores, first, end), span // 16)


@njit
def _gather_queries(
    q: int, target: int, token: int, rows: int, kv_head: int, heads: int, group: int, width: int, scale: float
) -> None:
    """The tile's queries, scaled, in the sets that `_score` takes together: each `[width, rows of the set]`."""
    begin = 0
    while begin < rows:
        count = _together(rows - begin)
        out = f32(target + begin * width * 4, count * width)
        for r in range(count):
            head = (token + (begin + r) // group) * heads + kv_head * group + (begin + r) % group
            given = f32(q + head * width * 4, width)
            for i in range(width):
                out[i * count + r] = given[i] * scale
        begin += count


@njit(error_model="numpy")
def _tile(p: int, item: int, scratch: int) -> None:
    """One tile: `tokens` consecutive queries of one sequence, all query heads of one key/value head."""
    a = i64(p, 26)
    tiles, heads, kv_heads, width, value_width = a[3], a[9], a[10], a[11], a[16]
    block_size, bf16, window, tile_rows = a[17], a[18], a[20], a[25]
    group = heads // kv_heads
    kv_head = item % kv_heads
    tile = i32(tiles + (item // kv_heads) * 12, 3)
    row, token, tokens = np.int64(tile[0]), np.int64(tile[1]), np.int64(tile[2])
    length, end_token = np.int64(i32(a[5], row + 1)[row]), np.int64(i32(a[4], row + 2)[row + 1])
    position = length - (end_token - token)
    low = max(0, position - window + 1) if window > 0 else 0
    first_block, high = low // block_size, position + tokens
    last_block = (high - 1) // block_size
    origin = first_block * block_size
    span = ((last_block + 1) * block_size - origin + 15) // 16 * 16 + 16
    rows = tokens * group
    queries = scratch + 64
    sums = queries + tile_rows * width * 4
    scores = sums + tile_rows * value_width * 4
    _gather_queries(a[8], queries, token, rows, kv_head, heads, group, width, np.float32(double_bits(a[19])))
    table = i32(a[6] + row * a[7] * 4, last_block + 1)
    size = 2 if bf16 else 4
    head_keys, head_values = a[12] + kv_head * a[15] * size, a[13] + kv_head * a[15] * size
    for b in range(first_block, last_block + 1):
        keys = head_keys + np.int64(table[b]) * a[14] * size
        for lane in range(0, block_size, 16):
            target = scores + (b * block_size + lane - origin) * 4
            _score(rows, queries, keys + lane * size, block_size, width, target, span, bf16)
    out = f32(sums, rows * value_width)
    for i in range(rows * value_width):
        out[i] = np.float32(0.0)
    totals = f32(scores + rows * span * 4, rows)
    for r in range(rows):
        here = position + r // group
        first = max(0, here - window + 1) if window > 0 else 0
        totals[r] = _softmax(scores + r * span * 4, first - origin, here + 1 - origin, span - 16)
    for b in range(first_block, last_block + 1):
        values = head_values + np.int64(table[b]) * a[14] * size
        count = min(block_size, high - b * block_size)
        _weigh(rows, scores + (b * block_size - origin) * 4, span, values, value_width, count, sums, bf16)
    for r in range(rows):
        line = f32(sums + r * value_width * 4, width)
        share = np.float32(1.0) / totals[r]
        for i in range(width):
            line[i] = line[i] * share
        head = (token + r // group) * heads + kv_head * group + r % group
        narrow(sums + r * value_width * 4, a[21] + head * width * (2 if a[22] else 4), width, a[22])


def attention(p: int) -> None:
    """Draw tiles until none is left. Parameters: `PARAMETERS`."""
    a = i64(p, 26)
    scratch = a[23] + take(p + 8) * a[24]
    item = take(p)
    while item < a[2]:
        _tile(p, item, scratch)
        item = take(p)
