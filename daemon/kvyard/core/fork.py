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
from kvyard.core.plan import TokenArray, token_array
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


class Family:
    """The unfinished sequences of one request."""

    __slots__ = ("members", "running")

    def __init__(self) -> None:
        self.members: list[SequenceState] = []
        self.running: list[SequenceState] = []
        """Those that have a row: kept apart, since a hundred may ask in one step what these few have."""


class Families:
    """Which unfinished sequences belong together, and what they can give each other."""

    def __init__(self, cols: RowColumns) -> None:
        self._cols = cols
        self._families: dict[int, Family] = {}

    def join(self, seq: SequenceState) -> None:
        """A sequence of a request that has several. One whose prompt is another than theirs stays alone."""
        family = self._families.setdefault(seq.request, Family())
        if not family.members or self._alike(family.members[0], seq):
            family.members.append(seq)
            seq.family = family

    def _alike(self, one: SequenceState, other: SequenceState) -> bool:
        # The root covers tenant and salt. Where only lengths count there are none to compare.
        if one.prompt_len != other.prompt_len or one.root != other.root:
            return False
        mine, others = self._prompt(one), self._prompt(other)
        if mine is None or others is None:
            return mine is others
        return bool(np.array_equal(mine, others))

    def _prompt(self, seq: SequenceState) -> TokenArray | None:
        if seq.tokens is None:
            return None
        known = token_array(seq.tokens) if seq.row == NO_ROW else self._cols.tokens[seq.row]
        return known[: seq.prompt_len]

    @staticmethod
    def enter(seq: SequenceState) -> None:
        """It runs from now on."""
        if seq.family is not None:
            seq.family.running.append(seq)

    @staticmethod
    def vacate(seq: SequenceState) -> None:
        """It gives its blocks back."""
        if seq.family is not None:
            seq.family.running.remove(seq)

    def end(self, seq: SequenceState) -> None:
        """It ended, and holds nothing any more."""
        family = seq.family
        if family is None:
            return
        seq.family = None
        family.members.remove(seq)
        if not family.members:
            del self._families[seq.request]

    def fork(self, seq: SequenceState, step: int) -> Fork | None:
        """What `seq`, which waits, could take over now from one of its own."""
        common = _common(seq)
        donor = next((other for other in _givers(seq) if self._has(other, common, step)), None)
        if donor is None or not common:
            return None
        cols = self._cols
        full, rest = divmod(common, cols.block_size)
        table = cols.tables[donor.row]
        return Fork(donor, table[:full].tolist(), common, int(table[full]) if rest else NO_BLOCK)

    def awaits(self, seq: SequenceState, step: int) -> bool:
        """Whether one of its own computes just now what `seq`, which waits, could then take over."""
        common = _common(seq)
        givers = _givers(seq) if common else []
        return bool(givers) and not any(self._has(other, common, step) for other in givers)

    def _has(self, other: SequenceState, tokens: int, step: int) -> bool:
        return other.admitted_step != step and int(self._cols.computed[other.row]) >= tokens

    def audit(self) -> list[str]:
        """Every broken invariant in words."""
        faults = []
        for family in self._families.values():
            if [seq for seq in family.members if seq.row != NO_ROW] != sorted(
                family.running, key=family.members.index
            ):
                faults.append("a family's running members are not those that have a row")
            if any(seq.family is not family for seq in family.members):
                faults.append("a sequence is in two families")
        return faults


def _common(seq: SequenceState) -> int:
    """Tokens that `seq` could take over: the prompt, but at least one token stays to be computed."""
    return 0 if seq.state is State.SWAPPED else min(seq.prompt_len, seq.total - 1)


def _givers(seq: SequenceState) -> list[SequenceState]:
    """Running ones of its own that it may take over from."""
    assert seq.family is not None
    # Whose prompt is scored takes over only from one that was scored as well.
    if seq.scored and seq.total == seq.prompt_len:
        return [other for other in seq.family.running if other.scored]
    return seq.family.running
