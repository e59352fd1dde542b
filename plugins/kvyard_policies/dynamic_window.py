"""Dynamic batching over a window: wait for enough requests or long enough, then run the batch to its end.

Source: the dynamic batcher of general inference servers (NVIDIA Triton: a preferred size and a longest queue
delay), on top of static batching. It gives up the first token of those that wait for the window; it wins
fuller batches than static batching when requests trickle in.
"""

from __future__ import annotations

from itertools import islice

from kvyard.policy import Admission, AdmissionPolicy, Discipline, PolicyParams, Snapshot, live, nobody


class WindowAdmission(AdmissionPolicy):
    """A batch when `size` requests wait, or when the oldest has waited for `window` seconds."""

    name = "dynamic-window"

    class Params(PolicyParams):
        """Size of a batch and length of the window."""

        size: int = live(8, ge=1, unit="requests", doc="A batch starts at once when so many wait, and takes no more.")
        window: float = live(0.1, ge=0, le=60, unit="seconds", doc="Longest wait of the oldest for others.")

    params: Params

    def admit(self, s: Snapshot) -> Admission:
        size, waiting = self.params.size, s.waiting
        if s.running:
            return nobody("the batch before is not at its end")
        if len(waiting) < size and s.now - next(iter(waiting)).arrived < self.params.window:
            return nobody("the window is open", wake=s.step + 1)
        return Admission(((r, r.kv_max) for r in islice(waiting, size)), hold=True)


class DynamicWindow(Discipline):
    """Dynamic batching: a batch by size or by time, which then runs to its end."""

    name = "dynamic-window"
    doc = "dynamic batching: a batch by size or by time, which then runs to its end"
    parts = {
        "admission": ("dynamic-window", {}),
        "preemption": ("vllm", {}),
        "prefill": ("whole-batch", {}),
    }
