"""Products in pieces: which row counts agree is found out, and pieces of these give a row the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvyard.engine.backends.cpu_linear import RowTiles, agreeing_rows, pack, pieces
from torch import Tensor

_SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=8, unique=True).map(sorted)


@given(_SIZES, st.integers(1, 2000))
def test_pieces_hold_all_rows_and_waste_less_than_one_piece(sizes: list[int], rows: int) -> None:
    chosen = pieces(sizes, rows)
    assert set(chosen) <= set(sizes)
    assert sum(chosen) >= rows
    assert sum(chosen[:-1]) < rows


def test_no_rows_need_no_pieces() -> None:
    assert pieces([8], 0) == []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_product_is_the_product(dtype: torch.dtype, bias: bool) -> None:
    weight, x = torch.randn(40, 48).to(dtype), torch.randn(5, 48).to(dtype)
    added = torch.randn(40) if bias else None
    expected = x.double() @ weight.double().T + (0.0 if added is None else added.to(dtype).double())
    assert (pack(weight, added)(x).double() - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 70])
def test_tiles_return_every_row_in_order(rows: int) -> None:
    weight, x = torch.randn(12, 16), torch.randn(rows, 16)
    calls: list[int] = []

    def product(part: Tensor) -> Tensor:
        calls.append(len(part))
        return part @ weight.T

    found = RowTiles(product, (8, 32))(x)
    assert found.shape == (rows, 12)
    assert (found - x @ weight.T).abs().max() < 1e-5
    assert set(calls) <= {8, 32}


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (100, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_pieces_have_the_same_bits_in_any_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Sums that cancel show any other order of summation; ordinary numbers would hide it in bfloat16."""
    outputs, inputs = shape
    half = torch.randn(outputs, inputs // 2)
    weight = torch.cat([half, -half, torch.zeros(outputs, inputs % 2)], 1).to(dtype)
    rows = torch.randn(300, inputs // 2)
    x = torch.cat([rows, rows, torch.zeros(300, inputs % 2)], 1).to(dtype)
    product = RowTiles(pack(weight, None), agreeing_rows(outputs, inputs, dtype))
    whole = product(x)
    for count in (1, 2, 3, 5, 8, 17, 31, 32, 33, 64, 65, 200):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[300 - count :]), whole[300 - count :])


def test_the_found_sizes_do_not_change_between_starts() -> None:
    assert agreeing_rows(96, 64, torch.bfloat16) == agreeing_rows(96, 64, torch.bfloat16)
