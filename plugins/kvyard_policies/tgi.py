"""TGI: whole batches join, when they are large enough or have waited long enough.

Source: text-generation-inference v3, `backends/v3/src/queue.rs` and `backend.rs`. Blocks for the whole life are
reserved, so nothing is preempted. Without chunking a prefill makes all decodes wait, so it must be worth it:
`waiting_served_ratio` of those that run, or `max_waiting_tokens` decode steps since the last. It gives up the
first token of lone newcomers; it wins fewer interruptions of those that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvyard.policy import (
    DECODE_FIRST,
    PROMPT_OR_DECODE,
    Admission,
    AdmissionPolicy,
    Discipline,
    Entry,
    PolicyParams,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    live,
    nobody,
)

from kvyard_policies.reserve import promised
from kvyard_policies.whole_prompts import uncached

MAX_BATCH_PREFILL = 4096


class TgiAdmission(AdmissionPolicy):
    """A new batch when it is worth a break of the decodes; each member has blocks for its whole life."""

    name = "tgi"

    class Params(PolicyParams):
        """When a batch joins."""

        waiting_served_ratio: float = live(
            0.3, ge=0, le=10, unit="of those that run", doc="Smallest batch that joins."
        )
        max_waiting_tokens: int = live(
            20, ge=0, unit="decode steps", doc="After so many without one, any batch joins."
        )
        max_batch_prefill_tokens: int = live(
            MAX_BATCH_PREFILL, ge=1, unit="tokens", doc="Most prompt tokens at once."
        )
        chunking: bool = live(False, doc="The model takes chunks: no smallest batch, the last prompt is cut.")

    params: Params

    def admit(self, s: Snapshot) -> Admission:
        keep = promised(s)
        if self.params.chunking:
            return Admission(((r, r.kv_max) for r in s.waiting), keep=keep, hold=True)
        take = self._batch(s, s.free - keep)
        join_at = s.count.last_prefill + self.params.max_waiting_tokens + 1
        if len(take) < int(self.params.waiting_served_ratio * len(s.running)) and s.step < join_at:
            return nobody("too few for a batch", wake=join_at)
        return Admission(take, keep=keep, hold=True)

    def _batch(self, s: Snapshot, room: int) -> list[Entry]:
        """The first of the queue whose whole lives and prompts fit."""
        take: list[Entry] = []
        tokens = min(self.params.max_batch_prefill_tokens, s.left_prompts)
        for r in islice(s.waiting, max(0, s.slots)):
            room -= s.blocks_for(r.kv_max) - r.hits
            tokens -= uncached(s, r)
            if room < 0 or (tokens < 0 and take):
                break
            take.append((r, r.kv_max))
        return take


class TgiPrefill(PrefillPolicy):
    """A step is whole prompts or decodes; with chunking, decodes and what prompts fill up beside them."""

    name = "tgi"

    class Params(PolicyParams):
        """Size of a prefill, as the admission policy has it."""

        max_batch_prefill_tokens: int = live(
            MAX_BATCH_PREFILL, ge=1, unit="tokens", doc="Most prompt tokens at once."
        )
        chunking: bool = live(False, doc="The model takes chunks: decodes go on beside prompts.")

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        most = self.params.max_batch_prefill_tokens
        if self.params.chunking:
            return Shape(DECODE_FIRST.groups, prompts=max(0, most - s.decoding))
        return Shape(PROMPT_OR_DECODE.groups, prompts=most)

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        whole = not self.params.chunking and bool(s.placed)
        return [0 if whole and uncached(s, r) > left else left for r in prompts]


class Tgi(Discipline):
    """TGI: whole batches join when they are worth the break, the whole life reserved."""

    name = "tgi"
    doc = "TGI: whole batches join when they are large enough or waited long enough; the whole life reserved"
    parts = {
        "admission": ("tgi", {}),
        "preemption": ("vllm", {}),
        "prefill": ("tgi", {}),
    }
