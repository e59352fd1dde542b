"""Products with quantised weights: the file's exact values in float32, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard_kernels import cpu
from torch import Tensor


def _random_matrix(outputs: int, inputs: int, bits: int, seed: int = 0) -> tuple[cpu.Quantised, Tensor]:
    """A packed matrix and the float64 weights that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // 32
    scales = (torch.rand(outputs, groups, generator=generator) * 0.02 + 1e-3).half()
    if bits == 8:
        codes = torch.randint(-128, 128, (outputs, groups, 32), generator=generator).to(torch.int8)
        dense = codes.double() * scales.double()[..., None]
        return cpu.pack_quantised(codes, scales, None), dense.view(outputs, inputs)
    values = torch.randint(0, 16, (outputs, groups, 32), generator=generator)
    offsets = (-scales * 7.7).half()
    codes = (values[..., :16] | (values[..., 16:] << 4)).to(torch.uint8)
    dense = values.double() * scales.double()[..., None] + offsets.double()[..., None]
    return cpu.pack_quantised(codes, scales, offsets), dense.view(outputs, inputs)


def _rows(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (37, 64), (960, 576), (576, 1536), (1, 96)])
def test_products_are_exact_to_float32(outputs: int, inputs: int, dtype: torch.dtype, bits: int) -> None:
    matrix, dense = _random_matrix(outputs, inputs, bits)
    x = _rows(13, inputs, dtype)
    found = cpu.quantised_product(x, matrix, None, torch.float32)
    expected = x.double() @ dense.T
    magnitude = x.double().abs() @ dense.abs().T
    assert ((found.double() - expected).abs() <= 2e-6 * magnitude).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_bias_and_rounding(bits: int) -> None:
    matrix, _ = _random_matrix(50, 64, bits)
    x, bias = _rows(3, 64), torch.randn(50)
    wide = cpu.quantised_product(x, matrix, None, torch.float32)
    assert torch.equal(cpu.quantised_product(x, matrix, bias, torch.float32), wide + bias)
    assert torch.equal(cpu.quantised_product(x, matrix, bias, torch.bfloat16), (wide + bias).bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_rows_changes_no_bit(bits: int, dtype: torch.dtype) -> None:
    """Weights that cancel leave nothing but rounding, so that any other order of summation would show."""
    matrix, _ = _random_matrix(80, 256, bits)
    half = _rows(40, 128, dtype)
    x = torch.cat([half, -half], dim=1)
    whole = cpu.quantised_product(x, matrix, None, torch.float32)
    for count in range(1, 40):
        assert torch.equal(cpu.quantised_product(x[:count], matrix, None, torch.float32), whole[:count])
        assert torch.equal(cpu.quantised_product(x[-count:], matrix, None, torch.float32), whole[-count:])


def test_threads_change_no_bit() -> None:
    matrix, _ = _random_matrix(500, 256, 4)
    x = _rows(70, 256)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(cpu.quantised_product(x, matrix, None, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 0x7BFF), st.booleans())
def test_every_finite_float16_is_read_exactly(bits: int, negative: bool) -> None:
    """Subnormal numbers and both signs: scales are read by shifting bits."""
    scale = (
        torch.tensor([[bits | (0x8000 if negative else 0)]], dtype=torch.int32).to(torch.int16).view(torch.float16)
    )
    codes = torch.zeros(1, 1, 32, dtype=torch.int8)
    codes[0, 0, 5] = 1
    x = torch.zeros(1, 32)
    x[0, 5] = 1.0
    found = cpu.quantised_product(x, cpu.pack_quantised(codes, scale, None), None, torch.float32)
    assert float(found[0, 0]) == float(scale[0, 0])


def test_every_input_meets_its_own_code() -> None:
    """Both halves of every byte, for one output and one input at a time."""
    values = torch.arange(64).view(1, 2, 32) % 16
    codes = (values[..., :16] | (values[..., 16:] << 4)).to(torch.uint8)
    matrix = cpu.pack_quantised(codes, torch.ones(1, 2).half(), torch.zeros(1, 2).half())
    found = cpu.quantised_product(torch.eye(64), matrix, None, torch.float32)
    assert found[:, 0].tolist() == values.view(-1).float().tolist()
    signed = torch.arange(-32, 32).to(torch.int8).view(1, 2, 32)
    matrix = cpu.pack_quantised(signed, torch.ones(1, 2).half(), None)
    assert cpu.quantised_product(torch.eye(64), matrix, None, torch.float32)[:, 0].tolist() == list(range(-32, 32))


def test_sizes_are_told() -> None:
    matrix, _ = _random_matrix(37, 64, 4)
    assert (matrix.outputs, matrix.inputs, matrix.bits) == (37, 64, 4)
    matrix, _ = _random_matrix(16, 96, 8)
    assert (matrix.outputs, matrix.inputs, matrix.bits) == (16, 96, 8)
