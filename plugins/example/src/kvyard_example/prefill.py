"""Prefill: how a step is made up of decodes and chunks of prompts."""

from kvyard.policy import DECODE_FIRST, PolicyParams, PrefillPolicy, Shape, Snapshot, live


class PromptShare(PrefillPolicy):
    """Decodes first, and prompts take at most a share of the token budget, so that no step becomes long."""

    api = (1, 0)
    version = "1.0.0"

    class Params(PolicyParams):
        """Changed while running."""

        share: float = live(0.25, ge=0.01, le=1.0, unit="of the token budget", doc="Most prompt tokens of a step.")

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        """The phases of the step; at least one prompt token, or nobody would ever come in."""
        return DECODE_FIRST._replace(prompts=max(1, int(self.params.share * s.budget)))
