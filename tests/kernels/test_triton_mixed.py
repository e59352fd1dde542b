"""Attention over chunks of any length against the dense float64 answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kvyard_kernels.cases import PagedCase, PagedShape, as_decodes, guarded, guards_intact, paged_case
from kvyard_kernels.triton import ops
from kvyard_kernels.triton.worklists import decode_splits, query_tiles, tile_span

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def chunks(lengths: tuple[int, ...], counts: tuple[int, ...], **shape: object) -> PagedShape:
    return replace(PagedShape(lengths, counts), **shape)  # type: ignore[arg-type]  # fields by name


def run(case: PagedCase) -> torch.Tensor:
    out, whole = guarded(tuple(case.q.shape), case.q.dtype, case.q.device)
    span = tile_span(case.shape.heads, case.k_cache)
    ops.paged_mixed(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.starts,
        case.lengths,
        query_tiles(case.starts.tolist(), span, case.q.device),
        scale=case.scale,
        window=case.shape.window,
        out=out,
    )
    assert guards_intact(whole)
    return out


def check(case: PagedCase) -> torch.Tensor:
    out = run(case)
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("poison", [math.nan, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decodes_and_chunks_in_one_launch_kernel_06(device: torch.device, dtype: torch.dtype, poison: float) -> None:
    shape = chunks((1, 33, 301, 17, 80, 64), (1, 1, 1, 17, 29, 64), dtype=dtype, poison=poison)
    check(paged_case(shape, device=device))


@pytest.mark.parametrize("start", [0, 1, 15, 16, 37])
@pytest.mark.parametrize("count", [1, 29, 64])
def test_chunks_from_anywhere_kernel_10(device: torch.device, start: int, count: int) -> None:
    check(paged_case(chunks((start + count,), (count,)), device=device))


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 48, 64, 128, 544])
def test_any_block_size_kernel_05(device: torch.device, block_size: int) -> None:
    check(paged_case(chunks((40, 9), (23, 9), block_size=block_size), device=device))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 16), (9, 3, 64), (28, 4, 16), (8, 1, 16), (4, 2, 80), (3, 1, 96), (2, 1, 256)],
)
def test_head_shapes_model_06(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> None:
    check(paged_case(chunks((40, 9), (23, 9), heads=heads, kv_heads=kv_heads, head_dim=head_dim), device=device))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_all_dimensions_count_kernel_04(device: torch.device, head_dim: int) -> None:
    check(paged_case(chunks((30,), (9,), heads=2, kv_heads=1, head_dim=head_dim, zero_dims=64), device=device))


@pytest.mark.parametrize("window", [1, 4, 8, 33, 1000])
def test_a_window_that_masks_whole_tiles_kernel_11(device: torch.device, window: int) -> None:
    check(paged_case(chunks((100, 100, 20), (20, 1, 20), window=window), device=device))


@pytest.mark.parametrize("scale", [1.0, 10.0, 50.0, 200.0])
def test_large_scores_kernel_12(device: torch.device, scale: float) -> None:
    case = paged_case(chunks((1, 2, 4, 16, 90), (1, 2, 4, 16, 1), query_scale=scale), device=device)
    out = run(case)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_layouts_kernel_09(device: torch.device, fused: bool, heads_first: bool) -> None:
    check(paged_case(chunks((50, 20), (30, 1), fused=fused, heads_first=heads_first), device=device))


def test_rows_without_tokens_take_no_part(device: torch.device) -> None:
    """Padding rows of a batch: no query, whatever their context."""
    out = check(paged_case(chunks((0, 40, 12, 9), (0, 5, 0, 9)), device=device))
    assert out.shape[0] == 14


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("pieces", [(30,), (5, *(1,) * 25), (16, 14), (1, 29), (7, 8, 15)])
def test_a_token_has_the_same_bits_in_every_chunking_model_08(
    device: torch.device, window: int, pieces: tuple[int, ...]
) -> None:
    whole = paged_case(chunks((30,), (30,), window=window, poison=0.0), device=device)
    expected = run(whole)
    done = 0
    for piece in pieces:
        tiles = query_tiles([0, piece], tile_span(whole.shape.heads, whole.k_cache), device)
        part = ops.paged_mixed(
            whole.q[done : done + piece],
            whole.k_cache,
            whole.v_cache,
            whole.tables,
            torch.tensor([0, piece], dtype=torch.int32, device=device),
            torch.tensor([done + piece], dtype=torch.int32, device=device),
            tiles,
            scale=whole.scale,
            window=window,
        )
        assert torch.equal(part, expected[done : done + piece])
        done += piece


@pytest.mark.parametrize("window", [0, 9])
def test_decodes_agree_with_the_decode_kernel_model_08(device: torch.device, window: int) -> None:
    case = paged_case(as_decodes(chunks((1, 17, 300), (1, 1, 1), window=window)), device=device)
    alone = ops.paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.lengths,
        decode_splits(case.shape.lengths, window, device),
        scale=case.scale,
        window=window,
    )
    torch.testing.assert_close(run(case), alone, rtol=1e-5, atol=1e-5)


def test_query_tiles_cover_every_token_once() -> None:
    starts = [0, 1, 1, 24, 45, 46]
    tiles = query_tiles(starts, 21, "cpu")
    covered = [
        starts[row] + token
        for row, first in zip(tiles.rows.tolist(), tiles.tokens.tolist(), strict=True)
        for token in range(first, min(first + 21, starts[row + 1] - starts[row]))
    ]
    assert covered == list(range(46))
    assert len(tiles.rows) == 1 + 0 + 2 + 1 + 1


def test_tiles_of_another_head_shape_are_refused() -> None:
    case = paged_case(chunks((9,), (9,)))
    with pytest.raises(ValueError, match="query tiles of 3 tokens"):
        ops.paged_mixed(
            case.q,
            case.k_cache,
            case.v_cache,
            case.tables,
            case.starts,
            case.lengths,
            query_tiles([0, 9], 3, "cpu"),
            scale=1.0,
        )


@pytest.mark.gpu
def test_query_offsets_beyond_32_bits_kernel_02(device: torch.device) -> None:
    """262,200 rows of 8,192 elements: the last ones lie beyond 2^31."""
    if device.type == "cpu":
        pytest.skip("8 GiB of queries are for a GPU")
    rows, heads, dim = 262_200, 64, 128
    case = paged_case(chunks((8,), (1,), heads=heads, kv_heads=8, head_dim=dim, dtype=torch.bfloat16), device=device)
    q = torch.zeros(rows, heads, dim, dtype=torch.bfloat16, device=device)
    q[-1] = case.q[0]
    lengths = torch.full((rows,), 8, dtype=torch.int32, device=device)
    out = ops.paged_decode(
        q,
        case.k_cache,
        case.v_cache,
        case.tables.expand(rows, -1),
        lengths,
        decode_splits([8] * rows, 0, device),
        scale=case.scale,
    )
    torch.testing.assert_close(out[-1:].double().cpu(), case.expected(), rtol=2e-2, atol=2e-2)
