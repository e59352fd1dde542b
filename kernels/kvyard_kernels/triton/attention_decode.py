"""Paged attention for one query token per row, the context split at fixed positions.

A program takes one split of `SPLIT` positions of one row, and one KV head with its whole group of query heads.
Splits lie at multiples of `SPLIT` whatever the batch, and tiles at multiples of `TILE`: the order of every sum is
fixed by the row alone. The merge of a single split is exact (weight 1 over 1), so a row gets the same bits
whether its launch needed a merge or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvyard_kernels.triton.paged import load_keys, load_values, product, slot_offsets


# What differs between batches must not lead to another compilation in the middle of serving.
@triton.jit(do_not_specialize=["window", "table_row", "lse_row", "group"])
def decode_split(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    item_rows,
    item_splits,
    out,
    lse,
    scale_log2,
    window,
    q_row,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_row,
    out_row,
    out_head,
    lse_row,
    group,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid `(items, kv_heads)`. With `PARTIAL`, `out` takes normalised partial results `[items, heads, head_dim]`
    in float32 and `lse` their log2 sums `[items, heads]`; else a row has one item and `out` is final."""
    item = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    row = tl.load(item_rows + item).to(tl.int64)
    if row < 0:
        return
    length = tl.load(lengths + row)
    low = tl.maximum(length - window, 0)
    begin = tl.load(item_splits + item) * SPLIT
    high = tl.minimum(length, begin + SPLIT)

    member = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    head = (kv * group + member).to(tl.int64)
    mask = (member[:, None] < group) & (dims[None, :] < HEAD_DIM)
    queries = tl.load(q + row * q_row + head[:, None] * q_head + dims[None, :], mask=mask, other=0.0)

    table = tables + row * table_row
    keys_base = k_cache + kv.to(tl.int64) * k_head
    values_base = v_cache + kv.to(tl.int64) * v_head
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    # The first tile holds `low`, the last `high - 1`: each tile has a visible key, so `best` is finite after it.
    for start in range(tl.maximum(begin, low // TILE * TILE), high, TILE):
        position = start + tl.arange(0, TILE)
        valid = (position >= low) & (position < high)
        offsets = slot_offsets(table, position, valid, k_block, k_slot, BLOCK_SIZE)
        keys = load_keys(keys_base, offsets, valid, dims, HEAD_DIM)
        scores = product(queries, keys, PRECISION) * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - peak)
        weights = tl.exp2(scores - peak[:, None])
        total = total * shrink + tl.sum(weights, 1)
        offsets = slot_offsets(table, position, valid, v_block, v_slot, BLOCK_SIZE)
        values = load_values(values_base, offsets, valid, dims, HEAD_DIM)
        acc = acc * shrink[:, None] + product(weights.to(values.dtype), values, PRECISION)
        best = peak

    divisor = tl.where(total > 0.0, total, 1.0)
    result = acc / divisor[:, None]
    if PARTIAL:
        tl.store(out + item * out_row + head[:, None] * out_head + dims[None, :], result, mask=mask)
        tl.store(lse + item * lse_row + head, best + tl.log2(divisor), mask=member < group)
    else:
        target = out + row * out_row + head[:, None] * out_head + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lse_row"])
def decode_merge(
    partial,
    lse,
    firsts,
    out,
    partial_row,
    partial_head,
    lse_row,
    out_row,
    out_head,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid `(rows, heads)`. Joins a row's own items in their order; a row without context gets zeros."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(firsts + row)
    last = tl.load(firsts + row + 1)
    dims = tl.arange(0, DIM_PAD)
    partial += head * partial_head + first.to(tl.int64) * partial_row
    lse += head + first.to(tl.int64) * lse_row

    best = float("-inf")
    total = 0.0
    acc = tl.zeros((DIM_PAD,), tl.float32)
    for start in range(first, last, TILE):
        step = tl.arange(0, TILE)
        valid = start + step < last
        sums = tl.load(lse + step * lse_row, mask=valid, other=float("-inf"))
        mask = valid[:, None] & (dims[None, :] < HEAD_DIM)
        results = tl.load(partial + step[:, None] * partial_row + dims[None, :], mask=mask, other=0.0)
        partial += TILE * partial_row
        lse += TILE * lse_row
        peak = tl.maximum(best, tl.max(sums, 0))
        # The only item of a row without context has a sum of -inf.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(sums - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(results * weights[:, None], 0)
        best = peak
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * out_row + head * out_head + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
