"""Entry functions of the Triton kernels: they check shapes, choose tile sizes and launch.

All tensors of a call lie on one device. Under `TRITON_INTERPRET=1` that may be the CPU, where the kernels run
step by step in Python. Wrong shapes raise ValueError with the shape that was expected.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from kvyard_kernels.triton import activation, attention_decode, attention_mixed, cache, config, norm, sampling
from kvyard_kernels.triton.launch import interpreted, launch
from kvyard_kernels.triton.worklists import DecodeSplits, QueryTiles

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**30
"""A window that no context reaches; positions and it add up within 32 bits."""
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_heads(name: str, x: Tensor) -> None:
    _require(x.dim() == 3, f"{name} must be [tokens, heads, head_dim], got {list(x.shape)}")
    _require(x.stride(-1) == 1, f"{name}: the elements of a head must lie side by side, got strides {x.stride()}")


def _require_cache(k_cache: Tensor, v_cache: Tensor, kv_heads: int | None, head_dim: int) -> None:
    shape = list(k_cache.shape)
    _require(
        k_cache.dim() == 4 and k_cache.shape == v_cache.shape,
        f"k_cache and v_cache must both be [blocks, block_size, kv_heads, head_dim], got {shape} and "
        f"{list(v_cache.shape)}",
    )
    _require(
        k_cache.dtype == v_cache.dtype and k_cache.dtype in CACHE_DTYPES,
        f"KV caches of {k_cache.dtype} and {v_cache.dtype}: both must be one of {CACHE_DTYPES}",
    )
    _require(shape[3] == head_dim, f"head_dim of the cache is {shape[3]}, of q {head_dim}")
    _require(kv_heads is None or shape[2] == kv_heads, f"kv_heads of the cache is {shape[2]}, of k {kv_heads}")
    _require(k_cache.stride(3) == 1 and v_cache.stride(3) == 1, "the elements of a cached head must lie side by side")


def _group(q: Tensor, k_cache: Tensor) -> int:
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    _require(heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    return heads // kv_heads


def _precision(dtype: torch.dtype, head_dim: int) -> str:
    """How products are formed (see `paged.product`).

    Float32 without loss, `--dtype float32` promising the CPU's tokens: on NVIDIA as three TF32 products on the
    tensor cores (error about 2^-21), since scalar products spill; but from 256 dimensions on the three parts spill
    and scalar products do not. AMD has float32 matrix instructions.
    """
    if interpreted():
        return "upcast" if dtype == torch.bfloat16 else "ieee"
    return "tf32x3" if dtype == torch.float32 and torch.version.hip is None and head_dim < 256 else "ieee"


def _window(window: int) -> int:
    _require(window >= 0, f"window must be positive, or 0 for none, got {window}")
    return min(window, NO_WINDOW) or NO_WINDOW


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    splits: DecodeSplits,
    *,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row over its paged context, the token's own key included.

    q `[n, heads, head_dim]` in the cache's dtype; caches `[blocks, block_size, kv_heads, head_dim]`; tables
    `[n, b]` int32; lengths `[n]` int32; `splits` from `decode_splits` for the same lengths and window. With `window`
    w > 0 a row sees its last w positions. A row of length 0 gets zeros. Returns `out`, `[n, heads, head_dim]`.
    """
    _require_heads("q", q)
    rows, heads, head_dim = q.shape
    _require_cache(k_cache, v_cache, None, head_dim)
    _require(q.dtype == k_cache.dtype, f"q is {q.dtype}, the cache {k_cache.dtype}: they must agree")
    _require(tables.dim() == 2 and tables.shape[0] == rows, f"tables must be [{rows}, b], got {list(tables.shape)}")
    _require(list(lengths.shape) == [rows], f"lengths must be [{rows}], got {list(lengths.shape)}")
    _require(
        splits.count == rows and splits.window == window,
        f"splits are for {splits.count} rows and window {splits.window}, the call for {rows} and {window}",
    )
    reach = _window(window)
    out = q.new_empty(q.shape) if out is None else out
    _require_heads("out", out)
    _require(out.shape == q.shape, f"out must be {list(q.shape)}, got {list(out.shape)}")
    if rows == 0:
        return out
    group = _group(q, k_cache)
    tiles = config.decode_config(head_dim, group, k_cache.element_size())
    items, several = len(splits.rows), splits.several
    target = q.new_empty((items, heads, head_dim), dtype=torch.float32) if several else out
    sums = q.new_empty((items, heads), dtype=torch.float32)
    launch(
        attention_decode.decode_split,
        (items, k_cache.shape[2]),
        q,
        k_cache,
        v_cache,
        tables,
        lengths,
        splits.rows,
        splits.numbers,
        target,
        sums,
        scale * LOG2_E,
        reach,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        tables.stride(0),
        *target.stride()[:2],
        sums.stride(0),
        group,
        GROUP_PAD=tiles.rows,
        HEAD_DIM=head_dim,
        DIM_PAD=tiles.dims,
        BLOCK_SIZE=k_cache.shape[1],
        TILE=tiles.keys,
        SPLIT=config.SPLIT,
        PARTIAL=several,
        PRECISION=_precision(q.dtype, head_dim),
        warps=tiles.warps,
        stages=tiles.stages,
    )
    if several:
        launch(
            attention_decode.decode_merge,
            (rows, heads),
            target,
            sums,
            splits.firsts,
            out,
            *target.stride()[:2],
            sums.stride(0),
            *out.stride()[:2],
            HEAD_DIM=head_dim,
            DIM_PAD=tiles.dims,
            TILE=config.MERGE_TILE,
            warps=4,
        )
    return out


def paged_mixed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    tiles: QueryTiles,
    *,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks of any length over paged context, decodes among them, in one launch.

    q `[t, heads, head_dim]`; row i owns the tokens `starts[i]:starts[i + 1]` (starts `[n + 1]` int32), the last
    of the `lengths[i]` positions of its context; `tiles` from `query_tiles`; the rest as in `paged_decode`.
    """
    _require_heads("q", q)
    rows = lengths.shape[0]
    head_dim = q.shape[2]
    _require_cache(k_cache, v_cache, None, head_dim)
    _require(q.dtype == k_cache.dtype, f"q is {q.dtype}, the cache {k_cache.dtype}: they must agree")
    _require(tables.dim() == 2 and tables.shape[0] == rows, f"tables must be [{rows}, b], got {list(tables.shape)}")
    _require(list(starts.shape) == [rows + 1], f"starts must be [{rows + 1}], got {list(starts.shape)}")
    group = _group(q, k_cache)
    sizes = config.mixed_config(head_dim, group, k_cache.element_size())
    span = config.chunk_tokens(sizes, group)
    _require(tiles.span == span, f"query tiles of {tiles.span} tokens, this head shape needs {span}: see tile_span")
    out = q.new_empty(q.shape) if out is None else out
    _require_heads("out", out)
    _require(out.shape == q.shape, f"out must be {list(q.shape)}, got {list(out.shape)}")
    if len(tiles.rows) == 0:
        return out
    launch(
        attention_mixed.mixed_attention,
        (len(tiles.rows), k_cache.shape[2]),
        q,
        k_cache,
        v_cache,
        tables,
        starts,
        lengths,
        tiles.rows,
        tiles.tokens,
        out,
        scale * LOG2_E,
        _window(window),
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        tables.stride(0),
        *out.stride()[:2],
        group,
        BLOCK_M=sizes.rows,
        HEAD_DIM=head_dim,
        DIM_PAD=sizes.dims,
        BLOCK_SIZE=k_cache.shape[1],
        TILE=sizes.keys,
        PRECISION=_precision(q.dtype, head_dim),
        warps=sizes.warps,
        stages=sizes.stages,
    )
    return out


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q in place, and write rotated k and plain v to their cache slots.

    q `[t, heads, head_dim]`, k and v `[t, kv_heads, head_dim]`; positions `[t]` int32 or int64; cos and sin
    `[positions, rotary / 2]` float32, element i turning the pair (i, i + rotary / 2); slots `[t]` int64, block *
    block_size + offset, -1 for padding, which caches nothing. With `q_weight` and `k_weight` `[head_dim]`, heads
    are RMS-normalised first.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require_heads(name, x)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    _require(k.shape == v.shape and k.shape[0] == tokens, f"k {list(k.shape)} and v {list(v.shape)} do not fit q")
    _require(k.shape[2] == head_dim, f"head_dim of k is {k.shape[2]}, of q {head_dim}")
    _require_cache(k_cache, v_cache, kv_heads, head_dim)
    _require(slots.dtype == torch.int64 and len(slots) == tokens, f"slots must be [{tokens}] int64")
    _require(len(positions) == tokens, f"positions must be [{tokens}], got {list(positions.shape)}")
    rotary = 2 * cos.shape[1]
    _require(
        cos.shape == sin.shape and cos.dtype == sin.dtype == torch.float32 and rotary <= head_dim,
        f"cos and sin must be [positions, at most {head_dim // 2}] float32, got {list(cos.shape)}, {cos.dtype}",
    )
    _require(cos.stride() == sin.stride() and cos.stride(1) == 1, "cos and sin must be contiguous")
    _require((q_weight is None) == (k_weight is None), "q_weight and k_weight go together")
    if tokens == 0:
        return
    head_tile = 4
    parts = triton.cdiv(heads, head_tile) + triton.cdiv(kv_heads, head_tile)
    launch(
        cache.rope_and_cache,
        (tokens, parts),
        q,
        k,
        v,
        k_cache,
        v_cache,
        positions,
        cos,
        sin,
        slots,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        cos.stride(0),
        heads,
        kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        HALF_PAD=config.power_of_two(rotary // 2),
        TAIL_PAD=config.power_of_two(max(1, head_dim - rotary)),
        DIM_PAD=config.power_of_two(head_dim),
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_TILE=head_tile,
        NORM=q_weight is not None,
        warps=1,
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """RMSNorm of the rows of x `[rows, size]`; with `residual`, of `residual += x`, which is stored in place.

    Returns `out`, `[rows, size]` like x.
    """
    _require(x.dim() == 2 and x.stride(1) == 1, f"x must be [rows, size], got {list(x.shape)}")
    rows, size = x.shape
    _require(list(weight.shape) == [size], f"weight must be [{size}], got {list(weight.shape)}")
    out = torch.empty_like(x) if out is None else out
    other = x if residual is None else residual
    _require(other.shape == x.shape == out.shape, f"residual and out must be {list(x.shape)}")
    _require(other.stride(1) == 1 and out.stride(1) == 1, "the elements of a row must lie side by side")
    if rows == 0:
        return out
    pad = config.power_of_two(size)
    launch(
        norm.rms_norm,
        (rows,),
        x,
        other,
        weight,
        out,
        eps,
        x.stride(0),
        other.stride(0),
        out.stride(0),
        size,
        SIZE_PAD=pad,
        RESIDUAL=residual is not None,
        warps=config.norm_warps(pad),
    )
    return out


def gated(gate: Tensor, up: Tensor, *, activation_name: str = "silu", out: Tensor | None = None) -> Tensor:
    """`act(gate) * up` over `[rows, size]`, computed in float32; `activation_name` is `silu` or `gelu_tanh`.

    gate and up may be the two halves of one fused product.
    """
    _require(activation_name in ("silu", "gelu_tanh"), f"unknown activation {activation_name!r}")
    _require(gate.dim() == 2 and gate.shape == up.shape, f"gate {list(gate.shape)} and up {list(up.shape)} differ")
    _require(gate.stride(1) == 1 and up.stride(1) == 1, "the elements of a row must lie side by side")
    rows, size = gate.shape
    out = gate.new_empty(gate.shape) if out is None else out
    _require(out.shape == gate.shape and out.stride(1) == 1, f"out must be {list(gate.shape)}")
    if rows == 0:
        return out
    launch(
        activation.gated,
        (rows, triton.cdiv(size, config.GATED_TILE)),
        gate,
        up,
        out,
        size,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        TILE=config.GATED_TILE,
        GELU=activation_name == "gelu_tanh",
        warps=4,
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """Ids `[rows]` int64 of the highest logits of `[rows, vocab]`; the lowest id on ties, NaN never."""
    _require(logits.dim() == 2 and logits.stride(1) == 1, f"logits must be [rows, vocab], got {list(logits.shape)}")
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(size, config.VOCAB_CHUNK)
    peaks = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    launch(
        sampling.argmax_chunks,
        (rows, chunks),
        logits,
        peaks,
        winners,
        size,
        logits.stride(0),
        chunks,
        CHUNK=config.VOCAB_CHUNK,
        warps=4,
    )
    launch(sampling.argmax_merge, (rows,), peaks, winners, out, chunks, TILE=config.CANDIDATE_TILE, warps=4)
    return out


def uniforms(seeds: Tensor, outputs: Tensor) -> Tensor:
    """Numbers in (0, 1), float64 `[rows]`, of (seed, index of the output token), both int64 `[rows]`.

    A seed is a 64-bit key; as int64 it is its two's complement.
    """
    _require(seeds.dtype == outputs.dtype == torch.int64, "seeds and outputs must be int64")
    _require(seeds.dim() == 1 and seeds.shape == outputs.shape, f"{list(seeds.shape)} seeds, {list(outputs.shape)}")
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    if len(out):
        grid = (triton.cdiv(len(out), config.UNIFORM_TILE),)
        launch(sampling.uniforms, grid, seeds, outputs, out, len(out), TILE=config.UNIFORM_TILE, warps=1)
    return out


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Ids `[rows]` int64 drawn from non-negative weights `[rows, vocab]`, which need not sum to 1.

    Weights and numbers are float32 or float64, both the same; numbers `[rows]` lie in [0, 1): row i gets the lowest
    id whose cumulative weight exceeds `numbers[i] * total`. An id of weight 0 is never drawn; every row needs a
    positive weight.
    """
    _require(weights.dim() == 2 and weights.stride(1) == 1, f"weights must be [rows, vocab], got {weights.shape}")
    _require(
        weights.dtype == numbers.dtype and weights.dtype in (torch.float32, torch.float64),
        f"weights are {weights.dtype} and numbers {numbers.dtype}; both must be float32 or float64",
    )
    rows, size = weights.shape
    _require(list(numbers.shape) == [rows], f"numbers must be [{rows}], got {list(numbers.shape)}")
    out = torch.empty(rows, dtype=torch.int64, device=weights.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(size, config.VOCAB_CHUNK)
    sums = torch.empty((rows, chunks), dtype=weights.dtype, device=weights.device)
    launch(
        sampling.weight_chunks,
        (rows, chunks),
        weights,
        sums,
        size,
        weights.stride(0),
        chunks,
        CHUNK=config.VOCAB_CHUNK,
        warps=4,
    )
    launch(
        sampling.draw,
        (rows,),
        weights,
        sums,
        numbers,
        out,
        size,
        weights.stride(0),
        chunks,
        CHUNK=config.VOCAB_CHUNK,
        CHUNKS_PAD=config.power_of_two(chunks),
        warps=4,
    )
    return out
