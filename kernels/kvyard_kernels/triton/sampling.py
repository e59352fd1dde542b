"""Choice of a token from a row of logits, in two stages over the vocabulary, so that one row fills the device.

Greedy: the highest logit, the lowest id on ties; NaN counts as -inf. Random: the inverse of the distribution
function at a number that depends on (seed, output index) alone; nothing here has state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _best(values, ids):
    """The highest value of a tile and the lowest id that has it."""
    peak = tl.max(values, 0)
    return peak, tl.min(tl.where(values == peak, ids, 2147483647), 0)


@triton.jit(do_not_specialize=["size", "chunks"])
def argmax_chunks(logits, peaks, winners, size, logits_row, chunks, CHUNK: tl.constexpr):
    """Grid `(rows, chunks)`: the best logit of each chunk and its id."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * logits_row + index, mask=index < size, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    peak, winner = _best(values, index)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(winners + row * chunks + chunk, winner)


@triton.jit(do_not_specialize=["chunks"])
def argmax_merge(peaks, winners, out, chunks, TILE: tl.constexpr):
    """Grid `(rows,)`: the best of the chunks. Later chunks have higher ids, so ties keep the earlier one."""
    row = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    choice = 0
    for start in range(0, chunks, TILE):
        index = start + tl.arange(0, TILE)
        mask = index < chunks
        values = tl.load(peaks + row * chunks + index, mask=mask, other=float("-inf"))
        ids = tl.load(winners + row * chunks + index, mask=mask, other=2147483647)
        peak, winner = _best(values, ids)
        choice = tl.where(peak > best, winner, choice)
        best = tl.maximum(best, peak)
    tl.store(out + row, choice)


@triton.jit(do_not_specialize=["size", "chunks"])
def weight_chunks(weights, sums, size, weights_row, chunks, CHUNK: tl.constexpr):
    """Grid `(rows, chunks)`: the sum of each chunk of non-negative weights."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(weights + row * weights_row + index, mask=index < size, other=0.0)
    tl.store(sums + row * chunks + chunk, tl.sum(values, 0))


@triton.jit(do_not_specialize=["size", "chunks"])
def draw(weights, sums, uniforms, out, size, weights_row, chunks, CHUNK: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """Grid `(rows,)`: the lowest id whose cumulative weight exceeds u x total. No id of weight 0 is chosen."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, CHUNKS_PAD)
    parts = tl.load(sums + row * chunks + number, mask=number < chunks, other=0.0)
    reached = tl.cumsum(parts, 0)
    goal = tl.load(uniforms + row) * tl.max(reached, 0)
    # Where rounding leaves nothing above the goal, the last chunk with any weight takes it.
    last = tl.max(tl.where(parts > 0.0, number, 0), 0)
    chunk = tl.minimum(tl.min(tl.where(reached > goal, number, CHUNKS_PAD), 0), last)
    before = tl.sum(tl.where(number < chunk, parts, 0.0), 0)

    index = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(weights + row * weights_row + index, mask=index < size, other=0.0)
    above = (before + tl.cumsum(values, 0) > goal) & (values > 0.0)
    fallback = tl.max(tl.where(values > 0.0, index, 0), 0)
    choice = tl.minimum(tl.min(tl.where(above, index, 2147483647), 0), fallback)
    tl.store(out + row, choice)


@triton.jit(do_not_specialize=["rows"])
def uniforms(seeds, outputs, out, rows, TILE: tl.constexpr):
    """Grid `(tiles of rows,)`: 52 bits of Philox 4x32-10 with the seed as key and `(0, output index, 0, 0)` as
    counter, as a float64 in (0, 1) that is never 0 or 1."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = row < rows
    seed = tl.load(seeds + row, mask=mask, other=0)
    output = tl.load(outputs + row, mask=mask, other=0).to(tl.uint32)
    zero = tl.zeros((TILE,), tl.uint32)
    first, second, _, _ = tl.philox(seed, zero, output, zero, zero)
    bits = (first.to(tl.uint64) << 20) | (second.to(tl.uint64) >> 12)
    number = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    tl.store(out + row, number, mask=mask)
