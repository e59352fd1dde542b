"""The step loop: inbox, policies, plan, model, sample, outputs (docs/architecture.md).

It is the engine's main thread and the only Python thread of the process. Nothing in it blocks but the
wait for work: sends are buffered, the collector is off while steps run, and messages from the front take
effect only between two steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from kvyard.core.plan import Admitted, Committed, Plan, SequenceSpec
from kvyard.core.scheduler import NeverFits, Scheduler
from kvyard.engine.backends.base import Backend
from kvyard.engine.batching import build_batch
from kvyard.engine.channel import Channel
from kvyard.engine.control import Controls
from kvyard.engine.faults import Faults, Point, SequenceFault
from kvyard.engine.prompt_scores import PromptScores
from kvyard.engine.recorder import Recorder
from kvyard.engine.sampler import Sampled, Sampler
from kvyard.link.codec import decode_sampling
from kvyard.link.messages import Cancel, Control, Failed, FinishReason, Outputs, Sequence, Start, Stop, Submit
from kvyard.link.progress import EnginePhase, ProgressPage

log = structlog.get_logger(__name__)

IDLE_RETRY_S = (0.0005, 0.01)
"""First and longest wait before a step is tried again in which nothing could be placed."""
NOTHING = np.empty(0, np.int32), np.empty(0, np.bool_)
"""Tokens and stop flags of a step in which nobody samples."""
COLLECT_AFTER_STEPS = 2000
"""Steps after which an idle moment is used to collect garbage (7 to 66 ms, so never within a step)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives."""

    channel: Channel
    scheduler: Scheduler
    backend: Backend
    sampler: Sampler
    page: ProgressPage
    recorder: Recorder
    controls: Controls
    block_size: int


class EngineLoop:
    """Runs steps until the front says stop."""

    def __init__(
        self, parts: Parts, *, clock: Callable[[], float], clock_ns: Callable[[], int], faults: Faults | None
    ) -> None:
        self._p = parts
        self._clock = clock
        self._ns = clock_ns
        self._faults = faults
        self._admitted_once: set[int] = set()
        self._scores = PromptScores()
        self._stopping = False
        self._untold = False
        """Cancelled since the last record: one is due even if nothing is left to run, or gauges would stand still."""
        self._retry_s = IDLE_RETRY_S[0]
        self._steps_since_collect = 0
        self._collected_generation = parts.recorder.generation
        parts.controls.tables = self.tables

    def run(self) -> None:
        """Work until told to stop. Raises FrontGone when the front is gone."""
        self._collect()
        gc.freeze()
        gc.disable()
        self._p.scheduler.guard.settled()
        while not self._stopping:
            self._inbox()
            if self._stopping or not self._ready_for_step():
                continue
            if not self._step():
                self._pause()

    def tables(self) -> dict[str, int]:
        """Entries of each table of unfinished sequences; all 0 when nothing runs or waits."""
        return {"admitted_once": len(self._admitted_once), **self._scores.tables()}

    # ---- between steps

    def _inbox(self) -> None:
        page, channel = self._p.page, self._p.channel
        if not self._p.scheduler.has_work():
            self._idle()
        started = self._ns()
        page.phase(EnginePhase.INBOX, started)
        for message in channel.receive():
            match message:
                case Submit():
                    self._take(message.sequence)
                case Cancel():
                    self._cancel(message.ids)
                case Control():
                    page.phase(EnginePhase.CONTROL, self._ns())
                    reply = self._p.controls.answer(message)
                    if reply is not None:
                        channel.send(reply)
                case Stop() | Start():
                    self._stopping = True
        self._p.recorder.inbox_ns += self._ns() - started

    def _idle(self) -> None:
        self._p.page.phase(EnginePhase.IDLE, self._ns())
        generation = self._p.recorder.generation
        # A policy that left, and the modules of its generation, hold each other in cycles.
        changed = generation != self._collected_generation or self._p.scheduler.guard.remains
        if changed or self._steps_since_collect >= COLLECT_AFTER_STEPS:
            self._collected_generation = generation
            self._collect()
        self._p.recorder.idle()
        self._p.channel.wait(None)

    def _collect(self) -> None:
        """What policies left behind may have code, so the guard does it, and the supervisor looks on."""
        page, controls = self._p.page, self._p.controls
        page.phase(EnginePhase.CONTROL, self._ns())
        stepped, self._steps_since_collect = self._steps_since_collect > 0, 0
        blame = self._p.scheduler.guard.collect(controls.known_as, stepped=stepped)
        if blame is not None:
            for ejected in controls.blamed(blame):
                self._p.channel.send(ejected)
        page.phase(EnginePhase.IDLE, self._ns())

    def _ready_for_step(self) -> bool:
        if self._p.channel.backlogged:
            # The front does not read: more tokens would only pile up here.
            self._p.channel.stalls += 1
            self._p.page.phase(EnginePhase.IDLE, self._ns())
            self._p.channel.wait(0.05)
            return False
        return self._p.scheduler.has_work() or self._untold

    def _pause(self) -> None:
        self._p.page.phase(EnginePhase.IDLE, self._ns())
        self._p.recorder.idle()
        scheduler = self._p.scheduler
        self._p.channel.wait(None if scheduler.paused and not scheduler.changing else self._retry_s)
        self._retry_s = min(self._retry_s * 2, IDLE_RETRY_S[1])

    def _take(self, sequence: Sequence) -> None:
        # One number for all three: of a hundred thousand that wait, each object counts in the processor's caches.
        number = sequence.id
        spec = SequenceSpec(
            id=number,
            request=number if sequence.request == number else sequence.request,
            arrival=number,
            arrived=sequence.arrived,
            prompt_len=len(sequence.prompt) // 4,
            max_new=sequence.max_new,
            prompt=sequence.prompt,
            emitted=np.frombuffer(sequence.emitted, np.int32) if sequence.emitted else None,
            priority=sequence.priority,
            tenant=sequence.tenant,
            deadline=sequence.deadline,
            cache_salt=sequence.cache_salt,
            siblings=sequence.n > 1,
            scored=PromptScores.asked(sequence),
            attached=sequence.sampling,
        )
        try:
            self._p.scheduler.add(spec)
        except NeverFits as error:
            self._p.channel.send(Failed(sequence.id, "never_fits", f"this request can never be served: it {error}"))
        except ValueError as error:
            self._p.channel.send(Failed(sequence.id, "bad_sequence", str(error)))
        else:
            if spec.scored:
                self._scores.take(sequence)

    def _cancel(self, ids: list[int]) -> None:
        for sequence_id in self._p.scheduler.cancel(ids):
            self._forget(sequence_id)
            self._untold = True

    def _forget(self, sequence_id: int) -> None:
        self._admitted_once.discard(sequence_id)
        self._scores.forget(sequence_id)

    # ---- a step

    def _step(self) -> bool:
        """One step; False when nothing could be placed."""
        recorder, scheduler = self._p.recorder, self._p.scheduler
        self._untold = False
        now = self._clock()
        recorder.begin(now)
        self._p.page.phase(EnginePhase.SCHEDULE, recorder.mark)
        plan = scheduler.schedule(now)
        self._p.page.step(plan.step, recorder.mark)
        self._p.page.ids(plan.ids)
        self._report()
        recorder.scheduled()
        if (state := self._p.controls.exported(now)) is not None:
            self._p.channel.send(state)
        if plan.idle:
            self._send_record(plan)
            return False
        self._retry_s = IDLE_RETRY_S[0]
        self._steps_since_collect += 1
        try:
            sampled = self._compute(plan)
        except SequenceFault as fault:
            self._drop(plan, fault)
            return True
        self._finish_step(plan, sampled, now)
        return True

    def _hit(self, point: Point, plan: Plan) -> None:
        if self._faults is not None:
            self._faults.at(point, plan)

    def _compute(self, plan: Plan) -> Sampled | None:
        page, recorder = self._p.page, self._p.recorder
        self._hit("schedule", plan)
        for admitted in plan.admitted:
            self._bind(plan, admitted)
        page.phase(EnginePhase.MODEL, self._ns())
        self._hit("model", plan)
        if plan.copies:
            self._p.backend.copy_blocks(plan.copies)
        if not len(plan):  # somebody was copied out or came in without tokens, and nothing else runs
            recorder.computed()
            recorder.sampled()
            return None
        scored = self._scores.stretches(plan) if self._scores else []
        batch, slots = build_batch(plan, self._p.block_size, scored)
        logits = self._p.backend.forward(batch, self._scores.reader(plan, scored) if scored else None)
        recorder.computed()
        if not len(slots):
            recorder.sampled()
            return None
        page.phase(EnginePhase.SAMPLE, self._ns())
        self._hit("sample", plan)
        sampled = self._p.sampler.sample(logits, slots, self._p.scheduler.generated(slots))
        recorder.sampled()
        return sampled

    def _bind(self, plan: Plan, admitted: Admitted) -> None:
        slot, length = admitted.slot, admitted.prompt_len
        total = length + int(self._p.scheduler.generated(np.array([slot]))[0])
        tokens, sampling = plan.tokens[slot], decode_sampling(admitted.attached)
        self._p.sampler.bind(slot, sampling, sampling.index, tokens[:length], tokens[length:total])

    def _finish_step(self, plan: Plan, sampled: Sampled | None, now: float) -> None:
        page = self._p.page
        page.phase(EnginePhase.OUTPUTS, self._ns())
        self._hit("outputs", plan)
        at = self._clock()
        tokens, stop = NOTHING if sampled is None else (sampled.tokens, sampled.stop)
        committed = self._p.scheduler.commit(plan, tokens, stop)
        first = [a for a in plan.admitted if a.id not in self._admitted_once]
        self._admitted_once.update([a.id for a in first])
        if sampled is not None or first:
            message = self._outputs(plan, sampled, committed, first, now, at)
            if self._scores:
                message.prompt_logprobs = self._scores.told(committed.ids.tolist())
            self._p.channel.post(message)
        for sequence_id, _ in committed.finished:
            self._forget(sequence_id)
        self._send_record(plan)

    @staticmethod
    def _outputs(
        plan: Plan, sampled: Sampled | None, committed: Committed, first: list[Admitted], now: float, at: float
    ) -> Outputs:
        ids = committed.ids
        message = Outputs(step=plan.step, at=at, ids=ids.tobytes(), tokens=b"")
        message.admitted = [(a.id, now, a.cached) for a in first]
        reasons: list[tuple[int, FinishReason]] = [
            (i, "stop" if why == "stop" else "length") for i, why in committed.finished
        ]
        message.finished = reasons
        if sampled is not None:
            message.tokens = sampled.tokens.tobytes()
            message.hashes = b"" if sampled.hashes is None else sampled.hashes.tobytes()
            message.logprobs = {int(ids[row]): value for row, value in sampled.logprobs.items()}
        return message

    def _drop(self, plan: Plan, fault: SequenceFault) -> None:
        # The step is undone for all, the guilty one ends, the others go on in the next step.
        self._p.scheduler.abandon(plan)
        self._p.scheduler.finish(fault.sequence_id, "error")
        self._forget(fault.sequence_id)
        self._p.channel.send(Failed(fault.sequence_id, "model_error", f"the model could not go on: {fault}"))
        self._send_record(plan, undone=True)

    def _report(self) -> None:
        if self._p.scheduler.has_news:
            for sequence_id, text in self._p.scheduler.take_refusals():
                self._forget(sequence_id)
                self._p.channel.send(Failed(sequence_id, "refused_by_policy", text))
            for ejected in self._p.controls.ejections():
                self._p.channel.send(ejected)
        for reply in self._p.controls.replies():
            self._p.channel.send(reply)

    def _send_record(self, plan: Plan, undone: bool = False) -> None:
        record = self._p.recorder.record(plan, undone)
        if record is not None:
            self._p.channel.post(record)
        started = self._ns()
        self._p.channel.flush()
        self._p.recorder.sent(self._ns() - started)
