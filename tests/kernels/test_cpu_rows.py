"""Row-wise CPU kernels against the references, row by row and in both types."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard_kernels import cpu, reference
from torch import Tensor

_DTYPES = [torch.float32, torch.bfloat16]
_LARGE = 700
"""Rows that make the kernels use threads."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for float32 rounding, which may tip a bfloat16 to its neighbour."""
    if found.dtype == torch.float32:
        return bool((found - expected).abs().max() <= 2e-6 * expected.abs().max())
    step = expected.float().abs() * 2.0**-7 + 1e-30
    return bool(((found.float() - expected.float()).abs() <= step).all())


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 64), (3, 100), (2, 7), (_LARGE, 64)])
def test_norm_adds_and_normalises(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = _random(rows, width).to(dtype), _random(rows, width, seed=1), _random(width, seed=2)
    expected, stream = reference.add_rms_norm(x, residual, weight, 1e-5)
    found = cpu.rms_norm(residual, weight, 1e-5, x, dtype)
    assert torch.equal(residual, stream)
    assert _close(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_norm_alone_leaves_the_stream(dtype: torch.dtype) -> None:
    residual, weight = _random(4, 96), _random(96, seed=1)
    before = residual.clone()
    found = cpu.rms_norm(residual, weight, 1e-6, None, dtype)
    assert torch.equal(residual, before)
    assert _close(found, reference.rms_norm(residual, weight, 1e-6).to(dtype))


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 50), (2, 3), (_LARGE, 64)])
def test_gates(rows: int, width: int, dtype: torch.dtype, gelu: bool) -> None:
    gate_up = (_random(rows, 2 * width) * 5).to(dtype)
    # In float64, since the reference's own tanh cancels to 0 in float32 where a gate is -5.
    gate, up = gate_up.double().chunk(2, dim=-1)
    exponent = 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3) if gelu else gate
    assert _close(cpu.gated(gate_up, gelu), (gate * torch.sigmoid(exponent) * up).to(dtype))


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_at_the_ends_of_the_range(gelu: bool) -> None:
    gate = torch.tensor([[-3e4, -100.0, -88.0, -87.0, -20.0, -0.0, 0.0, 20.0, 87.0, 88.0, 100.0, 3e4]])
    found = cpu.gated(torch.cat([gate, torch.ones_like(gate)], dim=1), gelu)
    expected = (reference.geglu if gelu else reference.swiglu)(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (2, 2, 20), (4, 1, 128)])
def test_rope_and_cache(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    pool = cpu.CpuPool(6, 3, kv_heads, width, 16, dtype)
    pool.blocks.fill_(torch.nan)
    qkv = _random(5, (heads + 2 * kv_heads) * width).to(dtype)
    slots = torch.tensor([37, 3, 95, 16, 80])
    cos, sin = reference.rope_tables(torch.tensor([0, 1, 9, 500, 8191]), reference.inverse_frequencies(width, 1e4))
    q, k, v = qkv.view(5, -1, width).split([heads, kv_heads, kv_heads], dim=1)  # type: ignore[no-untyped-call] # torch
    found = cpu.rope_and_cache(qkv, heads, cos, sin, pool, 1, slots)
    assert _close(found, reference.rope(q.float(), cos, sin))
    assert _close(pool.keys(1)[slots // 16, slots % 16], reference.rope(k, cos, sin))
    assert torch.equal(pool.values(1)[slots // 16, slots % 16], v)
    untouched = torch.ones(6, 16, dtype=torch.bool)
    untouched[slots // 16, slots % 16] = False
    assert pool.keys(1)[untouched].isnan().all()
    assert pool.values(1)[untouched].isnan().all()
    assert pool.blocks[:, [0, 2]].isnan().all()


def test_heads_are_normalised_before_they_are_turned() -> None:
    pool = cpu.CpuPool(1, 1, 2, 32, 16, torch.float32)
    qkv, norms = _random(3, 8 * 32), (_random(32, seed=1), _random(32, seed=2))
    cos, sin = reference.rope_tables(torch.arange(3) + 40, reference.inverse_frequencies(32, 1e4))
    found = cpu.rope_and_cache(qkv, 4, cos, sin, pool, 0, torch.arange(3), norms, 1e-6)
    heads = qkv.view(3, 8, 32)
    assert _close(found, reference.rope(reference.rms_norm(heads[:, :4], norms[0], 1e-6), cos, sin))
    keys = reference.rope(reference.rms_norm(heads[:, 4:6], norms[1], 1e-6), cos, sin)
    assert _close(pool.keys(0)[0, :3], keys)
    assert torch.equal(pool.values(0)[0, :3], heads[:, 6:])


def test_partial_rope() -> None:
    pool = cpu.CpuPool(1, 1, 1, 32, 16, torch.float32)
    qkv = _random(2, 3 * 32)
    cos, sin = reference.rope_tables(torch.arange(2) + 7, reference.inverse_frequencies(8, 1e4))
    found = cpu.rope_and_cache(qkv, 1, cos, sin, pool, 0, torch.arange(2))
    assert _close(found, reference.rope(qkv.view(2, 3, 32)[:, :1], cos, sin))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_row_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    x, residual, weight = _random(_LARGE, 128).to(dtype), _random(_LARGE, 128, seed=1), torch.ones(128)
    together = cpu.rms_norm(residual.clone(), weight, 1e-5, x, dtype)
    gated = cpu.gated(x)
    for row in (0, 1, 350, _LARGE - 1):
        one = slice(row, row + 1)
        assert torch.equal(cpu.rms_norm(residual[one].clone(), weight, 1e-5, x[one], dtype)[0], together[row])
        assert torch.equal(cpu.gated(x[one])[0], gated[row])


@settings(max_examples=200)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    """Nearest, ties to even, infinities kept; a NaN stays one. Seen through a cache write, which only rounds."""
    pool = cpu.CpuPool(1, 1, 1, len(values), 1, torch.bfloat16)
    qkv = torch.tensor([values * 3], dtype=torch.float32)
    half = max(1, len(values) // 2)
    cpu.rope_and_cache(
        torch.cat([qkv[:, : 2 * len(values)] * 0, qkv[:, 2 * len(values) :]], 1), 1,
        torch.ones(1, half) if len(values) > 1 else torch.ones(1, 0),
        torch.zeros(1, half) if len(values) > 1 else torch.zeros(1, 0), pool, 0, torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    found, expected = pool.values(0)[0, 0, 0], torch.tensor(values).bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_kernel_09_views_of_larger_tensors() -> None:
    """KERNEL-09: slices and transposed views give what their copies give."""
    wide = _random(6, 200)
    view, copy = wide[:, 40:168], wide[:, 40:168].contiguous()
    assert torch.equal(cpu.gated(view), cpu.gated(copy))
    residual, weight = _random(6, 128), torch.ones(128)
    assert torch.equal(
        cpu.rms_norm(residual.clone(), weight, 1e-5, view, torch.float32),
        cpu.rms_norm(residual.clone(), weight, 1e-5, copy, torch.float32),
    )
    with pytest.raises(AssertionError, match="in place"):
        cpu.rms_norm(wide[:, 40:168], weight, 1e-5, None, torch.float32)
    cos, sin = reference.rope_tables(torch.arange(6), reference.inverse_frequencies(32, 1e4))
    pools = [cpu.CpuPool(1, 1, 1, 32, 16, torch.float32) for _ in range(2)]
    turned = [
        cpu.rope_and_cache(x, 2, cos, sin, pool, 0, torch.arange(6))
        for x, pool in zip((view, copy), pools, strict=True)
    ]
    assert torch.equal(turned[0], turned[1])
    assert torch.equal(pools[0].keys(0)[0, :6], pools[1].keys(0)[0, :6])
