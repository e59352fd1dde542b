"""What happened since the last step record: the parts of it that only the core knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvyard.core.guard import Guard
from kvyard.core.policy_set import PolicySet
from kvyard.core.sequence import SequenceState
from kvyard.core.step import StepState
from kvyard.link.record import PolicyCost, Preemption, Wait


@dataclass(slots=True)
class RecordParts:
    """The core's part of a step record; see `kvyard.link.record.StepRecord` for the fields."""

    prompt_tokens: int = 0
    decode_tokens: int = 0
    admitted: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    finished: list[tuple[int, str]] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    policies: list[PolicyCost] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)


class Journal:
    """Collects the parts; a reason for waiting is noted when it changes, not in every step."""

    def __init__(self) -> None:
        self._parts = RecordParts()
        self._queue_reason: tuple[str, int] = ("", -1)
        self._explained: dict[int, str] = {}
        """Sequences whose own reason the record knows."""
        self.admission: object = None
        """The admission policy that these reasons are of."""

    @property
    def queue_reason(self) -> str:
        """Why the whole queue waits; empty when only single sequences do."""
        return self._queue_reason[0]

    @property
    def wake(self) -> int:
        """The step at which it is worth asking again; -1 is every step."""
        return self._queue_reason[1]

    def step_planned(self, step: StepState, reason: str, wake: int) -> None:
        """A step was planned; `reason` and `wake` say why nobody else comes in."""
        parts = self._parts
        parts.decode_tokens += step.decodes
        if step.admitted:
            parts.admitted += [(entry.id, entry.cached) for entry in step.admitted.values()]
            parts.resident += [(e.id, e.start) for e in step.admitted.values() if e.start != e.cached]
            if self._explained:
                for seq in step.admitted:
                    self._forget(seq.id)
        if step.preemptions:
            parts.preempted += step.preemptions
        for seq in step.refused:
            if not seq.reason:  # from now on it waits as all do
                self._forget(seq.id)
            elif self._explained.get(seq.id) != seq.reason:
                self._explained[seq.id] = seq.reason
                parts.waits.append(Wait(seq.id, seq.reason, wake))
        if (reason, wake) != self._queue_reason:
            self._queue_reason = (reason, wake)
            parts.waits.append(Wait(0, reason, wake))

    def step_undone(self, step: StepState, placed: int) -> None:
        """The step was abandoned: nothing was computed and nobody came in; who had to go is still gone."""
        parts = self._parts
        parts.decode_tokens -= step.decodes
        parts.prompt_tokens -= placed - step.decodes
        undone = {seq.id for seq in step.admitted}
        parts.admitted = [entry for entry in parts.admitted if entry[0] not in undone]
        parts.resident = [entry for entry in parts.resident if entry[0] not in undone]

    def prompt_tokens(self, count: int) -> None:
        """Prompt tokens placed in the step."""
        self._parts.prompt_tokens += count

    def finished(self, seq: SequenceState, reason: str) -> None:
        """A sequence ended."""
        self.ended([(seq.id, reason)])

    def ended(self, finished: list[tuple[int, str]]) -> None:
        """Sequences ended: ids and reasons."""
        self._parts.finished += finished
        if self._explained:
            for id, _ in finished:
                self._explained.pop(id, None)

    def under(self, admission: object) -> list[int]:
        """`admission` decides from now on: the sequences whose reason was another policy's, and is forgotten."""
        self.admission = admission
        gone = list(self._explained)
        for id in gone:
            self._forget(id)
        return gone

    def _forget(self, id: int) -> None:
        if self._explained.pop(id, None) is not None:
            self._parts.waits.append(Wait(id, ""))

    def take(self, guard: Guard, policies: PolicySet) -> RecordParts:
        """Everything since the last call."""
        parts, self._parts = self._parts, RecordParts()
        costs = guard.take_costs()
        if costs:
            parts.policies = [
                PolicyCost(kind, policies.name(kind), cost.calls, cost.ns, cost.overrides)
                for kind, cost in costs.items()
            ]
        return parts
