"""The policies in charge, and their answers as plain values that the planner can rely on.

Each method here returns a usable decision whatever the policy does: a policy that fails is put out and the
built-in of its kind answers in its place, within the same call. A policy that belongs to a discipline takes
the whole discipline with it, since its parts were chosen for one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvyard.core.checks import (
    Checks,
    PlainAdmission,
    PlainVictims,
    admission_traits,
    linear_keys,
    order_key,
    plain_decision,
    plain_mapping,
)
from kvyard.core.guard import Fault, Guard
from kvyard.core.ledger import Ledger
from kvyard.core.policy_set import Declarations, PolicySet, Traits, builtin_set
from kvyard.core.queue import KeysOf
from kvyard.core.sequence import SequenceState
from kvyard.core.snapshot import CoreSnapshot, View
from kvyard.core.step import StepState
from kvyard.policy.base import KINDS, AdmissionPolicy, Kind, OrderKey, Policy
from kvyard.policy.decisions import Cause, Shape

__all__ = ["Advice", "Exit", "PolicySet", "builtin_set"]

T = TypeVar("T")
REMEMBERED = 12
"""Decisions that an exit record tells of."""


@dataclass(slots=True)
class Exit:
    """A policy was put out: who, why, and what it saw."""

    kind: Kind
    name: str
    code: str
    message: str
    step: int
    traceback: str
    snapshot: dict[str, Any]
    dump: dict[str, Any]
    exported: dict[str, Any]
    decisions: list[dict[str, Any]]
    """The last ones of its kind, oldest first."""
    with_it: tuple[str, ...] = ()
    """`kind/name` of the other parts of its discipline, which went with it."""
    policy: Policy | None = None
    """The object itself: by its name alone nobody could tell two versions of it apart."""


class Advice:
    """Asks the policies in charge through the guard."""

    def __init__(
        self, guard: Guard, policies: PolicySet, ledger: Ledger, step: StepState, snapshot: CoreSnapshot
    ) -> None:
        self.guard = guard
        self.policies = policies
        self.order_changed = True
        """The admission policy's order is not yet that of the queue."""
        self.exits: list[Exit] = []
        self._ledger = ledger
        self._step = step
        self._snapshot = snapshot
        self._checks = Checks(ledger, step, snapshot)
        self._last_shape: Shape | None = None
        self._last_admission: PlainAdmission | None = None
        self._last_victims: PlainVictims | None = None
        self._decisions: deque[tuple[int, Kind, str, object]] = deque(maxlen=REMEMBERED * len(KINDS))
        self.traits = self.read_traits(policies, KINDS)

    # ---- the calls ------------------------------------------------------------------------------------------

    def shape(self) -> Shape:
        """The phases of this step."""
        constant = self.traits.shape
        shape = (
            constant if constant is not None else self._ask("prefill", "shape", self._checks.shape, self._snapshot)
        )
        self._last_shape = shape
        return shape

    def divide(self, prompts: Sequence[View], left: int) -> list[int]:
        """Most tokens for each of `prompts`."""
        if not self.traits.divides:
            return [left] * len(prompts)
        shown = tuple(prompts)  # what it is handed is not the policy's to change

        def check(value: Any) -> list[int]:  # noqa: ANN401 - whatever a policy returned
            return self._checks.shares(value, shown)

        return self._ask("prefill", "divide", check, self._snapshot, shown, left)

    def admit(self) -> PlainAdmission:
        """Who may come in."""
        self._last_admission = self._ask("admission", "admit", self._checks.admission, self._snapshot)
        return self._last_admission

    def victims(self, short: int, who: SequenceState, cause: Cause) -> PlainVictims:
        """Whom to preempt for `who`, who lacks `short` blocks."""
        check = self._checks.victims
        view = self._ledger.view(who)
        self._last_victims = self._ask("preemption", "victims", check, self._snapshot, short, view, cause)
        return self._last_victims

    def order(self, traits: Traits) -> KeysOf | None:
        """Keys by the admission policy in charge, whose traits these are; None for the order of arrival."""
        if traits.linear is not None:
            return partial(linear_keys, traits.linear)
        return self._keys if traits.keyed else None

    def _keys(self, seqs: Sequence[SequenceState]) -> list[OrderKey]:
        """Where these wait, by the method of the policy in charge; once that was put out, by the built-in's sum."""
        declared = self.traits.linear
        if declared is None:
            try:
                views = [self._ledger.view(seq) for seq in seqs]
                return self.guard.call_each("admission", self.policies.admission, "key", order_key, views)
            except Fault as fault:
                self.eject(fault)
                declared = self.traits.linear
                assert declared is not None, "the built-in declares its order"
        # The others in the queue have tuples, until it is ordered anew.
        return [(key,) for key in linear_keys(declared, seqs)]

    def examine_keys(self) -> None:
        """After keys were asked for: whether the admission policy did anything else meanwhile."""
        try:
            self.guard.examine("admission", self.policies.admission)
        except Fault as fault:
            self.eject(fault)

    def _ask(self, kind: Kind, method: str, check: Callable[[Any], T], *args: object) -> T:
        try:
            decision = self.guard.call(kind, self.policies.get(kind), method, check, *args)
            self._decisions.append((self._ledger.step, kind, method, decision))
            return decision
        except Fault as fault:
            self.eject(fault)
            return check(getattr(self.policies.get(kind), method)(*args))

    def order_of(self, policy: AdmissionPolicy, traits: Traits) -> KeysOf | None:
        """`order` for a candidate that is not in charge; what it raises is a Fault and puts nobody out."""
        if traits.linear is not None or not traits.keyed:
            return self.order(traits)
        ask, view = self.guard.call_each, self._ledger.view
        return lambda seqs: ask("admission", policy, "key", order_key, [view(seq) for seq in seqs])

    def dump(self) -> dict[str, Any]:
        """Names, parameters and private state of the policies in charge."""
        with self.guard.armed():
            return {
                kind: {
                    "name": self.policies.name(kind),
                    "params": self._told(kind, "parameters"),
                    "state": self._last_words(kind, self.policies.get(kind), "dump"),
                }
                for kind in KINDS
            }

    def export(self) -> dict[str, dict[str, Any]]:
        """Exported state by `kind/name` of the policies that have one; who fails in it is put out."""
        states = {}
        for kind in KINDS:
            name = f"{kind}/{self.policies.name(kind)}"
            try:
                state = self.guard.call(kind, self.policies.get(kind), "export_state", plain_mapping)
            except Fault as fault:
                self.eject(fault)
            else:
                if state:
                    states[name] = state
        return states

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Hand each policy in charge the state that one of its kind and name exported; who fails is put out."""
        for kind in KINDS:
            state = states.get(f"{kind}/{self.policies.name(kind)}")
            if state:
                try:
                    self.guard.call(kind, self.policies.get(kind), "import_state", lambda value: None, dict(state))
                except Fault as fault:
                    self.eject(fault)

    def in_force(self) -> dict[str, Any]:
        """What the policies in charge really do, from what they declare and last decided; None: not yet asked."""
        shape, admission, victims = self._last_shape, self._last_admission, self._last_victims
        return {
            "queue_order": self._order_in_force(),
            "admission_may_evict": self.traits.evicts,
            "prompts_divided_by_policy": self.traits.divides,
            "lookahead_steps": self.traits.lookahead + 1,
            "phases": shape and [[phase.value for phase in group] for group in shape.groups],
            "prompt_tokens_per_step": shape and shape.prompts,
            "reserve_blocks": admission and admission.keep,
            "holds_promises": admission and admission.hold,
            "may_skip": admission and admission.skip,
            "victims_way": victims and victims.how,
            "victims_requeue": victims and victims.requeue,
        }

    def _order_in_force(self) -> str:
        linear = self.traits.linear
        if linear is None:
            return "key" if self.traits.keyed else "arrival"
        terms = [f"{weight:g} * {name}" for name, weight in linear._asdict().items() if weight]
        return " + ".join(terms) or "arrival"

    def install(self, policies: PolicySet, traits: Traits) -> None:
        """Put others in charge; a pointer swap that cannot fail."""
        changed = [kind for kind in KINDS if policies.get(kind) is not self.policies.get(kind)]
        self.policies, self.traits = policies, traits
        self._last_shape = self._last_admission = self._last_victims = None
        self._forget(changed)

    def _forget(self, kinds: Collection[Kind]) -> None:
        """Other policies are in charge of these kinds: they start with a clean slate."""
        self._decisions = deque((d for d in self._decisions if d[1] not in kinds), maxlen=self._decisions.maxlen)
        for kind in kinds:
            self.guard.forgive(kind)

    def read_traits(self, policies: PolicySet, kinds: Collection[Kind]) -> Traits:
        """What the policies of `kinds` declare rather than decide, read once; nothing of the others. Raises Fault."""
        declared, checks = self._declared, self._checks
        read: dict[str, Any] = {}
        if "admission" in kinds:
            traits = declared("admission", policies.admission, "key_and_evicts", admission_traits)
            read["keyed"], read["linear"], read["evicts"] = traits
        if "preemption" in kinds:
            read["lookahead"] = declared("preemption", policies.preemption, "lookahead", checks.lookahead)
        if "prefill" in kinds:
            shape = declared("prefill", policies.prefill, "shape_and_divide", checks.prefill_traits)
            read["shape"], read["divides"] = shape
        return Traits(**read)

    def _declared(self, kind: Kind, policy: Policy, method: str, check: Callable[[Any], T]) -> T:
        return self.guard.call(kind, policy, method, check, by=Declarations(policy))

    # ---- putting out ----------------------------------------------------------------------------------------

    def eject(self, fault: Fault) -> None:
        """Put the policy out, and its whole discipline; the built-ins are in charge from now on."""
        old = self.policies
        fresh = builtin_set()
        gone: tuple[Kind, ...] = KINDS if old.discipline is not None else (fault.kind,)
        changes = {kind: fresh.get(kind) for kind in gone}
        whole = "builtin" if len(gone) == len(KINDS) else None
        self.policies = old.replaced(changes, {}, whole)
        # Only the built-ins': the others may fail in this, and would be the next ones to be put out.
        self.traits = self.traits.with_those_of(gone, self.read_traits(self.policies, gone))
        self.exits.append(self._exit_of(fault, old, gone))
        self._forget(gone)
        self.order_changed = self.order_changed or "admission" in gone

    def _exit_of(self, fault: Fault, old: PolicySet, gone: tuple[Kind, ...]) -> Exit:
        policy = old.get(fault.kind)
        return Exit(
            kind=fault.kind,
            name=old.name(fault.kind),
            code=fault.code,
            message=fault.message,
            step=self._ledger.step,
            traceback=fault.trace,
            snapshot=self.describe(),
            dump=self._last_words(fault.kind, policy, "dump"),
            exported=self._last_words(fault.kind, policy, "export_state"),
            decisions=self._last_decisions(fault.kind),
            with_it=tuple(f"{kind}/{old.name(kind)}" for kind in gone if kind != fault.kind),
            policy=policy,
        )

    def _last_decisions(self, kind: Kind) -> list[dict[str, Any]]:
        mine = [(step, method, value) for step, of, method, value in self._decisions if of == kind]
        return [
            {"step": step, "call": method, "answer": plain_decision(value)}
            for step, method, value in mine[-REMEMBERED:]
        ]

    def _last_words(self, kind: Kind, policy: Policy, method: str) -> dict[str, Any]:
        """What a policy that was put out has to say; nothing if even that fails."""
        try:
            return self.guard.call(kind, policy, method, plain_mapping)
        except Fault:
            return {}

    def _told(self, kind: Kind, method: str) -> dict[str, Any]:
        try:
            return self._declared(kind, self.policies.get(kind), method, plain_mapping)
        except Fault:
            return {}

    def about(self, kind: Kind) -> dict[str, Any]:
        """What the policy in charge says of itself: version, policy API, documentation and parameters.

        Nothing of it where it cannot even say that.
        """
        with self.guard.armed():
            return {"version": "", "api": "", "doc": "", "params": [], **self._told(kind, "about")}

    def describe(self) -> dict[str, Any]:
        """The snapshot in plain values, for an exit record."""
        s = self._snapshot
        return {
            "step": s.step,
            "now": s.now,
            "blocks": s.blocks,
            "free": s.free,
            "free_cached": s.free_cached,
            "budget": s.budget,
            "left": s.left,
            "placed": s.placed,
            "running": len(s.running),
            "decoding": s.decoding,
            "waiting": len(s.waiting),
            "preempted": list(s.preempted),
        }
