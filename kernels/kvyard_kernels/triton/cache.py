"""Rotary positions and the cache write in one pass: q is rotated in place, k rotated into the cache, v copied.

Optionally q and k are RMS-normalised over the head dimension first (Qwen3, Gemma 3). All arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(
    lower,
    upper,
    rest,
    cosine,
    sine,
    weight,
    half,
    tail,
    eps,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """The two rotary halves and the unrotated rest of a tile of heads, normalised if `NORM`, then rotated."""
    if NORM:
        square = tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        in_half = half < ROTARY // 2
        w_lower = tl.load(weight + half, mask=in_half, other=0.0).to(tl.float32)
        w_upper = tl.load(weight + half + ROTARY // 2, mask=in_half, other=0.0).to(tl.float32)
        w_rest = tl.load(weight + tail, mask=tail < HEAD_DIM, other=0.0).to(tl.float32)
        lower = lower * factor * w_lower[None, :]
        upper = upper * factor * w_upper[None, :]
        rest = rest * factor * w_rest[None, :]
    first = lower * cosine[None, :] - upper * sine[None, :]
    second = upper * cosine[None, :] + lower * sine[None, :]
    return first, second, rest


@triton.jit(do_not_specialize=["heads", "kv_heads"])
def rope_and_cache(
    q,
    k,
    v,
    k_cache,
    v_cache,
    positions,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    eps,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    kc_block,
    kc_slot,
    kc_head,
    vc_block,
    vc_slot,
    vc_head,
    cos_row,
    heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid `(tokens, tiles of q heads + tiles of kv heads)`. A slot below 0 is padding: nothing is cached."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(heads, HEAD_TILE)
    position = tl.load(positions + token).to(tl.int64)
    half = tl.arange(0, HALF_PAD)
    tail = ROTARY + tl.arange(0, TAIL_PAD)
    in_half = half < ROTARY // 2
    cosine = tl.load(cos + position * cos_row + half, mask=in_half, other=0.0)
    sine = tl.load(sin + position * cos_row + half, mask=in_half, other=0.0)

    if part < q_parts:
        head = part * HEAD_TILE + tl.arange(0, HEAD_TILE)
        pair = (head[:, None] < heads) & in_half[None, :]
        left = (head[:, None] < heads) & (tail[None, :] < HEAD_DIM)
        base = q + token * q_token + head.to(tl.int64)[:, None] * q_head
        lower = tl.load(base + half[None, :], mask=pair, other=0.0).to(tl.float32)
        upper = tl.load(base + half[None, :] + ROTARY // 2, mask=pair, other=0.0).to(tl.float32)
        rest = tl.load(base + tail[None, :], mask=left, other=0.0).to(tl.float32)
        first, second, rest = _rotate(
            lower, upper, rest, cosine, sine, q_weight, half, tail, eps, ROTARY, HEAD_DIM, NORM
        )
        tl.store(base + half[None, :], first.to(q.dtype.element_ty), mask=pair)
        tl.store(base + half[None, :] + ROTARY // 2, second.to(q.dtype.element_ty), mask=pair)
        if NORM:
            tl.store(base + tail[None, :], rest.to(q.dtype.element_ty), mask=left)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = (part - q_parts) * HEAD_TILE + tl.arange(0, HEAD_TILE)
            pair = (head[:, None] < kv_heads) & in_half[None, :]
            left = (head[:, None] < kv_heads) & (tail[None, :] < HEAD_DIM)
            wide = head.to(tl.int64)[:, None]
            base = k + token * k_token + wide * k_head
            lower = tl.load(base + half[None, :], mask=pair, other=0.0).to(tl.float32)
            upper = tl.load(base + half[None, :] + ROTARY // 2, mask=pair, other=0.0).to(tl.float32)
            rest = tl.load(base + tail[None, :], mask=left, other=0.0).to(tl.float32)
            first, second, rest = _rotate(
                lower, upper, rest, cosine, sine, k_weight, half, tail, eps, ROTARY, HEAD_DIM, NORM
            )
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            # Formats that need packing (fp8, int8 with scales) belong here.
            target = k_cache + block * kc_block + offset * kc_slot + wide * kc_head
            # k is rounded to its own type first, as a separate rotation would, whatever the cache's type.
            tl.store(target + half[None, :], first.to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=pair)
            tl.store(
                target + half[None, :] + ROTARY // 2,
                second.to(k.dtype.element_ty).to(k_cache.dtype.element_ty),
                mask=pair,
            )
            tl.store(target + tail[None, :], rest.to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=left)
            dims = tl.arange(0, DIM_PAD)
            whole = (head[:, None] < kv_heads) & (dims[None, :] < HEAD_DIM)
            values = tl.load(v + token * v_token + wide * v_head + dims[None, :], mask=whole, other=0.0)
            target = v_cache + block * vc_block + offset * vc_slot + wide * vc_head
            tl.store(target + dims[None, :], values.to(v_cache.dtype.element_ty), mask=whole)
