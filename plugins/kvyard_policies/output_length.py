"""Admission by the distribution of output lengths, learnt while serving, with a reserve.

Clients name a `max_tokens` far above what they use, so reserving it wastes the pool, and reserving nothing ends
in preemptions. This policy reserves a quantile of the outputs seen lately: for a running sequence, of those that
were longer than it is already. A low quantile fills the pool and preempts, a high one comes near to whole-life
reservation. `dump` tells how often and by how much it was wrong, over and under. It gives up certainty; it wins
concurrency at a chosen rate of preemptions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Discipline,
    PolicyParams,
    PolicyState,
    Snapshot,
    Value,
    live,
    nobody,
)
from kvyard.policy.snapshot import IntColumn

from kvyard_policies.learning import ended_since

MEMORY = 2000
"""Outputs that the distribution is made of."""


class OutputLengthAdmission(AdmissionPolicy):
    """Newcomers while a quantile of the output of all fits, and a reserve stays free."""

    name = "output-length"

    class Params(PolicyParams):
        """Quantile, reserve, and when there is enough to learn from."""

        quantile: float = live(0.8, ge=0, le=1, doc="Share of outputs that the reservation covers.")
        reserve: float = live(0.02, ge=0, le=0.5, unit="of all blocks", doc="Blocks kept free while anything runs.")
        min_outputs: int = live(32, ge=1, unit="outputs", doc="Whole lives are reserved until so many were seen.")

    params: Params

    def __init__(self, **values: Value) -> None:
        super().__init__(**values)
        self.accuracy = Accuracy()
        self._outputs: deque[int] = deque(maxlen=MEMORY)
        self._sorted: IntColumn = np.zeros(0, np.int64)
        self._last_ended = -1

    def admit(self, s: Snapshot) -> Admission:
        self._learn(s)
        if s.preempted:
            return nobody("after a preemption")
        cols = s.cols
        longest = cols.prompt_len + self.predict(cols.generated, cols.generated + cols.remaining)
        needed = np.maximum(-(-np.minimum(longest, cols.kv_max) // s.block_size), cols.blocks)
        keep = int((needed - cols.blocks).sum()) + (int(self.params.reserve * s.blocks) if s.running else 0)
        take = []
        for _, r in zip(range(max(0, s.slots)), s.waiting, strict=False):
            output = int(self.predict(np.array([r.generated]), np.array([r.max_new]))[0])
            if not r.preemptions:
                self.accuracy.promised(r.id, output)
            take.append((r, max(r.total, min(r.kv_max, r.prompt_len + output))))
        return Admission(take, keep=keep, hold=True)

    def _learn(self, s: Snapshot) -> None:
        news = ended_since(s, self._last_ended)
        if not news:
            return
        self._last_ended = news[0].id
        for e in reversed(news):
            self._outputs.append(e.generated)
            self.accuracy.ended(e.id, e.generated)
        self._sorted = np.sort(np.array(self._outputs, np.int64))

    def predict(self, generated: IntColumn, most: IntColumn) -> IntColumn:
        """Output lengths to reserve: the quantile of those longer than `generated`, at most `most`."""
        known = self._sorted
        if len(known) < self.params.min_outputs:
            return most
        first = np.searchsorted(known, generated, side="right")
        longer = len(known) - first
        rank: npt.NDArray[np.int64] = first + np.ceil(self.params.quantile * longer).astype(np.int64) - 1
        # Nothing seen was as long: whatever it may still take.
        found = np.where(longer > 0, known[np.clip(rank, first, len(known) - 1)], most)
        return np.minimum(found, most)

    def export_state(self) -> PolicyState:
        return {"version": 1, "outputs": list(self._outputs)}

    def import_state(self, state: PolicyState) -> None:
        if state.get("version") == 1:
            self._outputs.extend(int(output) for output in state["outputs"])
            self._sorted = np.sort(np.array(self._outputs, np.int64))

    def dump(self) -> Mapping[str, Value]:
        return {"outputs": len(self._outputs), **self.accuracy.describe()}


class Accuracy:
    """How far the promise at admission was from what came."""

    def __init__(self) -> None:
        self._promised: dict[int, int] = {}
        self.over = self.under = self.exact = 0
        """Requests whose output was shorter, longer, and as long as was reserved."""
        self.tokens_over = self.tokens_under = 0

    def promised(self, id: int, output: int) -> None:
        """`output` tokens are to be reserved for a sequence that waits; the last promise before it came in counts."""
        self._promised[id] = output
        if len(self._promised) > 2 * MEMORY:  # those that were cancelled, and those long in the queue
            for old in list(self._promised)[:MEMORY]:
                del self._promised[old]

    def ended(self, id: int, output: int) -> None:
        """A sequence ended with `output` tokens."""
        wrong = self._promised.pop(id, output) - output
        self.over += wrong > 0
        self.under += wrong < 0
        self.exact += wrong == 0
        self.tokens_over += max(0, wrong)
        self.tokens_under += max(0, -wrong)

    def describe(self) -> dict[str, Value]:
        """Counts and mean errors in tokens."""
        return {
            "over": self.over,
            "under": self.under,
            "exact": self.exact,
            "mean_tokens_over": self.tokens_over / max(1, self.over),
            "mean_tokens_under": self.tokens_under / max(1, self.under),
        }


class OutputLength(Discipline):
    """Admission by the outputs seen lately: a quantile of what is to come is reserved."""

    name = "output-length"
    doc = "a quantile of the outputs seen lately is reserved, with a reserve"
    parts = {
        "admission": ("output-length", {}),
        "preemption": ("vllm", {}),
        "prefill": ("vllm", {}),
    }
