"""Paged decode attention against the dense float64 answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kvyard_kernels.cases import PagedCase, PagedShape, guarded, guards_intact, paged_case
from kvyard_kernels.triton import config, ops
from kvyard_kernels.triton.worklists import DecodeSplits, decode_splits

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CONTEXTS = (1, 15, 16, 17, 31, 33, 301)


def decodes(lengths: tuple[int, ...] = CONTEXTS, **shape: object) -> PagedShape:
    return replace(PagedShape(lengths, (1,) * len(lengths)), **shape)  # type: ignore[arg-type]  # fields by name


def splits(case: PagedCase, rows: slice = slice(None), padding: int = 0) -> DecodeSplits:
    return decode_splits(case.shape.lengths[rows], case.shape.window, case.q.device, padding)


def run(case: PagedCase, padding: int = 0) -> torch.Tensor:
    """The kernel's answer, written into a guarded, pre-poisoned output; the bands must survive."""
    out, whole = guarded(tuple(case.q.shape), case.q.dtype, case.q.device)
    ops.paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.lengths,
        splits(case, padding=padding),
        scale=case.scale,
        window=case.shape.window,
        out=out,
    )
    assert guards_intact(whole)
    return out


def check(case: PagedCase, padding: int = 0) -> torch.Tensor:
    out = run(case, padding)
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("poison", [math.nan, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poisoned_slots_never_enter_kernel_06(device: torch.device, dtype: torch.dtype, poison: float) -> None:
    check(paged_case(decodes(dtype=dtype, poison=poison), device=device))


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 48, 64, 128, 544])
def test_any_block_size_kernel_05(device: torch.device, block_size: int) -> None:
    check(paged_case(decodes((1, 23, 150, 300), block_size=block_size), device=device))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(12, 12, 16), (8, 2, 16), (9, 3, 64), (28, 4, 16), (32, 8, 16), (8, 1, 16), (4, 2, 80), (3, 1, 96), (4, 1, 128)],
)
def test_heads_share_their_own_kv_head_model_06(
    device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> None:
    check(paged_case(decodes((5, 40), heads=heads, kv_heads=kv_heads, head_dim=head_dim), device=device))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_all_dimensions_count_kernel_04(device: torch.device, head_dim: int) -> None:
    case = paged_case(decodes((3, 70), heads=2, kv_heads=1, head_dim=head_dim, zero_dims=64), device=device)
    out = check(case)
    uniform = torch.stack([values.double().mean(0)[[0, 0]] for values in case.values])
    assert (out.double().cpu() - uniform).abs().max() > 0.05, "the scores of the last dimensions were lost"


@pytest.mark.parametrize("scale", [1.0, 10.0, 50.0, 200.0])
def test_large_scores_kernel_12(device: torch.device, scale: float) -> None:
    case = paged_case(decodes((1, 2, 4, 16, 300), query_scale=scale), device=device)
    out = run(case)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_layouts_kernel_09(device: torch.device, fused: bool, heads_first: bool) -> None:
    check(paged_case(decodes((7, 290), fused=fused, heads_first=heads_first), device=device))


def test_a_transposed_query_and_output(device: torch.device) -> None:
    case = paged_case(decodes((7, 290)), device=device)
    turned = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    target = torch.zeros_like(turned)
    assert not target.is_contiguous()
    ops.paged_decode(
        turned,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.lengths,
        splits(case),
        scale=case.scale,
        out=target,
    )
    torch.testing.assert_close(target.double().cpu(), case.expected(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 4, 8, 255, 256, 257, 1000])
def test_sliding_window_model_07(device: torch.device, window: int) -> None:
    check(paged_case(decodes((1, 7, 8, 9, 30, 300, 520), window=window), device=device))


def test_a_window_holds_exactly_its_keys_model_07(device: torch.device) -> None:
    """One-hot values show which keys were seen: 12 to 19 of 20 for a window of 8."""
    case = paged_case(decodes((20,), heads=1, kv_heads=1, head_dim=32, window=8), device=device)
    for position in range(20):
        block = int(case.tables[0, position // 16])
        case.v_cache[block, position % 16] = torch.eye(32, device=device)[position]
        case.k_cache[block, position % 16] = 0.0
    seen = run(case)[0, 0].nonzero().flatten().tolist()
    assert seen == list(range(12, 20))


def test_rows_without_context_get_zeros(device: torch.device) -> None:
    out = check(paged_case(decodes((0, 300, 0, 1)), device=device))
    assert not out[[0, 2]].any()
    assert not check(paged_case(decodes((0, 0)), device=device)).any()


@pytest.mark.parametrize("lengths", [(1, 3, 257), (1, 3, 2)])
def test_more_items_than_splits(device: torch.device, lengths: tuple[int, ...]) -> None:
    """A launch of fixed size: programs without a split do nothing."""
    check(paged_case(decodes(lengths), device=device), padding=9)


@pytest.mark.parametrize("window", [0, 3])
def test_more_splits_than_keys(device: torch.device, window: int) -> None:
    """A list made for longer contexts: what lies behind a row's end weighs nothing."""
    case = paged_case(decodes((1, 3, 257), window=window), device=device)
    longer = replace(decode_splits([1000] * 3, 0, device), window=window)
    assert len(longer.rows) == 12
    out = ops.paged_decode(
        case.q, case.k_cache, case.v_cache, case.tables, case.lengths, longer, scale=case.scale, window=window
    )
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=2e-5, atol=2e-5)


def test_more_splits_than_the_merge_reads_at_once(device: torch.device) -> None:
    length = config.SPLIT * config.MERGE_TILE + 5
    check(paged_case(decodes((length, 9), heads=1, kv_heads=1), device=device))


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    """Splits lie at fixed positions, and a merge of one split is exact."""
    shape = decodes((100, 256, 257, 700), dtype=torch.float32)
    case = paged_case(shape, device=device)
    together = run(case)
    for row in range(len(shape.lengths)):
        alone = ops.paged_decode(
            case.q[row : row + 1],
            case.k_cache,
            case.v_cache,
            case.tables[row : row + 1],
            case.lengths[row : row + 1],
            splits(case, slice(row, row + 1)),
            scale=case.scale,
        )
        assert torch.equal(alone[0], together[row])


def test_the_last_block_of_a_full_table(device: torch.device) -> None:
    """A context that fills its table exactly: nothing to the right of it may be read."""
    case = paged_case(decodes((32, 64)), device=device)
    narrow = case.tables[:, :4].contiguous()
    out = ops.paged_decode(case.q, case.k_cache, case.v_cache, narrow, case.lengths, splits(case), scale=case.scale)
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("setting", ["as long as the contexts", "padded", "for longer contexts"])
def test_repeats_are_bit_equal_kernel_13(device: torch.device, setting: str) -> None:
    """The same call again and again, under each way to cut the contexts, with another launch between."""
    repeats = 2 if device.type == "cpu" else 100
    case, other = paged_case(decodes((30, 520)), device=device), paged_case(decodes((17,)), device=device)
    cut = {
        "as long as the contexts": splits(case),
        "padded": splits(case, padding=9),
        "for longer contexts": decode_splits([1000] * 2, 0, device),
    }[setting]

    def once() -> torch.Tensor:
        return ops.paged_decode(case.q, case.k_cache, case.v_cache, case.tables, case.lengths, cut, scale=case.scale)

    first = once().clone()
    torch.testing.assert_close(first.double().cpu(), case.expected(), rtol=2e-5, atol=2e-5)
    for _ in range(repeats):
        run(other)
        assert torch.equal(once(), first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 16)}, "3 query heads cannot share 2 KV heads"),
        ({"q": torch.zeros(2, 4, 8)}, "head_dim of the cache is 16, of q 8"),
        ({"q": torch.zeros(2, 64)}, r"q must be \[tokens, heads, head_dim\]"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, "they must agree"),
        ({"q": torch.zeros(2, 4, 32)[..., ::2]}, "side by side"),
        ({"tables": torch.zeros(3, 2, dtype=torch.int32)}, r"tables must be \[2, b\]"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must be \[2\]"),
        ({"v_cache": torch.zeros(4, 16, 2, 8)}, "k_cache and v_cache must both be"),
        ({"k_cache": torch.zeros(4, 16, 2, 16, dtype=torch.float64)}, "both must be one of"),
        ({"out": torch.zeros(3, 4, 16)}, r"out must be \[2, 4, 16\]"),
        ({"window": -1, "splits": decode_splits([1, 1], -1)}, "window must be positive"),
        ({"window": 5}, "splits are for 2 rows and window 0, the call for 2 and 5"),
        ({"splits": decode_splits([1, 1, 1])}, "splits are for 3 rows"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, object], message: str) -> None:
    call: dict[str, object] = {
        "q": torch.zeros(2, 4, 16),
        "k_cache": torch.zeros(4, 16, 2, 16),
        "v_cache": torch.zeros(4, 16, 2, 16),
        "tables": torch.zeros(2, 2, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
        "splits": decode_splits([1, 1]),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        ops.paged_decode(**{**call, **change})  # type: ignore[arg-type]  # wrong on purpose


def test_no_rows_is_no_launch() -> None:
    out = ops.paged_decode(
        torch.zeros(0, 4, 16),
        torch.zeros(4, 16, 2, 16),
        torch.zeros(4, 16, 2, 16),
        torch.zeros(0, 1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        decode_splits([]),
        scale=1.0,
    )
    assert out.shape == (0, 4, 16)


def test_splits_cover_the_window_of_every_row_once() -> None:
    lengths, window = [0, 1, 256, 257, 1000, 700], 300
    made = decode_splits(lengths, window, padding=2)
    covered: dict[int, set[int]] = {row: set() for row in range(len(lengths))}
    for row, number in zip(made.rows.tolist(), made.numbers.tolist(), strict=True):
        if row < 0:
            continue
        positions = set(range(number * config.SPLIT, (number + 1) * config.SPLIT))
        assert not positions & covered[row]
        covered[row] |= positions
    for row, length in enumerate(lengths):
        assert set(range(max(0, length - window), length)) <= covered[row]
    counts = made.firsts.diff().tolist()
    assert counts == [1, 1, 1, 2, 2, 2]
    assert made.several
    assert made.rows.tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5, -1, -1]
    assert not decode_splits([1, 256, 0]).several
