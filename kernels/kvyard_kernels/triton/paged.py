"""Device helpers for reading a paged KV cache.

A cache is a tensor `[blocks, block_size, kv_heads, head_dim]` of any strides but the last, which is 1. A
position p of a row lies in slot `p % block_size` of block `table[p // block_size]`. Tiles run over positions,
never over blocks, so that any block size works.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_offsets(table, positions, valid, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Element offsets of `positions` in a cache, int64. Table entries of positions not `valid` are never read."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0)
    # A pool of more than 2^31 elements is usual: the product must be formed in 64 bits.
    return blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE).to(tl.int64) * slot_stride


@triton.jit
def load_keys(cache, offsets, valid, dims, HEAD_DIM: tl.constexpr):
    """Keys as a tile `[dims, positions]`. Slots not `valid` are not read and count as zero.

    Formats that need unpacking (fp8, int8 with scales) belong here and in `load_values`.
    """
    mask = (dims[:, None] < HEAD_DIM) & valid[None, :]
    return tl.load(cache + offsets[None, :] + dims[:, None], mask=mask, other=0.0)


@triton.jit
def load_values(cache, offsets, valid, dims, HEAD_DIM: tl.constexpr):
    """Values as a tile `[positions, dims]`. Slots not `valid` are zero, so that 0 x NaN cannot arise."""
    mask = valid[:, None] & (dims[None, :] < HEAD_DIM)
    return tl.load(cache + offsets[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """`left @ right` in float32. "upcast" widens the operands first: the interpreter multiplies the bit patterns
    of bfloat16 otherwise; the values are the same, since a product of two bfloat16 fits float32."""
    if PRECISION == "upcast":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(left, right, input_precision=PRECISION)
