"""Orca: batches are formed anew in every step, each request with its longest length reserved.

Source: Yu et al., OSDI 2022, as Vidur defines it (`batch_size_cap` 128). Prompts are computed whole and in one
step with the decodes. It gives up the KV memory that requests reserve and never use, and steady decodes while
a prompt is computed; it wins places that are filled as soon as one ends, without any preemption.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from kvyard.policy import Admission, AdmissionPolicy, Discipline, PolicyParams, Snapshot, live


class OrcaAdmission(AdmissionPolicy):
    """Newcomers while a reservation of the longest length fits; the first that does not holds the others back."""

    name = "orca"

    class Params(PolicyParams):
        """Size of a batch and of the reservation."""

        batch: int = live(128, ge=1, unit="requests", doc="Most running requests.")
        reserve: int = live(
            0, ge=0, unit="tokens", doc="Least reservation of a request; 0 reserves its own prompt and max_tokens."
        )

    params: Params

    def admit(self, s: Snapshot) -> Admission:
        least, cols = min(self.params.reserve, s.blocks * s.block_size), s.cols
        keep = int((-(-np.maximum(cols.kv_max, least) // s.block_size) - cols.blocks).sum())
        places = max(0, self.params.batch - len(s.running))
        entries = ((r, max(r.kv_max, least)) for r in islice(s.waiting, places))
        return Admission(entries, keep=keep, hold=True)


class Orca(Discipline):
    """Orca: batches formed anew in every step, whole prompts, the longest length reserved."""

    name = "orca"
    doc = "Orca: batches formed in every step, whole prompts, the longest length reserved"
    parts = {
        "admission": ("orca", {}),
        "preemption": ("vllm", {}),
        "prefill": ("whole-prompts", {}),
    }
