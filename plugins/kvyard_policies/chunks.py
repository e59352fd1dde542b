"""Prefill policies that keep prompts from delaying decodes."""

from __future__ import annotations

from kvyard.policy import DECODE_FIRST, PolicyParams, PrefillPolicy, Shape, Snapshot, live


class DecodeFirstPrefill(PrefillPolicy):
    """Every decode gets its token first; prompts share what a chunk of fixed size leaves.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024): a step's work is bounded, so decodes do not stall behind
    long prompts. A smaller chunk means steadier decodes and a later first token.
    """

    name = "decode-first"

    class Params(PolicyParams):
        """Size of a step."""

        chunk: int = live(512, ge=1, unit="tokens", doc="Tokens of a step, decodes included, that prompts fill up.")

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        return Shape(DECODE_FIRST.groups, prompts=max(0, self.params.chunk - s.decoding))
