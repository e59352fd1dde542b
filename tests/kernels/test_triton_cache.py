"""Rotary positions and the cache write against the torch reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from kvyard_kernels import reference
from kvyard_kernels.triton import ops
from torch import Tensor

THETA = 10000.0


@dataclass
class Write:
    """The arguments of a cache write, and the slots it must fill."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor

    def run(self, **norm: object) -> None:
        ops.rope_and_cache(
            self.q,
            self.k,
            self.v,
            self.k_cache,
            self.v_cache,
            self.positions,
            self.cos,
            self.sin,
            self.slots,
            **norm,  # type: ignore[arg-type]  # weights by name
        )


def write(
    device: torch.device,
    slots: list[int],
    *,
    heads: int = 5,
    kv_heads: int = 2,
    head_dim: int = 16,
    rotary: int | None = None,
    block_size: int = 16,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    fused: bool = False,
    heads_first: bool = False,
) -> Write:
    random = torch.Generator().manual_seed(len(slots))
    tokens = len(slots)
    widths = (heads, kv_heads, kv_heads)
    product = torch.randn((tokens, sum(widths) * head_dim), generator=random).to(dtype).to(device)
    parts = torch.split(product, [width * head_dim for width in widths], dim=1)
    views = (p.view(tokens, width, head_dim) for p, width in zip(parts, widths, strict=True))
    q, k, v = views if fused else (view.clone() for view in views)
    blocks = max([0, *slots]) // block_size + 2
    shape = (blocks, block_size, kv_heads, head_dim)
    caches = [torch.full(shape, 7.0, dtype=cache_dtype or dtype, device=device) for _ in range(2)]
    if heads_first:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    positions = torch.arange(first, first + tokens, dtype=torch.int32)
    frequencies = reference.inverse_frequencies(rotary or head_dim, THETA)
    cos, sin = reference.rope_tables(torch.arange(first + tokens), frequencies)
    return Write(
        q,
        k,
        v,
        caches[0],
        caches[1],
        positions.to(device),
        cos.to(device),
        sin.to(device),
        torch.tensor(slots, dtype=torch.int64).to(device),
    )


def check(case: Write, q_weight: Tensor | None = None, k_weight: Tensor | None = None) -> None:
    """Run and compare q, both caches, and that nothing else in the caches changed."""
    cos, sin = case.cos[case.positions.long()].cpu(), case.sin[case.positions.long()].cpu()
    q, k, v = case.q.cpu().clone(), case.k.cpu().clone(), case.v.cpu().clone()
    if q_weight is not None and k_weight is not None:
        q, k = reference.rms_norm(q, q_weight.cpu(), 1e-6), reference.rms_norm(k, k_weight.cpu(), 1e-6)
    expected_q, expected_k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
    k_cache, v_cache = case.k_cache.cpu().clone(), case.v_cache.cpu().clone()
    real = case.slots.cpu() >= 0
    reference.write_cache(expected_k[real], v[real], k_cache, v_cache, case.slots.cpu()[real])
    case.run(q_weight=q_weight, k_weight=k_weight)
    tolerance = 1e-5 if case.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.q.cpu(), expected_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.k_cache.cpu(), k_cache, rtol=tolerance, atol=tolerance)
    assert torch.equal(case.v_cache.cpu(), v_cache)


@pytest.mark.parametrize(
    ("start", "count"), [*((start, 29) for start in (0, 1, 15, 16, 37)), (0, 1), (15, 1), (0, 64), (37, 64)]
)
def test_chunks_from_anywhere_kernel_10(device: torch.device, start: int, count: int) -> None:
    """Slots through a shuffled table, padding rows in between: exactly the named slots change."""
    table = [3, 0, 4, 1, 6, 2, 5]
    slots = [table[p // 16] * 16 + p % 16 for p in range(start, start + count)]
    check(write(device, [-1, *slots, -1, -1]))


@pytest.mark.parametrize("block_size", [1, 8, 24, 544])
def test_any_block_size_kernel_05(device: torch.device, block_size: int) -> None:
    check(write(device, [0, 23, 599, -1, 7], block_size=block_size))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"),
    [
        (9, 3, 64, 64),
        (4, 4, 16, 8),
        (28, 4, 16, 16),
        (2, 1, 80, 20),
        (3, 1, 96, 96),
        (4, 1, 256, 256),
        (8, 8, 32, 32),
    ],
)
def test_head_shapes_and_partial_rotation(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, rotary: int
) -> None:
    check(write(device, [5, 33, 2], heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary=rotary, first=100))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_layouts_kernel_09(device: torch.device, fused: bool, heads_first: bool) -> None:
    check(write(device, [5, 33, 2, -1], fused=fused, heads_first=heads_first))


def test_a_fused_product_keeps_its_other_parts(device: torch.device) -> None:
    """q is rotated in place inside the QKV product; k and v there stay as they are."""
    case = write(device, [0, 1, 2], fused=True)
    k, v = case.k.clone(), case.v.clone()
    case.run()
    assert torch.equal(case.k, k)
    assert torch.equal(case.v, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = write(device, [5, 33, 2, 1], dtype=dtype, cache_dtype=cache_dtype)
    expected = case.v.cpu().float()
    case.run()
    got = torch.stack([case.v_cache[s // 16, s % 16] for s in (5, 33, 2, 1)]).cpu().float()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(case.k_cache[2, 1].cpu().float(), torch.full_like(expected[0], 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [16, 8])
def test_heads_are_normalised_before_rotation(device: torch.device, dtype: torch.dtype, rotary: int) -> None:
    """Qwen3 and Gemma 3."""
    weights = [torch.rand(16, generator=torch.Generator().manual_seed(n)).to(dtype).to(device) for n in (1, 2)]
    check(write(device, [5, 33, -1, 4], dtype=dtype, rotary=rotary, first=3), *weights)


@pytest.mark.parametrize("position", [0, 255, 257, 4095, 8191])
def test_angles_stay_exact_at_any_position_model_09(device: torch.device, position: int) -> None:
    case = write(device, [0], first=position, head_dim=64)
    angles = position * torch.tensor([THETA ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    q = case.q.cpu().double()
    lower, upper = q[..., :32], q[..., 32:]
    expected = torch.cat(
        [lower * angles.cos() - upper * angles.sin(), upper * angles.cos() + lower * angles.sin()], dim=-1
    )
    case.run()
    torch.testing.assert_close(case.q.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_rotation_keeps_lengths(device: torch.device) -> None:
    case = write(device, [0, 1, 2], first=1000, head_dim=64)
    before = case.q.norm(dim=-1).clone()
    case.run()
    torch.testing.assert_close(case.q.norm(dim=-1), before, rtol=1e-5, atol=1e-5)
    assert math.isfinite(float(case.k_cache.sum()))


def test_no_tokens_is_no_launch(device: torch.device) -> None:
    case = write(device, [])
    case.run()
    assert (case.k_cache == 7.0).all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", torch.zeros(3, dtype=torch.int32), r"slots must be \[3\] int64"),
        ("positions", torch.zeros(2, dtype=torch.int32), r"positions must be \[3\]"),
        ("k", torch.zeros(3, 2, 8), "do not fit q"),
        ("v_cache", torch.zeros(2, 16, 3, 16), "k_cache and v_cache must both be"),
        ("cos", torch.zeros(9, 8, dtype=torch.float64), "cos and sin must be"),
        ("cos", torch.zeros(9, 9), "cos and sin must be"),
    ],
)
def test_wrong_shapes_are_named(field: str, value: Tensor, message: str) -> None:
    case = write(torch.device("cpu"), [0, 1, 2])
    setattr(case, field, value)
    with pytest.raises(ValueError, match=message):
        case.run()
