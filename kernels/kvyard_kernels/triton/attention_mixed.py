"""Paged causal attention for rows of any number of query tokens, chunks and decodes in one launch.

A program takes one query tile: up to `BLOCK_M // group` tokens of one row with the group of query heads of one KV
head. Key tiles lie at multiples of `TILE`; a tile that is masked for a token leaves its sums as they are to the
bit, so a token's result does not depend on the chunk it came in, nor on the other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvyard_kernels.triton.paged import load_keys, load_values, product, slot_offsets


# What differs between batches must not lead to another compilation in the middle of serving.
@triton.jit(do_not_specialize=["window", "table_row", "group"])
def mixed_attention(
    q,
    k_cache,
    v_cache,
    tables,
    starts,
    lengths,
    tile_rows,
    tile_tokens,
    out,
    scale_log2,
    window,
    q_token,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_row,
    out_token,
    out_head,
    group,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid `(query tiles, kv_heads)`; `tile_rows` and `tile_tokens` name each tile's row and first token in it."""
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    row = tl.load(tile_rows + tile).to(tl.int64)
    first = tl.load(tile_tokens + tile)
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    length = tl.load(lengths + row)
    before = length - count

    span = BLOCK_M // group
    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PAD)
    token = first + member // group
    head = (kv * group + member % group).to(tl.int64)
    present = (member < span * group) & (token < count)
    mask = present[:, None] & (dims[None, :] < HEAD_DIM)
    index = (begin + token).to(tl.int64)
    queries = tl.load(q + (index * q_token + head * q_head)[:, None] + dims[None, :], mask=mask, other=0.0)

    at = before + token
    low = tl.maximum(before + first - window + 1, 0)
    high = before + tl.minimum(first + span, count)
    table = tables + row * table_row
    keys_base = k_cache + kv.to(tl.int64) * k_head
    values_base = v_cache + kv.to(tl.int64) * v_head
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
    for start in range(low // TILE * TILE, high, TILE):
        position = start + tl.arange(0, TILE)
        valid = (position >= low) & (position < high)
        offsets = slot_offsets(table, position, valid, k_block, k_slot, BLOCK_SIZE)
        keys = load_keys(keys_base, offsets, valid, dims, HEAD_DIM)
        scores = product(queries, keys, PRECISION) * scale_log2
        visible = valid[None, :] & (position[None, :] <= at[:, None]) & (position[None, :] > at[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        # A tile wholly masked for a token leaves -inf here, and -inf - -inf is NaN.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        offsets = slot_offsets(table, position, valid, v_block, v_slot, BLOCK_SIZE)
        values = load_values(values_base, offsets, valid, dims, HEAD_DIM)
        acc = acc * shrink[:, None] + product(weights.to(values.dtype), values, PRECISION)
        best = peak

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (index * out_token + head * out_head)[:, None] + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
