"""The sequences of one request (n > 1) share the KV of their prompt by copy-on-write.

One of them computes the prompt while the others wait. Then each comes in with the full blocks of what it has
in common with that one shared, and with a copy of its own of the block that is full in part, made before the
step computes. Nobody writes to a full block, so a shared one needs no copy later. The last token of the prompt
is computed by each: its logits are what the first output token is chosen from.

Only what earlier steps have computed is given on: a copy is made before the step writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvyard.core.columns import RowColumns
from kvyard.core.lifecycle import State
from kvyard.core.sequence import NO_ROW, SequenceState

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Fork:
    """What a waiting sequence can take over from `donor`, which runs."""

    donor: SequenceState
    blocks: list[int]
    """Full blocks, to be shared."""
    tokens: int
    """Tokens whose KV is there then."""
    partial: int
    """The donor's block with the tokens behind the full ones, to be copied; or NO_BLOCK."""


class Families:
    """Which unfinished sequences belong to one request, and what they can give each other."""

    def __init__(self, cols: RowColumns) -> None:
        self._cols = cols
        self._members: dict[int, list[SequenceState]] = {}

    def join(self, seq: SequenceState) -> None:
        """A sequence of a request that has several. One whose prompt is another than theirs stays alone."""
        members = self._members.setdefault(seq.request, [])
        if not members or self._alike(members[0], seq):
            members.append(seq)
            seq.family = members

    def _alike(self, one: SequenceState, other: SequenceState) -> bool:
        # The root covers tenant and salt. Where only lengths count there are none to compare.
        if one.prompt_len != other.prompt_len or one.root != other.root:
            return False
        prompts = [self._prompt(seq) for seq in (one, other)]
        return prompts[0] is prompts[1] is None or bool(np.array_equal(*prompts))  # type: ignore[arg-type]  # None is unequal

    def _prompt(self, seq: SequenceState) -> np.typing.NDArray[np.int32] | None:
        if seq.tokens is None:
            return None
        known = seq.tokens if seq.row == NO_ROW else self._cols.tokens[seq.row]
        return known[: seq.prompt_len]

    def leave(self, seq: SequenceState) -> None:
        """A member ended."""
        members = seq.family
        if members is None:
            return
        seq.family = None
        members.remove(seq)
        if not members:
            del self._members[seq.request]

    def fork(self, seq: SequenceState, step: int) -> Fork | None:
        """What `seq`, which waits, could take over now from one of its own."""
        common = self._common(seq)
        donor = next((other for other in self._running(seq) if self._has(other, common, step)), None)
        if donor is None or not common:
            return None
        cols = self._cols
        full, rest = divmod(common, cols.block_size)
        table = cols.tables[donor.row]
        return Fork(donor, table[:full].tolist(), common, int(table[full]) if rest else NO_BLOCK)

    def awaits(self, seq: SequenceState, step: int) -> bool:
        """Whether one of its own computes just now what `seq`, which waits, could then take over."""
        common = self._common(seq)
        running = self._running(seq) if common else []
        return bool(running) and not any(self._has(other, common, step) for other in running)

    @staticmethod
    def _common(seq: SequenceState) -> int:
        """Tokens that `seq` could take over: the prompt, but at least one token stays to be computed."""
        return 0 if seq.state is State.SWAPPED else min(seq.prompt_len, seq.total - 1)

    @staticmethod
    def _running(seq: SequenceState) -> list[SequenceState]:
        assert seq.family is not None
        # Whose prompt is scored takes over only from one that was scored as well.
        scored = seq.scored and seq.total == seq.prompt_len
        return [other for other in seq.family if other.row != NO_ROW and (other.scored or not scored)]

    def _has(self, other: SequenceState, tokens: int, step: int) -> bool:
        return other.admitted_step != step and int(self._cols.computed[other.row]) >= tokens
