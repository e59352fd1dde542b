"""From the core's plan to the backend's batch: decodes first, then chunks; no Python per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvyard.core.plan import IntArray, Plan
from kvyard.engine.backends.base import Batch

if TYPE_CHECKING:  # the GPU check builds batches on machines that have torch and nothing of the link
    from kvyard.engine.prompt_scores import Stretch


def build_batch(plan: Plan, block_size: int, scored: Sequence[Stretch] = ()) -> tuple[Batch, IntArray]:
    """The batch of a plan, and the slots of its logits rows.

    Rows are reordered so that decodes (one token each) come first; the logits come back in the plan's own
    order of `samples`. The second value is `plan.slots[plan.samples]`, for the sampler. `scored` are positions
    of prompts whose logits are wanted as well.
    """
    single = plan.granted == 1
    order = np.argsort(~single, kind="stable")
    slots, granted, computed = plan.slots[order], plan.granted[order], plan.computed[order]
    lengths = computed + granted
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(granted, out=starts[1:])
    rows = np.repeat(np.arange(len(order)), granted)
    positions = np.arange(starts[-1]) - starts[rows] + computed[rows]
    token_slots = slots[rows]
    width = int(-(-lengths.max(initial=1) // block_size))
    tables = np.ascontiguousarray(plan.tables[slots, :width], dtype=np.int32)
    blocks = tables[rows, positions // block_size].astype(np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    batch = Batch(
        tokens=torch.from_numpy(plan.tokens[token_slots, positions].astype(np.int32)),
        positions=torch.from_numpy(positions.astype(np.int32)),
        starts=torch.from_numpy(starts.astype(np.int32)),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        tables=torch.from_numpy(tables),
        cache_slots=torch.from_numpy(blocks * block_size + positions % block_size),
        logit_rows=torch.from_numpy(starts[1:][place[plan.samples]] - 1),
        decodes=int(single.sum()),
    )
    if scored:
        firsts = starts[:-1][place] - plan.computed
        batch.scored_rows = torch.from_numpy(
            np.concatenate([np.arange(s.begin, s.end) + firsts[s.row] for s in scored])
        )
    return batch, plan.slots[plan.samples]
