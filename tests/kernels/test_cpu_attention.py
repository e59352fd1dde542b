"""CPU attention against the reference, and its promise: a row's bits depend on its position and keys alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard_kernels import cpu

from tests.kernels.cpu_cases import make_case

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-5}
"""Of the kernel on whatever the pool holds: it computes in float32 from bfloat16 keys and values as well."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (8, 2), (9, 3), (28, 4), (32, 8), (8, 1), (25, 1)])
def test_model_06_grouped_heads(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """MODEL-06: every grouping equals repeat-each, for chunks and decodes in one call."""
    case = make_case([40, 17, 33], heads=heads, kv_heads=kv_heads, dtype=dtype)
    chunks = [(0, 39, 40), (1, 0, 17), (2, 20, 33)]
    for found, expected in zip(case.attend(chunks), case.expect(chunks), strict=True):
        assert (found - expected).abs().max() < _TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 48, 64, 128, 544])
def test_kernel_05_any_block_size(block_size: int) -> None:
    """KERNEL-05: sizes that are no power of two, below a vector, and above every tile."""
    case = make_case([70, 5], block_size=block_size)
    chunks = [(0, 63, 70), (1, 4, 5)]
    for found, expected in zip(case.attend(chunks), case.expect(chunks), strict=True):
        assert (found - expected).abs().max() < 2e-5


@pytest.mark.parametrize("width", [8, 16, 20, 32, 64, 80, 96, 128, 256])
def test_kernel_04_any_head_width(width: int) -> None:
    """KERNEL-04: all dimensions count, also those behind the first 64, and none beyond the width."""
    case = make_case([37], heads=4, kv_heads=2, width=width)
    chunks = [(0, 30, 37)]
    assert (case.attend(chunks)[0] - case.expect(chunks)[0]).abs().max() < 2e-5


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 31, 33, 1001])
def test_kernel_06_unused_slots_never_enter(context: int, poison: float) -> None:
    """KERNEL-06: whatever unwritten slots hold, the result is the reference's."""
    case = make_case([context], poison=poison)
    chunks = [(0, max(0, context - 3), context)]
    assert (case.attend(chunks)[0] - case.expect(chunks)[0]).abs().max() < 2e-5


@pytest.mark.parametrize("length", [7, 8, 9, 20, 100])
@pytest.mark.parametrize("window", [1, 4, 8, 33])
def test_kernel_11_windows_in_chunks_and_decodes(length: int, window: int) -> None:
    """KERNEL-11, MODEL-08: a window that hides whole blocks gives no NaN, and decode sees what prefill saw."""
    case = make_case([length])
    whole = case.attend([(0, 0, length)], window)[0]
    assert (whole - case.expect([(0, 0, length)], window)[0]).abs().max() < 2e-5
    for position in range(length):
        assert torch.equal(case.attend([(0, position, position + 1)], window)[0][0], whole[position])


@pytest.mark.parametrize("magnitude", [1.0, 10.0, 50.0, 200.0])
def test_kernel_12_large_scores_stay_finite(magnitude: float) -> None:
    """KERNEL-12: the largest score is subtracted before exp, whatever it is."""
    case = make_case([48], magnitude=magnitude)
    found, expected = case.attend([(0, 32, 48)])[0], case.expect([(0, 32, 48)])[0]
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < 1e-3 * magnitude


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64, 100])
def test_chunks_change_no_bit(chunk: int, dtype: torch.dtype) -> None:
    case = make_case([300], dtype=dtype)
    whole = case.attend([(0, 0, 300)])[0]
    for first in range(0, 300, chunk):
        end = min(300, first + chunk)
        assert torch.equal(case.attend([(0, first, end)])[0], whole[first:end])


def test_neighbours_change_no_bit() -> None:
    case = make_case([130, 17, 64, 1, 257])
    solo = [case.attend([(i, 0, len(q))])[0] for i, q in enumerate(case.queries)]
    together = case.attend([(4, 200, 257), (0, 129, 130), (2, 0, 64), (3, 0, 1), (1, 16, 17), (0, 5, 90)])
    for found, expected in zip(
        together, [solo[4][200:], solo[0][129:], solo[2], solo[3], solo[1][16:], solo[0][5:90]], strict=True
    ):
        assert torch.equal(found, expected)


def test_threads_change_no_bit() -> None:
    case = make_case([400, 90])
    chunks = [(0, 100, 400), (1, 89, 90)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.attend(chunks)
        torch.set_num_threads(4)
        shared = case.attend(chunks)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_the_place_of_blocks_changes_no_bit() -> None:
    first, second = make_case([200], seed=3), make_case([200], seed=3)
    order = torch.randperm(second.pool.blocks.shape[0], generator=torch.Generator().manual_seed(9))
    moved = torch.empty_like(second.pool.blocks)
    moved[order] = second.pool.blocks
    second.pool.blocks.copy_(moved)
    second.tables[:] = order[second.tables.long()].int()
    assert torch.equal(first.attend([(0, 0, 200)])[0], second.attend([(0, 0, 200)])[0])


def test_output_type_is_a_rounding_of_the_same_result() -> None:
    case = make_case([50], dtype=torch.bfloat16)
    wide, half = (case.attend([(0, 40, 50)], dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(wide.bfloat16(), half)


def test_tiles_cover_every_query_once() -> None:
    starts = torch.tensor([0, 1, 2, 40, 41, 300], dtype=torch.int32)
    tiles = cpu.attention_tiles(starts, torch.tensor([9, 1, 60, 1, 259], dtype=torch.int32), group=3)
    covered = [token for _, first, count in tiles.tiles.tolist() for token in range(first, first + count)]
    assert covered == list(range(300))
    assert tiles.longest == 259
    for row, first, count in tiles.tiles.tolist():
        assert int(starts[row]) <= first
        assert first + count <= int(starts[row + 1])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16, 20]),
    group=st.sampled_from([1, 2, 3, 5]),
    window=st.sampled_from([0, 1, 7, 40]),
    data=st.data(),
)
def test_any_batch_equals_the_reference(
    lengths: list[int], block_size: int, group: int, window: int, data: st.DataObject
) -> None:
    case = make_case(lengths, heads=2 * group, kv_heads=2, width=16, block_size=block_size)
    chunks = []
    for i, length in enumerate(lengths):
        first = data.draw(st.integers(0, length - 1))
        chunks.append((i, first, length))
    for found, expected in zip(case.attend(chunks, window), case.expect(chunks, window), strict=True):
        assert (found - expected).abs().max() < 2e-5


def test_kernel_09_queries_of_any_layout() -> None:
    """KERNEL-09: a transposed view and a slice of queries give the bits of their copy."""
    case = make_case([30])
    starts, lengths = torch.tensor([0, 10], dtype=torch.int32), torch.tensor([30], dtype=torch.int32)
    tiles = cpu.attention_tiles(starts, lengths, 3)
    q = case.queries[0][20:]
    wide = torch.zeros(10, 15, 64)
    wide[:, 3:12] = q
    layouts = [q, q.transpose(0, 1).contiguous().transpose(0, 1), wide[:, 3:12]]
    results = [
        cpu.paged_attention(x, case.pool, 0, case.tables, starts, lengths, tiles, 0.125, 0, torch.float32)
        for x in layouts
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_python_threads_do_not_share_working_memory() -> None:
    from concurrent.futures import ThreadPoolExecutor

    cases = [make_case([100 + 30 * i], seed=i) for i in range(4)]
    expected = [case.attend([(0, 50, 100)])[0] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = list(pool.map(lambda case: case.attend([(0, 50, 100)])[0], cases))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
