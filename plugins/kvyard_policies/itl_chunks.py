"""Chunks as large as an inter-token latency target allows, by a step-time model that is fitted on line.

A fixed chunk (Sarathi) is right for one model on one device with one number of decodes. Here the chunk follows
from the target: the most prompt tokens with which the step is still expected to end in time. It gives up the
first token of long prompts when decodes leave little room; it wins that decodes stay within the target.
"""

from __future__ import annotations

from kvyard.policy import DECODE_FIRST, Discipline, PolicyParams, PrefillPolicy, Shape, Snapshot, live

PROBE = 512
"""Prompt tokens at which the model is read off, well within what it was fitted on."""


class ItlTargetPrefill(PrefillPolicy):
    """Decodes first; prompts take what the inter-token latency target leaves."""

    name = "itl-target"

    class Params(PolicyParams):
        """The target, and the bounds of a chunk."""

        target_ms: float = live(
            50.0, ge=0.1, le=60000, unit="milliseconds", doc="Longest step while anything decodes."
        )
        least: int = live(32, ge=1, unit="tokens", doc="Prompts get so many in every step, so that they move on.")
        first: int = live(512, ge=1, unit="tokens", doc="Chunk before the step-time model is fitted.")

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        return Shape(DECODE_FIRST.groups, prompts=self._chunk(s) if s.decoding else None)

    def _chunk(self, s: Snapshot) -> int:
        decodes_alone = s.step_time.seconds(s.decoding, 0)
        per_token = (s.step_time.seconds(s.decoding, PROBE) - decodes_alone) / PROBE
        if per_token <= 0:
            return self.params.first
        room = int((self.params.target_ms / 1e3 - decodes_alone) / per_token)
        return max(self.params.least, min(room, s.budget))


class ItlTarget(Discipline):
    """Chunks of prompts steered to an inter-token latency target."""

    name = "itl-target"
    doc = "chunks of prompts steered to an inter-token latency target by the measured step time"
    parts = {
        "admission": ("vllm", {"watermark": 0.01}),
        "preemption": ("vllm", {}),
        "prefill": ("itl-target", {}),
    }
