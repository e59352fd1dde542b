"""Prefill policies that do not cut prompts, from the time before chunked prefill.

A prompt that is longer than a step's token budget cannot be computed at once in this engine. It goes in pieces
then, when it is the first of its step.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.policy import ADMIT, DECODE, PROMPT, PrefillPolicy, RequestView, Shape, Snapshot

BATCH_THEN_DECODE = Shape(((ADMIT, PROMPT), (DECODE,)))


def uncached(s: Snapshot, r: RequestView) -> int:
    """Tokens that a waiting sequence must compute before its next output token, prefix hits taken off."""
    return r.wanted - r.hits * s.block_size


class WholePromptsPrefill(PrefillPolicy):
    """What runs goes on, and newcomers join with their whole prompt in one step or not at all."""

    name = "whole-prompts"

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        return [left if not s.placed or uncached(s, r) <= left else 0 for r in prompts]


class WholeBatchPrefill(PrefillPolicy):
    """The prompts of a whole batch first, in as many steps as they take; then all of it decodes together."""

    name = "whole-batch"

    def shape(self, s: Snapshot) -> Shape:
        return BATCH_THEN_DECODE
