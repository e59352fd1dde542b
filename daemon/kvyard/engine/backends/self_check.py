"""Deterministic mode's promise, checked on the machine it is given for: a row's logits are the same in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvyard.engine.backends.base import BackendError, Batch

ROWS = (1, 2, 3, 5, 8, 17)
TOKENS = 64
"""Of the sequence that is computed whole, and again in steps of `ROWS` and the rest."""


def blocks_for(block_size: int) -> int:
    """Blocks of the pool that the check needs."""
    return -(-TOKENS // block_size)


def check_rows(
    forward: Callable[[Batch], Tensor], vocab_size: int, block_size: int, *, where: str, advice: str
) -> None:
    """Raises BackendError, with `where` and `advice` in its words, unless every position's logits have the same bits.

    `forward` computes over an empty pool of `blocks_for` blocks.
    """
    whole = forward(_stretch(0, TOKENS, vocab_size, block_size))
    begin = 0
    for rows in (*ROWS, TOKENS - sum(ROWS)):
        end = begin + rows
        _compare(whole[begin:end], forward(_stretch(begin, end, vocab_size, block_size)), where, advice)
        begin = end


def _stretch(begin: int, end: int, vocab_size: int, block_size: int) -> Batch:
    """The tokens `begin..end` of the check's sequence, whose earlier ones are in the pool."""
    positions = torch.arange(begin, end, dtype=torch.int32)
    return Batch(
        tokens=(positions * 7919 + 11) % vocab_size,
        positions=positions,
        starts=torch.tensor([0, end - begin], dtype=torch.int32),
        lengths=torch.tensor([end], dtype=torch.int32),
        tables=torch.arange(blocks_for(block_size), dtype=torch.int32)[None],
        cache_slots=positions.long(),
        logit_rows=torch.arange(end - begin),
        decodes=int(end - begin == 1),
    )


def _compare(expected: Tensor, found: Tensor, where: str, advice: str) -> None:
    if torch.equal(expected, found):
        return
    differing = int((expected != found).any(dim=1).sum())
    raise BackendError(
        f"on this {where} a row's logits depend on the size of the step: {differing} of {len(found)} rows of a "
        f"step of {len(found)} tokens differ from a step of {TOKENS}, by up to "
        f"{float((expected - found).abs().max()):.1e}",
        advice,
    )
