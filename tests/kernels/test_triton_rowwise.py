"""RMSNorm and the gated activations against the torch references."""

from __future__ import annotations

import pytest
import torch
from kvyard_kernels import reference
from kvyard_kernels.cases import guarded, guards_intact
from kvyard_kernels.triton import ops

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def rows(device: torch.device, count: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, size), generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 576, 1000, 4096])
def test_rms_norm(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x, weight = rows(device, 5, size, dtype), rows(device, 1, size, dtype, 1)[0]
    out, whole = guarded((5, size), dtype, device)
    ops.rms_norm(x, weight, 1e-5, out=out)
    close = tolerance(dtype)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), rtol=close, atol=close)
    assert guards_intact(whole)


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_with_residual(device: torch.device, dtype: torch.dtype) -> None:
    x, residual, weight = (
        rows(device, 3, 576, dtype),
        rows(device, 3, 576, dtype, 1),
        rows(device, 1, 576, dtype, 2)[0],
    )
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    out = ops.rms_norm(x, weight, 1e-5, residual=residual)
    close = tolerance(dtype)
    torch.testing.assert_close(out, expected, rtol=close, atol=close)
    torch.testing.assert_close(residual, total, rtol=close, atol=close)


def test_rms_norm_of_tiny_and_huge_rows(device: torch.device) -> None:
    """Squares of bfloat16 values overflow in half precision: the sum is formed in float32."""
    x = torch.stack([torch.full((64,), 1e-6), torch.full((64,), 6e4), torch.zeros(64)]).to(torch.float16).to(device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    out = ops.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), rtol=2e-2, atol=1e-3)
    assert out.isfinite().all()


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    x, weight = rows(device, 17, 576, torch.float32), rows(device, 1, 576, torch.float32, 1)[0]
    together = ops.rms_norm(x, weight, 1e-5)
    for row in (0, 3, 16):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_rows_of_a_wider_matrix(device: torch.device) -> None:
    wide = rows(device, 4, 200, torch.float32)
    weight = torch.ones(100, device=device)
    out = ops.rms_norm(wide[:, 50:150], weight, 1e-5)
    torch.testing.assert_close(out, reference.rms_norm(wide[:, 50:150], weight, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 63, 1024, 1536])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated(device: torch.device, dtype: torch.dtype, size: int, name: str) -> None:
    fused = rows(device, 3, 2 * size, dtype)
    gate, up = fused.chunk(2, dim=1)
    out, whole = guarded((3, size), dtype, device)
    ops.gated(gate, up, activation_name=name, out=out)
    expected = (reference.swiglu if name == "silu" else reference.geglu)(fused)
    close = tolerance(dtype)
    torch.testing.assert_close(out, expected, rtol=close, atol=close)
    assert guards_intact(whole)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated_limits(device: torch.device, name: str) -> None:
    """exp overflows at both ends; the activation goes to 0 or to its argument."""
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=device)
    out = ops.gated(gate, torch.ones_like(gate), activation_name=name)
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]), rtol=1e-6, atol=1e-6)


def test_no_rows_is_no_launch(device: torch.device) -> None:
    empty = torch.empty((0, 64), device=device)
    assert ops.rms_norm(empty, torch.ones(64, device=device), 1e-5).shape == (0, 64)
    assert ops.gated(empty, empty).shape == (0, 64)


def test_wrong_shapes_are_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        ops.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"residual and out must be \[2, 8\]"):
        ops.rms_norm(x, torch.ones(8), 1e-5, residual=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="differ"):
        ops.gated(x, torch.zeros(2, 9))
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        ops.gated(x, x, activation_name="relu")
