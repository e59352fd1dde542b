"""Static batching: a batch is formed when none runs, and runs until its last member ends.

Source: NVIDIA FasterTransformer as Vidur defines it (`batch_size_cap` 128). It gives up the places of members
that ended early, and the time of those that wait for the slowest; it wins simplicity, large even batches, and
that nothing is ever preempted.
"""

from __future__ import annotations

from itertools import islice

from kvyard.policy import Admission, AdmissionPolicy, Discipline, PolicyParams, Snapshot, live, nobody


class StaticAdmission(AdmissionPolicy):
    """A new batch when nothing runs; each member has blocks for its whole life."""

    name = "static"

    class Params(PolicyParams):
        """Size of a batch."""

        batch: int = live(128, ge=1, unit="requests", doc="Most requests of a batch.")

    params: Params

    def admit(self, s: Snapshot) -> Admission:
        if s.running:
            return nobody("the batch before is not at its end")
        return Admission(((r, r.kv_max) for r in islice(s.waiting, self.params.batch)), hold=True)


class Static(Discipline):
    """Static batching: a batch is formed when none runs, and runs until its last member ends."""

    name = "static"
    doc = "static batching: a batch runs until its last member ends"
    parts = {
        "admission": ("static", {}),
        "preemption": ("vllm", {}),
        "prefill": ("whole-batch", {}),
    }
