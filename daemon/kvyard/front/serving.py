"""The serving side: takes jobs, keeps the journal, feeds the engine and hands its tokens to the APIs.

An engine's death is invisible here but for a pause: every unfinished sequence is given to the next
engine behind the tokens already sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import structlog

from kvyard.front.engine_child import EngineDeath
from kvyard.front.generation import LiveGeneration
from kvyard.front.isolation import Isolation
from kvyard.front.journal import Entry, Journal, tokens_of
from kvyard.front.service import FinishReason, Job, Refusal
from kvyard.link.codec import ToEngine, encode_sampling
from kvyard.link.messages import Cancel, Control, EngineInfo, Failed, Outputs, Reply, Sampling, Sequence, Submit
from kvyard.link.record import StepRecord

log = structlog.get_logger(__name__)

STALL_S = 20.0
"""Seconds in one step from which on the daemon does not call itself ready."""


class Observer(Protocol):
    """Who measures: times in seconds. Must not raise."""

    def queued(self, seconds: float) -> None:
        """A sequence was admitted for the first time after that long."""

    def first_token(self, seconds: float) -> None:
        """Time from arrival to the first output token."""

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """Time between two output tokens of a sequence."""

    def finished(
        self, reason: str, e2e_s: float, prompt_tokens: int, output_tokens: int, preemptions: int, code: str = ""
    ) -> None:
        """A sequence ended; `code` names the error of reason `error`."""

    def refused(self, code: str) -> None:
        """A request was not accepted."""

    def counts(self, running: int, waiting: int) -> None:
        """Sequences that run and wait, where no step record says so."""


class Moments(NamedTuple):
    """When things happened to a sequence, on CLOCK_MONOTONIC; None for what never did."""

    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Watcher(Protocol):
    """Who keeps the decision log. Times on CLOCK_MONOTONIC."""

    def arrived(self, sequence_id: int, request_id: str, at: float) -> None:
        """A sequence was taken up."""

    def ended(self, sequence_id: int, at: float, reason: str, moments: Moments) -> None:
        """A sequence ended, however."""


class _TurnedAway:
    """Refusals for a full queue as log lines, at most one a second however many there are."""

    def __init__(self) -> None:
        self._count = 0
        self._message = ""
        self._told = -1.0

    def add(self, message: str) -> None:
        """One more, with what its client is told."""
        self._count += 1
        self._message = message

    def tell(self, now: float) -> None:
        """Log what came since the last line, if that is a second ago."""
        if self._count and now - self._told >= 1.0:
            log.info("requests.refused", status=429, count=self._count, last=self._message)
            self._count, self._told = 0, now


class _Call(NamedTuple):
    """What the engine was asked."""

    method: str
    params: dict[str, object]
    done: Callable[[Reply], None]

    def loads(self, policy: str) -> bool:
        """It asked for `kind/name`, or for a discipline, of which that may be a part."""
        wanted = self.params.get("kind")
        return self.method == "swap" and (wanted == "discipline" or f"{wanted}/{self.params.get('name')}" == policy)


def _lost(call: _Call, death: EngineDeath, candidate: str | None) -> Reply:
    """What to say to a call that the engine did not live to answer."""
    if candidate is not None and call.loads(candidate):
        ended = death.hang or f"the engine {death.words} while it was loaded or took over"
        error = f"{candidate} took the engine down: {ended}; it was not put in charge, and is in quarantine"
        return Reply(0, error=error, code=death.code)
    # The next engine is told by the front what is in charge and whether it pauses: of no call without an answer.
    return Reply(
        0,
        error="the engine ended before it answered, and the next one goes on as before, without what was asked; "
        "ask again when `kvyard status` says ready",
        code="engine-lost",
    )


def _of_one(sampling: Sampling, index: int) -> Sampling:
    """Of one sequence of the request. All have one prompt: the first tells what is to be said of it."""
    return msgspec.structs.replace(sampling, index=index, prompt_logprobs=-1) if index else sampling


class Serving:
    """Implements `Service` for the APIs; told of the engine by the daemon."""

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        observer: Observer,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal = Journal()
        self.isolation = Isolation(self.journal)
        self.info: EngineInfo | None = None
        self.draining = False
        self.leaving = False
        """Draining ends with the daemon's end; otherwise an operator may resume."""
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.paused = False
        """An operator stopped scheduling: requests are taken, and wait."""
        self.stalled: Callable[[], float] = lambda: 0.0
        """Seconds that the engine has spent in its present step."""
        self.idle: Callable[[], None] = lambda: None
        """Called when the last sequence has ended."""
        self._send = send
        self._observer = observer
        self._clock = clock
        self._engine_up = False
        self._next_id = 1
        self._calls: dict[int, _Call] = {}
        """What the engine was asked and has not answered, by ticket."""
        self._next_ticket = 1
        self._timed: set[int] = set()
        self._watcher: Watcher | None = None
        self._turned_away = _TurnedAway()

    def watched_by(self, watcher: Watcher) -> None:
        """Tell `watcher` of every arrival and end."""
        self._watcher = watcher

    # ---- Service

    @property
    def ready(self) -> bool:
        """An engine serves, makes progress, is not paused, and nothing is draining."""
        return self._engine_up and not self.draining and not self.paused and self.stalled() < STALL_S

    @property
    def not_ready_reason(self) -> str:
        """Why not; empty when ready."""
        if self.draining:
            until = "" if self.leaving else " until `kvyard resume`"
            return f"draining: the daemon finishes what runs and takes nothing new{until}"
        if not self._engine_up:
            return "the engine restarts; requests are kept" if self.info else "the engine is starting"
        if self.paused:
            return "paused: an operator stopped scheduling; requests wait until `kvyard resume`"
        if (seconds := self.stalled()) >= STALL_S:
            return f"the engine has been in one step for {seconds:.0f} s"
        return ""

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may hold; 0 before the first engine said it."""
        return self.info.max_model_len if self.info is not None else 0

    def check_room(self, sequences: int, ahead: int = 0) -> None:
        """Raise Refusal when that many more sequences would not be accepted behind those `ahead`."""
        if self.draining:
            why = "is shutting down and takes no new requests" if self.leaving else "takes no new requests for now"
            self._refuse(503, "draining", f"the daemon {why}", 5)
        if self.info is None:
            self._refuse(503, "starting", "the engine is still starting; see /ready", 2)
        else:
            most = self.info.max_running + self.max_waiting
            if sequences > most:
                self._refuse(
                    400,
                    "too_many_sequences",
                    f"{sequences} sequences in one request are more than the daemon ever takes: {most} "
                    f"(max_running {self.info.max_running} + max_waiting {self.max_waiting})",
                )
            if len(self.journal) + ahead + sequences > most:
                self._refuse(
                    429,
                    "queue_full",
                    f"{len(self.journal) + ahead} sequences run or wait and {most} is the most "
                    f"(max_running {self.info.max_running} + max_waiting {self.max_waiting}); try again later",
                    self._retry_after(),
                )
            if self.journal.waiting_tokens > self.max_waiting_tokens:
                self._refuse(
                    429,
                    "queue_full",
                    f"{self.journal.waiting_tokens} prompt tokens wait and {self.max_waiting_tokens} is the most; "
                    "try again later",
                    self._retry_after(),
                )

    def submit(self, job: Job) -> LiveGeneration:
        """Take a job or raise Refusal; nothing was allocated for a refused one."""
        self.check_room(job.n)
        self._check_length(job)
        now = self._clock()
        ids = list(range(self._next_id, self._next_id + job.n))
        self._next_id += job.n
        generation = LiveGeneration(self, ids)
        prompt = np.asarray(job.prompt, np.int32).tobytes()
        for index, sequence_id in enumerate(ids):
            sequence = Sequence(
                id=sequence_id,
                request=ids[0],
                index=index,
                arrived=now,
                prompt=prompt,
                max_new=job.max_new,
                sampling=encode_sampling(_of_one(job.sampling, index)),
                priority=job.priority,
                tenant=job.tenant,
                deadline=job.deadline,
                cache_salt=job.cache_salt,
                n=job.n,
                scored=index == 0 and job.sampling.prompt_logprobs >= 0,
            )
            queue_until = now + job.queue_timeout if job.queue_timeout is not None else None
            entry = Entry(sequence, job.request_id, generation, queue_until)
            self.journal.add(entry)
            if self._watcher is not None:
                self._watcher.arrived(sequence_id, job.request_id, now)
            if queue_until is not None or job.deadline is not None:
                self._timed.add(sequence_id)
        self._feed()
        return generation

    def _check_length(self, job: Job) -> None:
        most = self.max_model_len
        if not job.prompt:
            self._refuse(400, "empty_prompt", "the prompt has no tokens")
        if not -(2**31) <= job.priority < 2**31:
            self._refuse(400, "bad_request", f"priority {job.priority} is not between -2^31 and 2^31 - 1")
        if len(job.prompt) + job.max_new > most:
            self._refuse(
                400,
                "context_length_exceeded",
                f"this model's context is {most} tokens here; the prompt has {len(job.prompt)} and max_tokens is "
                f"{job.max_new}: shorten one of them",
            )

    def _refuse(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        self._observer.refused(code)
        if status == 429:
            self._turned_away.add(message)
        raise Refusal(status, code, message, retry_after)

    def _retry_after(self) -> int:
        # A guess that spreads the clients: a second for every ten waiting sequences.
        return 1 + min(self.journal.waiting // 10, 29)

    # ---- Canceller

    def end(self, sequence_id: int, reason: FinishReason) -> None:
        """End a sequence from the front's side: a stop string, or its client is gone."""
        entry = self.journal.get(sequence_id)
        if entry is not None:
            if entry.submitted:
                self._send(Cancel([sequence_id]))
            self._end(entry, reason)

    def fail(self, entry: Entry, code: str, message: str) -> None:
        """End a sequence with an error that its client is told."""
        if entry.submitted:
            self._send(Cancel([entry.id]))
        entry.owner.finish(entry.sequence.index, "error", (code, message))
        # Who was cancelled by an operator is told by an error, and counts as cancelled all the same.
        self._end(entry, "cancelled" if code == "cancelled" else "error", code)

    def cancel_request(self, request_id: str) -> int:
        """Cancel a request on an operator's word; how many sequences ended."""
        entries = [entry for entry in self.journal if entry.request_id == request_id]
        for entry in entries:
            self.fail(entry, "cancelled", "the request was cancelled by an operator")
        return len(entries)

    def fail_all(self, code: str, message: str) -> int:
        """End everything with an error; how many sequences ended."""
        entries = list(self.journal)
        for entry in entries:
            self.fail(entry, code, message)
        return len(entries)

    def sweep(self) -> None:
        """End what has passed its queue time-out or its deadline; called several times a second."""
        now = self._clock()
        self._turned_away.tell(now)
        for sequence_id in list(self._timed):
            entry = self.journal.get(sequence_id)
            if entry is None:
                self._timed.discard(sequence_id)
            elif entry.queue_until is not None and entry.admitted_at is None and now > entry.queue_until:
                self.fail(entry, "queue_timeout", "the request waited longer than its queue_timeout_ms; nothing ran")
            elif entry.sequence.deadline is not None and now > entry.sequence.deadline:
                self.fail(entry, "deadline", "the request passed its deadline_ms before it was complete")

    def tables(self) -> dict[str, int]:
        """Entries of each table of unfinished sequences and calls; all 0 soon after the last one ended."""
        return {"sequences": len(self.journal), "timed": len(self._timed), "engine_calls": len(self._calls)}

    # ---- the engine

    def engine_up(self, info: EngineInfo) -> None:
        """A new engine serves: give it everything."""
        self.info, self._engine_up = info, True
        self._feed()

    def engine_down(self, death: EngineDeath, candidate: str | None = None) -> None:
        """The engine is gone; fail those that killed it alone, keep the others for the next one.

        `candidate` is the `kind/name` of a policy that ended it before it was in charge.
        """
        self._engine_up = False
        for entry in self.isolation.blame(death):
            entry.submitted = False
            self.fail(entry, "engine_killed", f"this request ended the engine while it ran alone: it {death.words}")
        self.journal.engine_lost()
        self._observer.counts(0, len(self.journal))
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.done(_lost(call, death, candidate))

    def control(self, method: str, params: dict[str, object], done: Callable[[Reply], None]) -> None:
        """Ask the engine something; `done` is called once."""
        if not self._engine_up:
            done(
                Reply(
                    0,
                    error="no engine serves at the moment; try again when `kvyard status` says ready",
                    code="no-engine",
                )
            )
            return
        ticket = self._next_ticket
        self._next_ticket += 1
        self._calls[ticket] = _Call(method, params, done)
        try:
            self._send(Control(ticket, method, params))
        except (OverflowError, ValueError, TypeError) as error:
            del self._calls[ticket]
            done(Reply(0, error=f"{method}: a value cannot be passed on: {error}", code="bad-params"))

    def asked(self, ticket: int) -> str:
        """The method of a call that the engine has not answered; empty when there is none."""
        call = self._calls.get(ticket)
        return "" if call is None else call.method

    def replied(self, reply: Reply) -> None:
        """The engine answered."""
        call = self._calls.pop(reply.ticket, None)
        if call is not None:
            call.done(reply)

    def _feed(self) -> None:
        if not self._engine_up or self.isolation.holds():
            return
        for entry in self.isolation.next():
            entry.submitted, entry.reason = True, ""
            try:
                self._send(Submit(self.journal.for_engine(entry)))
            except (OverflowError, ValueError, TypeError) as error:
                # What cannot be put into a message is that request's fault and must not stop the others.
                entry.submitted = False
                self.fail(entry, "bad_request", f"this request cannot be passed on: {error}")

    def _set_apart(self, entry: Entry) -> None:
        # The lone suspect leaves the engine so that the next one is alone. Its tokens under way must
        # arrive before it is submitted again, or they would be made twice: the fence's reply is behind them.
        self._send(Cancel([entry.id]))

        def passed(reply: Reply) -> None:
            entry.submitted = False
            self.isolation.resume()
            if reply.error is None:
                self._feed()

        self.isolation.pause(entry)
        self.control("fence", {}, passed)

    def outputs(self, message: Outputs) -> None:
        """What a step produced."""
        for sequence_id, at, cached in message.admitted:
            self._admitted(sequence_id, at, cached)
        hashes = np.frombuffer(message.hashes, np.uint64).tolist() if message.hashes else None
        ids = np.frombuffer(message.ids, np.int64).tolist()
        for row, (sequence_id, token) in enumerate(zip(ids, tokens_of(message.tokens), strict=True)):
            entry = self.journal.get(sequence_id)
            if entry is not None:
                self._token(entry, token, hashes[row] if hashes else None, message)
        for sequence_id, reason in message.finished:
            entry = self.journal.get(sequence_id)
            if entry is not None:
                entry.owner.finish(entry.sequence.index, reason)
                self._end(entry, reason)
        cleared = self.isolation.cleared()
        if cleared is not None:
            self._set_apart(cleared)

    def _admitted(self, sequence_id: int, at: float, cached: int) -> None:
        entry = self.journal.get(sequence_id)
        if entry is not None and self.journal.admitted(entry, at):
            self._observer.queued(max(0.0, at - entry.sequence.arrived))
            # Several sequences share one prompt, and the first has found what there was to find.
            entry.owner.cached_tokens = max(entry.owner.cached_tokens, cached)

    def _token(self, entry: Entry, token: int, hash_: int | None, message: Outputs) -> None:
        at = message.at
        if entry.last_at is None:
            entry.first_at = at
            self._observer.first_token(at - entry.sequence.arrived)
        else:
            self._observer.inter_token(at - entry.last_at)
        entry.last_at = at
        entry.emitted += token.to_bytes(4, "little", signed=True)
        entry.owner.push(
            entry.sequence.index,
            token,
            hash_,
            message.logprobs.get(entry.id) if message.logprobs else None,
            message.prompt_logprobs.get(entry.id) if message.prompt_logprobs else None,
        )

    def failed(self, message: Failed) -> None:
        """The engine ended one sequence by an error."""
        entry = self.journal.get(message.id)
        if entry is not None:
            entry.submitted = False
            self.fail(entry, message.code, message.message)

    def step(self, record: StepRecord) -> None:
        """Keep the operator's list."""
        self.journal.step(record)

    def _end(self, entry: Entry, reason: FinishReason, code: str = "") -> None:
        self.journal.end(entry.id)
        if self._watcher is not None:
            moments = Moments(entry.admitted_at, entry.first_at, entry.last_at)
            self._watcher.ended(entry.id, self._clock(), code or reason, moments)
        self._observer.finished(
            reason,
            self._clock() - entry.sequence.arrived,
            entry.prompt_tokens if entry.sequence.index == 0 else 0,
            entry.outputs,
            entry.preemptions,
            code,
        )
        # Without an engine, and when nothing is left, no step record comes that would correct the gauges.
        if not self._engine_up or not len(self.journal):
            self._observer.counts(0, len(self.journal))
        if self.isolation.ended(entry):
            self._feed()
        if not len(self.journal):
            self.idle()
