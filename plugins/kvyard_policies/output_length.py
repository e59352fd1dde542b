"""Admission by the distribution of output lengths, learnt while serving, with a reserve.

Clients name a `max_tokens` far above what they use, so reserving it wastes the pool, and reserving nothing ends
in preemptions. This policy reserves a quantile of the outputs seen lately: for a running sequence, of those that
were longer than it is already. A low quantile fills the pool and preempts, a high one comes near to whole-life
reservation. `dump` tells how often and by how much it was wrong, over and under. It gives up certainty; it wins
concurrency at a chosen rate of preemptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Discipline,
    Ends,
    Lengths,
    PolicyParams,
    PolicyState,
    Snapshot,
    Value,
    live,
    nobody,
)
from kvyard.policy.snapshot import IntColumn

from kvyard_policies.accuracy import Accuracy

MEMORY = 2000
"""Outputs that the distribution is made of."""
WINDOW = 256
"""Waiting requests that are looked at in a step."""


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
        self._ends = Ends()
        self._outputs = Lengths(MEMORY)

    def admit(self, s: Snapshot) -> Admission:
        self._learn(s)
        if s.preempted:
            return nobody("after a preemption")
        cols = s.cols
        longest = cols.prompt_len + self.predict(cols.generated, cols.generated + cols.remaining)
        needed = np.maximum(-(-np.minimum(longest, cols.kv_max) // s.block_size), cols.blocks)
        keep = int((needed - cols.blocks).sum()) + (int(self.params.reserve * s.blocks) if s.running else 0)
        views = list(islice(s.waiting, max(0, min(s.slots, WINDOW))))
        lengths = np.array([(r.generated, r.max_new) for r in views], np.int64).reshape(-1, 2)
        take = []
        for r, output in zip(views, self.predict(lengths[:, 0], lengths[:, 1]).tolist(), strict=True):
            if not r.preemptions:
                self.accuracy.promised(r.id, output)
            take.append((r, max(r.total, min(r.kv_max, r.prompt_len + output))))
        return Admission(take, keep=keep, hold=True)

    def _learn(self, s: Snapshot) -> None:
        if news := self._ends.since(s):
            self._outputs.learn(e.generated for e in reversed(news))
            for e in reversed(news):
                self.accuracy.ended(e.id, e.generated)

    def predict(self, generated: IntColumn, most: IntColumn) -> IntColumn:
        """Output lengths to reserve: the quantile of those longer than `generated`, at most `most`."""
        if len(self._outputs) < self.params.min_outputs:
            return most
        return self._outputs.beyond(self.params.quantile, generated, most)

    def export_state(self) -> PolicyState:
        return {"version": 1, "outputs": self._outputs.seen}

    def import_state(self, state: PolicyState) -> None:
        if state.get("version") == 1:
            self._outputs.learn(int(output) for output in state["outputs"])

    def dump(self) -> Mapping[str, Value]:
        return {"outputs": len(self._outputs), **self.accuracy.describe()}


class OutputLength(Discipline):
    """Admission by the outputs seen lately: a quantile of what is to come is reserved."""

    name = "output-length"
    doc = "a quantile of the outputs seen lately is reserved, with a reserve"
    parts = {
        "admission": ("output-length", {}),
        "preemption": ("vllm", {}),
        "prefill": ("vllm", {}),
    }
