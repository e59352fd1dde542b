"""Attention of long chunks by matrix products: the reference's answer, for exactly the sequences that it takes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard_kernels import cpu
from kvyard_kernels.cpu_chunks import LEAST_PAIRS, LEAST_QUERIES, chunk_attention, chunks_of
from torch import Tensor

from tests.kernels.cpu_cases import Case, make_case

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""In bfloat16 queries and weights are rounded too, as in any matrix product of that type."""

Span = tuple[int, int, int]


def attend(case: Case, spans: list[Span]) -> tuple[list[Tensor], list[int]]:
    """One step as the backend computes it: long chunks here, the rest by the routine; and who was taken here."""
    q, starts, lengths, tables = case.arguments(spans)
    chunks = chunks_of(starts, lengths, tables, case.pool.block_size, case.pool.dtype)
    taken = [chunk.sequence for chunk in chunks]
    tiles = cpu.attention_tiles(starts, lengths, case.heads // case.pool.kv_heads, taken)
    scale = case.pool.width**-0.5
    out = cpu.paged_attention(q, case.pool, 0, tables, starts, lengths, tiles, scale, 0, torch.float32)
    for chunk in chunks:
        chunk_attention(q, case.pool, 0, chunk, scale, out)
    rows = out.view(len(q), case.heads, case.pool.width)
    ends = starts.tolist()
    return [rows[a:b] for a, b in itertools.pairwise(ends)], taken


def largest_error(case: Case, spans: list[Span]) -> float:
    found, _ = attend(case, spans)
    return max(float((a - b).abs().max()) for a, b in zip(found, case.expect(spans), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (8, 2), (9, 3), (8, 1)])
def test_grouped_heads(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    case = make_case([300, 200], heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert largest_error(case, [(0, 0, 300), (1, 90, 200)]) < _TOLERANCE[dtype]


@pytest.mark.parametrize("width", [8, 20, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_any_width_and_block_size(width: int, block_size: int) -> None:
    case = make_case([333], heads=4, kv_heads=2, width=width, block_size=block_size)
    assert largest_error(case, [(0, 0, 333)]) < 2e-5
    assert largest_error(case, [(0, 200, 333)]) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_chunks_short_ones_and_decodes_in_one_step(dtype: torch.dtype) -> None:
    case = make_case([400, 40, 7, 500, 130], dtype=dtype)
    spans = [(0, 250, 400), (1, 10, 40), (2, 6, 7), (3, 499, 500), (4, 0, 130)]
    assert attend(case, spans)[1] == [0, 4], "neither short chunks nor decodes"
    assert largest_error(case, spans) < _TOLERANCE[dtype]


def test_KERNEL_06_unused_slots_never_enter_a_product() -> None:
    case = make_case([257], poison=torch.nan)
    found, taken = attend(case, [(0, 100, 257)])
    assert taken == [0]
    assert torch.isfinite(found[0]).all()


def test_who_is_taken() -> None:
    case = make_case([1024, 1024])
    least = LEAST_PAIRS // LEAST_QUERIES
    for first, end, taken in (
        (least - LEAST_QUERIES, least, [0]),
        (least - LEAST_QUERIES - 1, least - 1, []),
        (1024 - LEAST_QUERIES + 1, 1024, []),
        (0, 127, []),
        (0, 128, [0]),
    ):
        assert attend(case, [(0, first, end)])[1] == taken, (first, end)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_of_a_prompt_gives_the_reference(data: st.DataObject) -> None:
    length = data.draw(st.integers(33, 700))
    case = make_case([length], heads=6, kv_heads=2, width=32, seed=length)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length - 1), max_size=4))})
    for first, end in itertools.pairwise(cuts):
        assert largest_error(case, [(0, first, end)]) < 2e-5


def test_lengths_never_met_before_take_no_more_memory() -> None:
    """What torch compiles for a shape it keeps: products of any lengths must be of few shapes."""
    case = make_case([700], heads=2, kv_heads=1, dtype=torch.bfloat16)
    random = Random(1)

    def attend_to(count: int) -> None:
        for _ in range(count):
            end = random.randint(200, 700)
            first = random.choice([0, random.randint(0, end - 100)])
            attend(case, [(0, first, end)])

    attend_to(100)
    before = _resident()
    attend_to(300)
    assert _resident() - before < 12 << 20, "bytes; one shape per length takes 30 MiB"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
