"""Victims by what their preemption costs."""

from __future__ import annotations

from typing import cast

import numpy as np
from kvyard.policy import Cause, PolicyParams, PreemptionPolicy, RequestView, Snapshot, Victims, live
from kvyard.policy.decisions import How


class FewestComputedPreemption(PreemptionPolicy):
    """Whoever has the fewest tokens in KV goes first, since it has the least to compute again."""

    name = "fewest-computed"

    class Params(PolicyParams):
        """What becomes of the victim's KV."""

        how: str = live("recompute", choices=("recompute", "swap"), doc="swap: keep the KV in the host pool.")

    params: Params

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        running, cols = s.running, s.cols
        order = np.lexsort((-cols.arrival, cols.computed))
        return Victims([running[i] for i in order.tolist()], how=cast(How, self.params.how))
