"""Plain torch references: what every kernel, on any device, must compute.

Shapes are logical and readable; speed is no aim. All arithmetic is float32 whatever the inputs are, and
results are cast to the input's type at the end. `t` tokens, `n` sequences, `h` query heads, `k` key/value
heads (query head i reads key/value head `i // (h // k)`), `d` head width, `bs` block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; `[..., w]`, `[w]` -> `[..., w]`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `x` was added, normalised, and itself: `(normed like x, sum like residual)`."""
    total = residual.float() + x.float()
    return rms_norm(total, weight, eps).to(x.dtype), total.to(residual.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` with gate and up side by side: `[t, 2 * w]` -> `[t, w]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` with the tanh approximation of gelu: `[t, 2 * w]` -> `[t, w]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def inverse_frequencies(rotary_dim: int, theta: float, factors: Sequence[float] | None = None) -> Tensor:
    """Rotation per position of each pair, float64 `[rotary_dim / 2]`: `theta^(-2i / rotary_dim) / factor_i`."""
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies = torch.exp(-math.log(theta) * steps)
    return frequencies if factors is None else frequencies / torch.tensor(factors, dtype=torch.float64)


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 `[t, rotary_dim / 2]`, of angles taken in float64.

    A half-precision or even float32 angle drifts with the position: at 8,191 it is off by 2e-4.
    """
    angles = positions.to(torch.float64)[:, None] * frequencies[None, :]
    return angles.cos().float(), angles.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + r / 2])` of the first r = 2 * cos.shape[1] elements of each head.

    `x` `[t, heads, d]`, `cos` and `sin` `[t, r / 2]`; elements from r on pass through.
    """
    half = cos.shape[1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def write_cache(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, cache_slots: Tensor) -> None:
    """Put `[t, k, d]` keys and values at `cache_slots` (block * bs + offset) of `[blocks, bs, k, d]` caches."""
    blocks, offsets = cache_slots // key_cache.shape[1], cache_slots % key_cache.shape[1]
    key_cache[blocks, offsets] = keys.to(key_cache.dtype)
    value_cache[blocks, offsets] = values.to(value_cache.dtype)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of chunks and decodes alike over the paged context, which holds their own K and V.

    `q` `[t, h, d]`; caches `[blocks, bs, k, d]`; sequence i owns the queries `starts[i]:starts[i + 1]`, the
    last of which stands at position `lengths[i] - 1`, and its context lies in the blocks `tables[i]`.
    With `window` w > 0 a query at position p sees the keys `p - w + 1 .. p`, else `0 .. p`.
    """
    out = torch.empty_like(q)
    for i in range(lengths.shape[0]):
        begin, end, length = int(starts[i]), int(starts[i + 1]), int(lengths[i])
        keys = _gather(key_cache, tables[i], length)
        values = _gather(value_cache, tables[i], length)
        positions = torch.arange(length - (end - begin), length)
        out[begin:end] = attention(q[begin:end], keys, values, positions, scale, window)
    return out


def attention(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int = 0) -> Tensor:
    """Causal attention over a contiguous context: `[t, h, d]`, `[length, k, d]` twice, `[t]` -> `[t, h, d]`."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->htl", q.float(), keys) * scale
    key_positions = torch.arange(keys.shape[0])
    hidden = key_positions[None, :] > positions[:, None]
    if window > 0:
        hidden |= key_positions[None, :] <= positions[:, None] - window
    weights = scores.masked_fill(hidden[None], -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, values).to(q.dtype)


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """`[length, k, d]`: a sequence's context in order; whatever else its last block holds is left out."""
    block_size = cache.shape[1]
    blocks = table[: -(-length // block_size)].long()
    return cache[blocks].flatten(0, 1)[:length]
