"""Preemption: who gives way when KV blocks are short."""

from kvyard.policy import Cause, PreemptionPolicy, RequestView, Snapshot, Victims


class MostBlocks(PreemptionPolicy):
    """Whoever holds the most blocks goes first: the fewest victims for the room that is needed."""

    api = (1, 0)
    version = "1.0.0"

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        """The whole order of preference; kvyard takes as many as it needs. Arrival numbers break ties."""
        if cause == "admission":
            return Victims(())
        return Victims(sorted(s.running, key=lambda r: (-r.blocks, -r.arrival)))
