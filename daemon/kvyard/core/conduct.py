"""Watches over many steps what no single decision shows: standing still, starving, thrashing, too many overrides.

Blame must be right. A step without rows is nobody's fault for as long as a wake-up may be declared; a long wait is
nobody's fault while nobody overtakes; who gives way to those that came before it thrashes nobody, however full the
pool is; and what the core overrides for its own reasons counts for nobody. Nor does what an earlier policy did.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvyard.core.advice import Advice
from kvyard.core.guard import Fault
from kvyard.core.ledger import Ledger
from kvyard.core.remains import is_foreign
from kvyard.core.sequence import NO_ROW, SequenceState
from kvyard.core.step import StepState
from kvyard.link.record import Preemption
from kvyard.policy.base import KINDS, Kind

PAYS = 4
"""A preemption pays when the tokens won before it, so many times over, are as many as are lost."""
LOOK_EVERY = 64
"""Steps between two looks for starvation and at the share of overrides."""


@dataclass(slots=True)
class Losses:
    """What preemptions did to one sequence."""

    total: int
    """Its tokens, in KV or not, when KV was last thrown away or a preemption last paid."""
    kept: int = 0
    """Tokens whose KV the last preemption left it."""
    thrown: int = 0
    """The most KV thrown away at once since a preemption last paid. Progress is what goes beyond it."""
    times: int = 0
    """Preemptions in a row that speak against a policy."""
    admissions: int = 0
    """How many of those the admission policy brought about."""
    free: int = 0
    """Preemptions that cost nothing."""

    def note(self, total: int, tokens: int, swapped: bool) -> bool:
        """Take down a preemption at `total` tokens, `tokens` of them in KV; whether it speaks against a policy.

        A swap loses nothing, so any progress pays for it. Where KV was thrown away before, progress is what pays for
        that, or who swaps a victim out and throws it away in turns would be forgiven every other time. A swap that
        came further without paying says nothing, and what was won before it counts for the next loss.
        """
        won, lost, moved = total - self.total, tokens, swapped and tokens > self.kept
        if swapped:
            won, lost = max(won, tokens - max(self.kept, self.thrown)), self.thrown
        pays = won * PAYS >= max(1, lost)
        if pays:
            self.times = self.admissions = self.thrown = 0
        if pays or not swapped:
            self.total = total
        self.kept = tokens if swapped else 0
        if not swapped:
            self.thrown = max(self.thrown, tokens)
        return not pays and not moved


@dataclass(frozen=True, slots=True)
class ConductLimits:
    """What puts a policy out although each of its decisions was valid."""

    stall_s: float = 1.0
    """Something waits, nothing runs, no wake-up is declared; and for `stall_steps` steps."""
    stall_steps: int = 20
    """A busy machine may let a second pass between two steps, and that is not the policy's fault."""
    asleep_s: float = 120.0
    """Something waits and nothing runs, whatever wake-up is declared: twice the longest window of a discipline."""
    overtakes: int = 1000
    """Others, no more urgent by their number, admitted while the oldest waiting sequence is passed over."""
    age_s: float = 300.0
    """The oldest waiting sequence has been passed over for that long, by `age_overtakes` others at least."""
    age_overtakes: int = 32
    idle_steps: int = 2000
    """Steps that placed others while a running sequence got nothing; and `idle_s` seconds."""
    idle_s: float = 30.0
    thrashes: int = 32
    """Preemptions of one sequence in a row, each for one behind it and before it had won a quarter of its loss.

    Full pools alone bring it to 7 at most under the disciplines that come with kvyard."""
    override_share: float = 0.5
    """Of the last `window` calls of a kind, those that the core had to override."""
    window: int = 100


class Conduct:
    """Looks at the policies' conduct after each step; puts out who stands still, starves others or thrashes."""

    def __init__(self, advice: Advice, ledger: Ledger, step: StepState, limits: ConductLimits | None = None) -> None:
        self.limits = limits or ConductLimits()
        self._advice = advice
        self._ledger = ledger
        self._step = step
        self._still_since: float | None = None
        self._still_steps = 0
        self._asleep_since: float | None = None
        """Since when something waits and nothing runs, wake-ups declared or not."""
        self._asleep_steps = 0
        self._asked = 0
        """Calls of the admission policy before this step."""
        self._passed_over: SequenceState | None = None
        self._stint = 0
        """How often it had been let in then and got something."""
        self._overtaken = 0
        """Admissions since then of others that lined up later and are no more urgent.

        A client's own low priority starves nobody, nor does who puts a victim behind those that already wait.
        """
        self._served = False
        """It got tokens since the last look."""
        self._passed_since = 0.0
        self._admission_calls_before = 0
        self._idle: tuple[int, float] | None = None
        """Id of a running sequence that gets nothing, and since when."""
        self._windows: dict[Kind, tuple[int, int]] = dict.fromkeys(KINDS, (0, 0))
        """Calls and overrides of each kind at the start of its window."""
        self._losses: dict[int, Losses] = {}
        """By sequence."""
        self._watched = advice.policies

    def look(self) -> None:
        """After a step that was not paused; the guard is armed."""
        if self._advice.policies is not self._watched:
            self._reset()
        if self._passed_over is not None and not self._served:
            self._count_overtakers(self._passed_over)
        try:
            self._look_for_stall()
            if self._step.preempted:
                self._look_for_thrashing()
            if self._ledger.step % LOOK_EVERY == 0:
                self._look_at_overrides()
                self._look_for_starvation()
                self._look_for_idling()
        except Fault as fault:
            self._advice.eject(fault)
            self._reset()
        self._asked = self._advice.guard.calls["admission"]

    def _count_overtakers(self, passed: SequenceState) -> None:
        # Whom a fair order passes over is served soon; the next look then begins anew, and until then nothing counts.
        self._served = passed.row != NO_ROW and self._ledger.cols.cells.granted[passed.row] > 0
        if not self._served and self._step.admitted:
            self._overtaken += sum(
                seq.priority >= passed.priority and seq.lined_up > passed.lined_up for seq in self._step.admitted
            )

    def pardon(self) -> None:
        """Nothing is expected of the policies in this step (paused)."""
        self._still_since = self._asleep_since = None

    def _reset(self) -> None:
        """Others are in charge, who start with a clean slate."""
        self._watched = self._advice.policies
        self._still_since = self._asleep_since = self._passed_over = self._idle = None
        self._losses = {}
        guard = self._advice.guard
        self._windows = {kind: (guard.calls[kind], guard.blamed[kind]) for kind in KINDS}

    # ---- standing still -------------------------------------------------------------------------------------

    def _look_for_stall(self) -> None:
        step, ledger = self._step, self._ledger
        if step.placed or ledger.running or not len(ledger.queue):
            self._still_since = self._asleep_since = None
            return
        if self._asleep_since is None:
            self._asleep_since, self._asleep_steps = ledger.now, 0
        self._asleep_steps += 1
        asleep = ledger.now - self._asleep_since
        if step.wake > ledger.step:
            self._still_since = None
            if asleep >= self.limits.asleep_s and self._asleep_steps >= self.limits.stall_steps:
                what = f"{len(ledger.queue)} requests wait, nothing has been scheduled for {asleep:.1f} s"
                raise Fault("admission", "stalled", f"{what}, although wake-ups are declared")
            return
        if self._still_since is None:
            self._still_since, self._still_steps = ledger.now, 0
        self._still_steps += 1
        still = ledger.now - self._still_since
        if still >= self.limits.stall_s and self._still_steps >= self.limits.stall_steps:
            kind: Kind = "admission" if self._advice.guard.calls["admission"] > self._asked else "prefill"
            what = f"{len(ledger.queue)} requests wait, nothing has been scheduled for {still:.1f} s"
            raise Fault(kind, "stalled", f"{what} and no wake-up is declared")

    # ---- starving -------------------------------------------------------------------------------------------

    def _oldest_waiting(self) -> SequenceState | None:
        # Sequences stand in the order of their arrival, at most `max_running` of them run, and nobody lines up before
        # it arrives, so few are looked at. Who waits for one of its own is held back by the core.
        ledger, oldest = self._ledger, None
        for seq in ledger.sequences.values():
            if oldest is not None and oldest.lined_up <= seq.number:
                break
            if seq.row == NO_ROW and not ledger.awaits(seq) and (oldest is None or seq.lined_up < oldest.lined_up):
                oldest = seq
        return oldest

    def _free(self, seq: SequenceState) -> int:
        losses = self._losses.get(seq.id)
        return 0 if losses is None else losses.free

    def _look_for_starvation(self) -> None:
        ledger, limits = self._ledger, self.limits
        self._served = False
        oldest = self._oldest_waiting()
        stint = 0 if oldest is None else oldest.admissions - self._free(oldest)
        if oldest is not self._passed_over or stint != self._stint:
            self._passed_over, self._stint = oldest, stint
            self._overtaken, self._passed_since = 0, ledger.now
            self._admission_calls_before = self._advice.guard.calls["admission"]
            return
        if oldest is None:
            return
        overtaken, age = self._overtaken, ledger.now - self._passed_since
        if overtaken > limits.overtakes or (age > limits.age_s and overtaken >= limits.age_overtakes):
            asked = self._advice.guard.calls["admission"] > self._admission_calls_before
            raise Fault(
                "admission" if asked else "prefill",
                "starving",
                f"sequence {oldest.id} was passed over by {overtaken} others in {age:.0f} s",
            )

    def _look_for_idling(self) -> None:
        ledger, cols = self._ledger, self._ledger.cols
        if not ledger.running:
            self._idle = None
            return
        waited = ledger.step - cols.placed_step[cols.order]
        longest = int(waited.argmax())
        id = int(cols.id[cols.order[longest]])
        if int(waited[longest]) < LOOK_EVERY or self._idle is None or self._idle[0] != id:
            self._idle = (id, ledger.now)
            return
        if int(waited[longest]) > self.limits.idle_steps and ledger.now - self._idle[1] > self.limits.idle_s:
            raise Fault(
                "prefill", "starving", f"running sequence {id} got nothing in the last {waited[longest]} steps"
            )

    # ---- thrashing ------------------------------------------------------------------------------------------

    def _look_for_thrashing(self) -> None:
        ledger = self._ledger
        if len(self._losses) > 2 * (len(ledger.sequences) + LOOK_EVERY):
            self._losses = {id: losses for id, losses in self._losses.items() if id in ledger.sequences}
        for preemption in self._step.preemptions:
            seq, by = ledger.sequences.get(preemption.id), ledger.sequences.get(preemption.by)
            if seq is not None and by is not None and preemption.cause != "override":
                self._weigh(seq, by, preemption)

    def _weigh(self, seq: SequenceState, by: SequenceState, preemption: Preemption) -> None:
        """Whether this preemption of `seq` for `by` paid, and whether there were too many that did not."""
        losses = self._losses.get(seq.id)
        if losses is None:
            losses = self._losses[seq.id] = Losses(seq.prompt_len)
        if not preemption.tokens:  # it had nothing yet, so this neither cost it anything nor helped it
            losses.free += 1
            return
        won, swapped = seq.total - losses.total, preemption.how == "swap"
        unpaid = losses.note(seq.total, preemption.tokens, swapped)
        if not unpaid or by.arrival <= seq.arrival or by.priority < seq.priority:
            return
        losses.times += 1
        losses.admissions += preemption.cause == "admission" or -1 < seq.promised < seq.total
        if losses.times > self.limits.thrashes:
            text = f"sequence {seq.id} gave way to later ones {losses.times} times and won next to nothing in between"
            lost = 0 if swapped else preemption.tokens
            by_admissions = 2 * losses.admissions > losses.times
            raise Fault(self._thrasher(by_admissions), "thrashing", f"{text}, last {won} tokens for {lost} lost")

    def _thrasher(self, by_admissions: bool) -> Kind:
        """Who is to blame: the admission policy where it evicted, or let sequences in without room for their tokens.

        What comes with kvyard is known by its tests: beside a policy of somebody else's it is not blamed.
        """
        theirs = is_foreign(self._advice.policies.admission)
        if theirs != is_foreign(self._advice.policies.preemption):
            return "admission" if theirs else "preemption"
        return "admission" if by_admissions else "preemption"

    # ---- overrides ------------------------------------------------------------------------------------------

    def _look_at_overrides(self) -> None:
        guard, limits = self._advice.guard, self.limits
        for kind in KINDS:
            calls, overrides = guard.calls[kind], guard.blamed[kind]
            calls_before, overrides_before = self._windows[kind]
            if calls - calls_before < limits.window:
                continue
            self._windows[kind] = (calls, overrides)
            share = (overrides - overrides_before) / (calls - calls_before)
            if share >= limits.override_share:
                text = f"the core had to override {share:.0%} of its last {calls - calls_before} decisions"
                raise Fault(kind, "overridden", text)
