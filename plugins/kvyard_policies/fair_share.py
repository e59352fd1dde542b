"""Fair share: the tenant that was served least comes in next.

Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Each
tenant has a counter of weighted tokens served; of those that wait the lowest comes in, of equals the earliest
arrival. Who begins to wait is lifted to the level, so that idling saves nothing up. The level rises by what is
served, shared among those that wait (the virtual time of fair queueing), and is no lower than the lowest of them:
a lowest counter alone would stand still while tenants without end come for one request each. Two tenants that
always wait are served alike within twice the larger of a whole prompt and all output that fits the pool. It gives
up the order of arrival; it wins that nobody can crowd others out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace
from itertools import islice

from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Discipline,
    OrderKey,
    PolicyParams,
    PolicyState,
    RequestView,
    Served,
    Snapshot,
    Value,
    live,
    nobody,
)

from kvyard_policies.passed_over import PassedOver

WINDOW = 256
"""Waiting requests that are looked at in a step; the queue's order puts every tenant's first among them."""
MANY_TENANTS = 4096
Lines = Mapping[str, deque[RequestView]]


class FairShareAdmission(AdmissionPolicy):
    """The tenant with the fewest weighted tokens served comes in next."""

    name = "fair-share"

    class Params(PolicyParams):
        """Weights of tokens."""

        prompt_weight: float = live(1.0, ge=0, le=1000, doc="What a prompt token costs its tenant.")
        output_weight: float = live(2.0, ge=0, le=1000, doc="What an output token costs its tenant.")

    params: Params

    def __init__(self, **values: Value) -> None:
        super().__init__(**values)
        self._served: dict[str, float] = {}
        self._progress = Served()
        self._tags: dict[str, float] = {}
        self._level = 0.0
        """Counter of the last tenant that came in."""
        self._lift_to = 0.0
        """Where who begins to wait starts."""
        self._passed_over = PassedOver()
        self._last_arrival = -1

    def key(self, r: RequestView) -> OrderKey:
        """A tenant's requests one after the other in tokens, all tenants side by side (fair queueing)."""
        if r.preemptions:
            return (0.0,)
        start = max(self._tags.get(r.tenant, 0.0), self._level)
        self._tags[r.tenant] = (
            start + self.params.prompt_weight * r.prompt_len + self.params.output_weight * r.max_new
        )
        return (start,)

    def admit(self, s: Snapshot) -> Admission:
        cost = self._charge(s)
        if s.preempted:
            return nobody("after a preemption")
        due = self._passed_over.due(s)
        lines: defaultdict[str, deque[RequestView]] = defaultdict(deque)
        for r in islice(s.waiting, WINDOW):
            if r is not due:
                lines[r.tenant].append(r)
        self._lift(lines, cost)
        take = self._fairest(lines, s.slots)
        return Admission(take if due is None else [due, *take], keep=s.blocks // 100 if s.running else 0)

    def _charge(self, s: Snapshot) -> float:
        """Put down what was served since the last look; how much it was."""
        total = 0.0
        for tenant, prompt, output in self._progress.since(s):
            cost = self.params.output_weight * output + self.params.prompt_weight * prompt
            self._served[tenant] = self._served.get(tenant, 0.0) + cost
            total += cost
        return total

    def _lift(self, lines: Lines, cost: float) -> None:
        """Who did not wait before starts at the level, which those that did have among them."""
        served, seen = self._served, self._last_arrival
        stayed = {tenant for tenant, line in lines.items() if any(r.arrival <= seen for r in line)}
        counts = [served.get(tenant, 0.0) for tenant in stayed] or [self._level]
        self._lift_to = min(max(self._lift_to + cost / max(1, len(lines)), min(counts)), max(counts))
        for tenant in lines.keys() - stayed:
            served[tenant] = max(served.get(tenant, 0.0), self._lift_to)
        self._last_arrival = max((r.arrival for line in lines.values() for r in line), default=seen)
        self._last_arrival = max(seen, self._last_arrival)
        if len(served) > MANY_TENANTS:
            self._forget(min(counts), lines)

    def _forget(self, level: float, lines: Lines) -> None:
        """Those at the level or below, who would be lifted to it anyway; if need be the smallest debts as well."""
        debts = {tenant: count for tenant, count in self._served.items() if count > level and tenant not in lines}
        largest = sorted(debts, key=lambda tenant: -debts[tenant])[: MANY_TENANTS // 2]
        self._served = {tenant: self._served.get(tenant, level) for tenant in (*largest, *lines)}
        self._tags.clear()

    def _fairest(self, lines: Lines, places: int) -> list[RequestView]:
        """The order in which the lowest counter comes in, each prompt charged as it is taken."""
        heap = [(self._served.get(tenant, 0.0), line[0].arrival, tenant) for tenant, line in lines.items()]
        heapify(heap)
        take: list[RequestView] = []
        while heap and len(take) < places:
            self._level, _, tenant = heap[0]
            line = lines[tenant]
            r = line.popleft()
            take.append(r)
            charge = 0 if r.preemptions else self.params.prompt_weight * r.prompt_len
            heapreplace(heap, (self._level + charge, line[0].arrival, tenant)) if line else heappop(heap)
        return take

    def export_state(self) -> PolicyState:
        return {"version": 1, "served": dict(self._served), "level": self._level}

    def import_state(self, state: PolicyState) -> None:
        if state.get("version") == 1:
            self._served = {str(tenant): float(count) for tenant, count in state["served"].items()}
            self._level = self._lift_to = float(state["level"])

    def dump(self) -> Mapping[str, Value]:
        top = sorted(self._served.items(), key=lambda item: item[1])[:32]
        return {f"served {tenant or '(none)'}": count for tenant, count in top}


class FairShare(Discipline):
    """Fair share among tenants by tokens served (virtual token counters)."""

    name = "fair-share"
    doc = "the tenant that was served the fewest tokens comes in next"
    parts = {
        "admission": ("fair-share", {}),
        "preemption": ("vllm", {}),
        "prefill": ("vllm", {}),
    }
