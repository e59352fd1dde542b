"""Plans become batches: order, positions, cache slots and logits rows, against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core.plan import Plan
from kvyard.engine.backends.base import Batch
from kvyard.engine.batching import build_batch
from kvyard.engine.prompt_scores import Stretch


def _plan(chunks: list[tuple[int, int, int, bool]], block_size: int, seed: int = 0) -> Plan:
    """Chunks `(slot, computed, granted, samples)` with random tables and tokens; poison behind each table."""
    generator = np.random.default_rng(seed)
    slots = 1 + max((slot for slot, *_ in chunks), default=0)
    longest = max((computed + granted for _, computed, granted, _ in chunks), default=1)
    tables = np.full((slots, -(-longest // block_size) + 2), 1 << 30, dtype=np.int32)
    for slot, computed, granted, _ in chunks:
        needed = -(-(computed + granted) // block_size)
        tables[slot, :needed] = generator.integers(0, 1000, needed)
    columns = np.array([chunk[:3] for chunk in chunks], dtype=np.int64).reshape(-1, 3)
    return Plan(
        step=7,
        ids=columns[:, 0] + 100,
        slots=columns[:, 0],
        granted=columns[:, 2],
        computed=columns[:, 1],
        samples=np.array([samples for *_, samples in chunks], dtype=np.bool_),
        tables=tables,
        tokens=generator.integers(0, 50_000, (slots, longest)).astype(np.int32),
    )


def _check(plan: Plan, block_size: int) -> None:
    scored = [
        Stretch(row, int(plan.computed[row]) + row % 3, int(plan.computed[row] + plan.granted[row]))
        for row in range(0, len(plan), 2)
        if plan.granted[row] > row % 3
    ]
    batch, slots = build_batch(plan, block_size, scored)
    _check_scored(plan, batch, scored)
    order = sorted(range(len(plan)), key=lambda i: plan.granted[i] != 1)
    assert batch.decodes == int((plan.granted == 1).sum())
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    assert starts[0] == 0
    for row, i in enumerate(order):
        slot, first, count = int(plan.slots[i]), int(plan.computed[i]), int(plan.granted[i])
        assert starts[row + 1] - starts[row] == count
        assert lengths[row] == first + count
        needed = -(-(first + count) // block_size)
        assert batch.tables[row, :needed].tolist() == plan.tables[slot, :needed].tolist()
        for j in range(count):
            at, position = starts[row] + j, first + j
            assert batch.positions[at] == position
            assert batch.tokens[at] == plan.tokens[slot, position]
            block = int(plan.tables[slot, position // block_size])
            assert batch.cache_slots[at] == block * block_size + position % block_size
    rows = {i: starts[row + 1] - 1 for row, i in enumerate(order)}
    sampled = [i for i in range(len(plan)) if plan.samples[i]]
    assert batch.logit_rows.tolist() == [rows[i] for i in sampled]
    assert slots.tolist() == [int(plan.slots[i]) for i in sampled]


def _check_scored(plan: Plan, batch: Batch, scored: list[Stretch]) -> None:
    """The rows are those of the stretches' positions, in their order."""
    if not scored:
        assert batch.scored_rows is None
        return
    assert batch.scored_rows is not None
    wanted = [(stretch.row, position) for stretch in scored for position in range(stretch.begin, stretch.end)]
    at = batch.scored_rows.tolist()
    assert batch.positions[at].tolist() == [position for _, position in wanted]
    assert batch.tokens[at].tolist() == [int(plan.tokens[plan.slots[row], position]) for row, position in wanted]


@settings(deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40)), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    block_size=st.sampled_from([1, 4, 16, 24]),
    seed=st.integers(0, 100),
)
def test_any_plan(chunks: list[tuple[int, int, bool]], block_size: int, seed: int) -> None:
    slots = np.random.default_rng(seed).permutation(len(chunks)).tolist()
    _check(_plan([(slots[i], *chunk) for i, chunk in enumerate(chunks)], block_size, seed), block_size)


@pytest.mark.parametrize("first", [0, 1, 15, 16, 37])
@pytest.mark.parametrize("length", [1, 29, 64])
def test_kernel_10_chunks_that_start_inside_a_block(first: int, length: int) -> None:
    """KERNEL-10: slot = table[p div 16] * 16 + p mod 16, whatever stands behind the table."""
    _check(_plan([(0, first, length, True), (1, 0, 3, False)], 16), 16)


def test_decodes_come_first_and_logits_keep_the_plans_order() -> None:
    plan = _plan([(0, 0, 5, True), (1, 9, 1, True), (2, 3, 4, False), (3, 0, 1, True)], 4)
    batch, slots = build_batch(plan, 4)
    assert batch.starts.tolist() == [0, 1, 2, 7, 11]
    assert batch.logit_rows.tolist() == [6, 0, 1]
    assert slots.tolist() == [0, 1, 3]


def test_a_step_without_samples_has_no_logit_rows() -> None:
    batch, slots = build_batch(_plan([(0, 0, 8, False)], 4), 4)
    assert batch.logit_rows.tolist() == []
    assert slots.tolist() == []


def test_tables_are_no_wider_than_the_longest_row_needs() -> None:
    batch, _ = build_batch(_plan([(0, 0, 17, True)], 16), 16)
    assert batch.tables.shape == (1, 2)
    assert batch.tables.is_contiguous()
