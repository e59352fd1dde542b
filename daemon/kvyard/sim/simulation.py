"""The real core and the real policies in virtual time: a step takes what the cost model says it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvyard.core.advice import Exit, PolicySet
from kvyard.core.conduct import ConductLimits
from kvyard.core.guard import Guard
from kvyard.core.plan import Limits, Plan, SequenceSpec
from kvyard.core.scheduler import NeverFits, Scheduler
from kvyard.sim.arrivals import Arrival
from kvyard.sim.cost import StepCost, copied_blocks
from kvyard.sim.observe import Observer

IDLE_RETRY = (0.0005, 0.01)
"""Seconds after which a step is tried again in which nothing could be placed: first and longest, as the engine's."""
STALLED_AFTER = 600.0
"""Seconds without a token after which a run is given up, longer than any window that a policy may declare."""
REPORT_EVERY = 256
"""Steps between two calls of `progress`."""
UNDISTURBED = ConductLimits(
    stall_s=float("inf"),
    asleep_s=float("inf"),
    overtakes=10**12,
    age_s=float("inf"),
    idle_s=float("inf"),
    thrashes=10**12,
    override_share=float("inf"),
)
"""Nobody is put out for standing still, starving others or thrashing, so that a discipline is seen as it is."""
TOKEN = 7
Progress = Callable[[int, int, float], None]


class Stalled(RuntimeError):
    """Nothing was placed for very long although something waits or runs."""


@dataclass(slots=True)
class Run:
    """What came of a simulation."""

    observer: Observer
    seconds: float = 0.0
    """Virtual time of the last token."""
    steps: int = 0
    """Steps that placed something."""
    overrides: dict[str, int] = field(default_factory=dict)
    """Decisions that the core had to override, by kind and cause."""
    exits: list[Exit] = field(default_factory=list)
    """Policies that were put out."""
    state: dict[str, object] = field(default_factory=dict)
    """What the policies in charge say of themselves at the end."""


class Simulation:
    """One discipline over one list of arrivals, in order of time."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        policies: PolicySet,
        limits: Limits,
        cost: StepCost,
        conduct: ConductLimits = UNDISTURBED,
    ) -> None:
        """`conduct` puts policies out as the daemon does. Raises Fault when a declaration cannot be used."""
        self._arrivals = arrivals
        self._cost = cost
        # Virtual time must not depend on how fast this machine is, so no call is ever too slow.
        guard = Guard(clock_ns=lambda: 0)
        self.scheduler = Scheduler(limits, policies, clock_ns=lambda: 0, guard=guard, salt=b"sim", conduct=conduct)
        self._next = 0
        self._now = 0.0
        self._progress_at = 0.0
        self._retry = IDLE_RETRY[0]
        self._outputs = np.array([0, *(arrival.output for arrival in arrivals)], np.int64)
        self.run = Run(Observer(arrivals))

    def to_the_end(self, progress: Progress | None = None) -> Run:
        """Run until every request has ended. Raises Stalled."""
        return self.until(len(self._arrivals), progress)

    def until(self, ended: int, progress: Progress | None = None) -> Run:
        """Run until so many requests have ended. Raises Stalled."""
        scheduler, run = self.scheduler, self.run
        while run.observer.ended < ended and (self._next < len(self._arrivals) or scheduler.has_work()):
            if not scheduler.has_work():
                self._now = max(self._now, self._arrivals[self._next].at)
                self._progress_at = self._now
            self._arrive()
            self.step()
            if progress is not None and scheduler.step % REPORT_EVERY == 0:
                progress(run.observer.ended, len(self._arrivals), self._now)
        run.exits += scheduler.take_exits()
        run.state = scheduler.advice.dump()
        return run

    def _arrive(self) -> None:
        while self._next < len(self._arrivals) and self._arrivals[self._next].at <= self._now:
            arrival, self._next = self._arrivals[self._next], self._next + 1
            try:
                self.scheduler.add(_spec(arrival, self._next))
            except NeverFits as error:
                self.run.observer.rejected(self._next, str(error))

    def step(self) -> None:
        """One step, or the wait for one."""
        plan = self.scheduler.schedule(self._now)
        for id, text in self.scheduler.take_refusals():
            self.run.observer.rejected(id, text)
        if plan.idle:
            self._note_parts(plan)
            self._wait()
        else:
            self._compute(plan)

    def _compute(self, plan: Plan) -> None:
        scheduler, observer = self.scheduler, self.run.observer
        started = self._now
        slots, ids = plan.slots[plan.samples], plan.ids[plan.samples]
        stop = scheduler.generated(slots) + 1 >= self._outputs[ids]
        observer.computed(plan)
        committed = scheduler.commit(plan, np.full(len(ids), TOKEN, np.int32), stop)
        decodes, prompt_tokens = self._note_parts(plan)
        spent = self._cost.seconds(plan, decodes, prompt_tokens)
        scheduler.observe(decodes, prompt_tokens, spent, copied_blocks(plan))
        self._now += spent
        self._progress_at, self._retry = self._now, IDLE_RETRY[0]
        observer.sampled(committed.ids, [id for id, _ in committed.finished], self._now)
        observer.load(started, spent, scheduler.running, scheduler.waiting, scheduler.blocks_used)
        self.run.steps += 1
        self.run.seconds = self._now

    def _note_parts(self, plan: Plan) -> tuple[int, int]:
        """Take in the core's part of the step record; decodes and prompt tokens of the step."""
        parts = self.scheduler.take_record_parts()
        self.run.observer.moved(plan, parts, self._now)
        for cost in parts.policies:
            for cause, count in cost.overrides.items():
                key = f"{cost.kind}: {cause}"
                self.run.overrides[key] = self.run.overrides.get(key, 0) + count
        return parts.decode_tokens, parts.prompt_tokens

    def _wait(self) -> None:
        """Nothing could be placed: until the next arrival, or until the engine would ask again."""
        if not self.scheduler.has_work():
            return
        if self._now - self._progress_at > STALLED_AFTER:
            scheduler = self.scheduler
            raise Stalled(
                f"nothing was placed for {STALLED_AFTER:g} s of virtual time, at step {scheduler.step}, with"
                f" {scheduler.running} running and {scheduler.waiting} waiting; the policies' reason:"
                f" {scheduler.wait_reason()[0] or 'none'}"
            )
        again = self._now + self._retry
        self._retry = min(2 * self._retry, IDLE_RETRY[1])
        if self._next < len(self._arrivals):
            again = min(again, self._arrivals[self._next].at)
        self._now = max(again, np.nextafter(self._now, np.inf))


def _spec(arrival: Arrival, id: int) -> SequenceSpec:
    return SequenceSpec(
        id=id,
        request=id,
        arrival=id - 1,
        arrived=arrival.at,
        prompt_len=arrival.prompt,
        max_new=arrival.max_tokens,
        prompt=arrival.tokens(),
        priority=arrival.priority,
        tenant=arrival.tenant,
        deadline=arrival.deadline,
    )
