"""The policies in charge, and their answers as plain values that the planner can rely on.

Each method here returns a usable decision whatever the policy does: a policy that fails is put out and the
built-in of its kind answers in its place, within the same call. A policy that belongs to a discipline takes
the whole discipline with it, since its parts were chosen for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

from kvyard.core.builtin import BuiltinAdmission, BuiltinPreemption, BuiltinPrefill
from kvyard.core.guard import Fault, Guard, Nonsense
from kvyard.core.ledger import Ledger
from kvyard.core.lifecycle import QUEUED, State
from kvyard.core.sequence import NO_ROW, SequenceState
from kvyard.core.snapshot import CoreSnapshot, View
from kvyard.core.step import StepState
from kvyard.policy.base import KINDS, AdmissionPolicy, Kind, OrderKey, Policy, PreemptionPolicy, PrefillPolicy
from kvyard.policy.decisions import Admission, Cause, How, Phase, Requeue, Shape, Victims

T = TypeVar("T")
MAX_PHASES = 16
WHOLE = -1
"""An entry's need when it names none: the whole current sequence."""


@dataclass(slots=True)
class PolicySet:
    """One policy of each kind. `discipline` names the bundle they belong to, None when mixed."""

    admission: AdmissionPolicy
    preemption: PreemptionPolicy
    prefill: PrefillPolicy
    discipline: str | None = None
    names: dict[Kind, str] = field(default_factory=dict)
    """What operators call each; the class's own name where it is not given."""

    def get(self, kind: Kind) -> Policy:
        """The policy of that kind."""
        return cast(Policy, getattr(self, kind))

    def name(self, kind: Kind) -> str:
        """What operators call the policy of that kind."""
        policy = self.get(kind)
        return self.names.get(kind) or policy.name or type(policy).__name__

    def replaced(self, changes: dict[Kind, Policy], names: dict[Kind, str], discipline: str | None) -> PolicySet:
        """A new set with some policies replaced."""
        parts = {kind: changes.get(kind, self.get(kind)) for kind in KINDS}
        known = {kind: names.get(kind, "") if kind in changes else self.name(kind) for kind in KINDS}
        return PolicySet(**cast("dict[str, Any]", parts), discipline=discipline, names=known)


def builtin_set() -> PolicySet:
    """The built-in policy of each kind."""
    return PolicySet(BuiltinAdmission(), BuiltinPreemption(), BuiltinPrefill(), discipline="builtin")


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
    with_it: tuple[str, ...] = ()
    """`kind/name` of the other parts of its discipline, which went with it."""


class Traits(NamedTuple):
    """What the policies in charge declare once instead of deciding in every step."""

    keyed: bool
    """The admission policy has an order of its own."""
    evicts: bool
    """It wants to be asked although all places are taken."""
    lookahead: int
    """Steps beyond this one whose blocks must be there before growth counts as fitting."""
    shape: Shape | None
    """The shape of every step, where the prefill policy has a constant instead of a method."""


class _Traits(Policy):
    """Reads a policy's declarations as a call, since they may be properties and so the policy's code."""

    def __init__(self, policy: Any) -> None:  # noqa: ANN401 - one of the three kinds
        self._policy = policy

    def admission(self) -> tuple[Any, Any]:
        """Key and `evicts`."""
        return self._policy.key, self._policy.evicts

    def preemption(self) -> Any:  # noqa: ANN401 - whatever the policy declares
        """`lookahead`."""
        return self._policy.lookahead

    def parameters(self) -> Any:  # noqa: ANN401 - whatever the policy declares
        """Parameter values."""
        return self._policy.params.values()

    def prefill(self) -> Any:  # noqa: ANN401 - whatever the policy declares
        """A constant shape, or the method."""
        return self._policy.shape


class PlainAdmission(NamedTuple):
    """An admission whose entries are the core's own sequences, each with the tokens it must be able to hold."""

    entries: Iterable[tuple[SequenceState, int]]
    keep: int
    hold: bool
    skip: int
    evict: bool
    reason: str
    wake: int
    refuse: list[tuple[SequenceState, str]]


class PlainVictims(NamedTuple):
    """An order of victims as the core's own sequences."""

    order: list[SequenceState]
    how: How
    requeue: Requeue
    self_ends: bool


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
        self._shapes: set[Shape] = set()
        self._last_shape: Shape | None = None
        self._last_admission: PlainAdmission | None = None
        self._last_victims: PlainVictims | None = None
        self.traits = self.read_traits(policies)

    # ---- the calls ------------------------------------------------------------------------------------------

    def shape(self) -> Shape:
        """The phases of this step."""
        constant = self.traits.shape
        shape = constant if constant is not None else self._ask("prefill", "shape", self._check_shape, self._snapshot)
        self._last_shape = shape
        return shape

    def divide(self, prompts: Sequence[View], left: int) -> list[int]:
        """Most tokens for each of `prompts`."""
        count = len(prompts)
        return self._ask(
            "prefill", "divide", lambda value: _check_shares(value, count), self._snapshot, prompts, left
        )

    def admit(self) -> PlainAdmission:
        """Who may come in."""
        self._last_admission = self._ask("admission", "admit", self._check_admission, self._snapshot)
        return self._last_admission

    def victims(self, short: int, who: SequenceState, cause: Cause) -> PlainVictims:
        """Whom to preempt for `who`, who lacks `short` blocks."""
        check = self._check_victims
        self._last_victims = self._ask("preemption", "victims", check, self._snapshot, short, who.view, cause)
        return self._last_victims

    def key(self, seq: SequenceState) -> OrderKey:
        """Where `seq` waits. Only where the policy has a key."""
        return self._ask("admission", "key", _check_key, seq.view)

    def _ask(self, kind: Kind, method: str, check: Callable[[Any], T], *args: object) -> T:
        try:
            return self.guard.call(kind, self.policies.get(kind), method, check, *args)
        except Fault as fault:
            self.eject(fault)
            return check(getattr(self.policies.get(kind), method)(*args))

    def key_of(self, policy: AdmissionPolicy) -> Callable[[SequenceState], OrderKey]:
        """The key of a candidate that is not in charge; what it raises is a Fault and puts nobody out."""
        return lambda seq: self.guard.call("admission", policy, "key", _check_key, seq.view)

    def dump(self) -> dict[str, Any]:
        """Names, parameters and private state of the policies in charge."""
        return {
            kind: {
                "name": self.policies.name(kind),
                "params": self._last_words(kind, _Traits(self.policies.get(kind)), "parameters"),
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
            "queue_order": "key" if self.traits.keyed else "arrival",
            "admission_may_evict": self.traits.evicts,
            "lookahead_steps": self.traits.lookahead + 1,
            "phases": shape and [[phase.value for phase in group] for group in shape.groups],
            "prompt_tokens_per_step": shape and shape.prompts,
            "reserve_blocks": admission and admission.keep,
            "holds_promises": admission and admission.hold,
            "may_skip": admission and admission.skip,
            "victims_way": victims and victims.how,
            "victims_requeue": victims and victims.requeue,
        }

    def install(self, policies: PolicySet, traits: Traits) -> None:
        """Put others in charge; a pointer swap that cannot fail."""
        changed = [kind for kind in KINDS if policies.get(kind) is not self.policies.get(kind)]
        self.policies, self.traits = policies, traits
        self._last_shape = self._last_admission = self._last_victims = None
        for kind in changed:
            self.guard.forgive(kind)

    def read_traits(self, policies: PolicySet) -> Traits:
        """What the policies declare rather than decide, read once. Raises Fault."""
        call = self.guard.call
        keyed, evicts = call("admission", _Traits(policies.admission), "admission", _check_admission_traits)
        lookahead = call("preemption", _Traits(policies.preemption), "preemption", self._check_lookahead)
        shape = call("prefill", _Traits(policies.prefill), "prefill", self._check_constant)
        return Traits(keyed, evicts, lookahead, shape)

    # ---- putting out ----------------------------------------------------------------------------------------

    def eject(self, fault: Fault) -> None:
        """Put the policy out, and its whole discipline; the built-ins are in charge from now on."""
        old = self.policies
        fresh = builtin_set()
        gone: tuple[Kind, ...] = KINDS if old.discipline is not None else (fault.kind,)
        changes = {kind: fresh.get(kind) for kind in gone}
        whole = "builtin" if len(gone) == len(KINDS) else None
        self.policies = old.replaced(changes, {}, whole)
        self.traits = self.read_traits(self.policies)
        self.exits.append(self._exit_of(fault, old, gone))
        for kind in gone:
            self.guard.forgive(kind)
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
            with_it=tuple(f"{kind}/{old.name(kind)}" for kind in gone if kind != fault.kind),
        )

    def _last_words(self, kind: Kind, policy: Policy, method: str) -> dict[str, Any]:
        """What a policy that was put out has to say; nothing if even that fails."""
        try:
            return self.guard.call(kind, policy, method, plain_mapping)
        except Fault:
            return {}

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

    # ---- checks: each turns a decision into plain values, inside the guard ------------------------------------

    def _check_shape(self, value: Any) -> Shape:  # noqa: ANN401 - whatever a policy returned
        if type(value) is not Shape:
            raise Nonsense("not-a-decision", f"expected a Shape, got {type(value).__name__}")
        try:
            if value in self._shapes:
                return value
        except TypeError:
            raise Nonsense("nonsense", "the groups of a Shape are tuples of phases") from None
        if type(value.groups) is not tuple or any(type(group) is not tuple for group in value.groups):
            raise Nonsense("nonsense", "the groups of a Shape are tuples of phases")
        phases = [phase for group in value.groups for phase in group]
        if not phases or len(phases) > MAX_PHASES or any(type(phase) is not Phase for phase in phases):
            raise Nonsense("nonsense", f"a Shape has 1 to {MAX_PHASES} phases")
        if value.prompts is not None and (type(value.prompts) is not int or value.prompts < 0):
            raise Nonsense("nonsense", f"prompts is a number of tokens or None, not {value.prompts!r}")
        if len(self._shapes) > 256:
            self._shapes.clear()
        self._shapes.add(value)
        return value

    def _check_constant(self, value: Any) -> Shape | None:  # noqa: ANN401 - whatever a policy declares
        return self._check_shape(value) if type(value) is Shape else None

    def _check_lookahead(self, value: Any) -> int:  # noqa: ANN401 - whatever a policy declares
        most = self._ledger.limits.max_model_len
        if type(value) is not int or not 1 <= value <= most:
            raise Nonsense("nonsense", f"lookahead is 1 to {most} steps, not {value!r}")
        return value - 1

    def _check_admission(self, value: Any) -> PlainAdmission:  # noqa: ANN401 - whatever a policy returned
        if type(value) is not Admission:
            raise Nonsense("not-a-decision", f"expected an Admission, got {type(value).__name__}")
        for name, number in (("keep", value.keep), ("skip", value.skip)):
            if type(number) is not int or number < 0:
                raise Nonsense("nonsense", f"{name} is a count, not {number!r}")
        if value.wake is not None and type(value.wake) is not int:
            raise Nonsense("nonsense", f"wake is a step or None, not {value.wake!r}")
        return PlainAdmission(
            entries=self._check_entries(value),
            keep=value.keep,
            hold=bool(value.hold),
            skip=value.skip,
            evict=bool(value.evict),
            reason=_check_text(value.reason) if value.reason is not None else "",
            wake=-1 if value.wake is None else value.wake,
            refuse=self._check_refusals(value.refuse),
        )

    def _check_entries(self, value: Admission) -> Iterable[tuple[SequenceState, int]]:
        if value.entries is self._snapshot.waiting:
            # The queue is the core's own: it may be walked lazily, only as far as places and tokens reach.
            return ((seq, WHOLE) for seq in self._ledger.queue)
        places = self._ledger.max_running - (0 if value.evict else self._ledger.running)
        most = max(0, places) + value.skip + len(self._step.preempted) + 1
        entries = [self._check_entry(entry) for entry in islice(value.entries, most)]
        if len({seq for seq, _ in entries}) != len(entries):
            raise Nonsense("duplicate", "an entry is there twice")
        return entries

    def _check_entry(self, entry: Any) -> tuple[SequenceState, int]:  # noqa: ANN401 - whatever a policy returned
        if type(entry) is not tuple:
            return self._waiting(entry), WHOLE
        if len(entry) != 2 or type(entry[1]) is not int or entry[1] < 0:
            raise Nonsense("nonsense", "an entry is a request, or a request and a number of tokens")
        return self._waiting(entry[0]), entry[1]

    def _check_refusals(self, value: Any) -> list[tuple[SequenceState, str]]:  # noqa: ANN401
        out: dict[SequenceState, str] = {}
        for pair in islice(value, len(self._ledger.queue) + 1):
            if type(pair) is not tuple or len(pair) != 2:
                raise Nonsense("nonsense", "a refusal is a request and a text")
            seq = self._waiting(pair[0])
            if seq in out:
                raise Nonsense("duplicate", f"sequence {seq.id} is refused twice")
            out[seq] = _check_text(pair[1])
        return list(out.items())

    def _waiting(self, view: Any) -> SequenceState:  # noqa: ANN401 - whatever a policy returned
        seq = _sequence_of(view)
        if seq.state not in QUEUED:
            code = "finished" if seq.state is State.FINISHED else "not-waiting"
            raise Nonsense(code, f"sequence {seq.id} is {seq.state.value} and cannot be admitted")
        return seq

    def _check_victims(self, value: Any) -> PlainVictims:  # noqa: ANN401 - whatever a policy returned
        if type(value) is not Victims:
            raise Nonsense("not-a-decision", f"expected Victims, got {type(value).__name__}")
        if value.how not in ("recompute", "swap") or value.requeue not in ("front", "tail"):
            raise Nonsense("nonsense", f"there is no way {value.how!r} or place {value.requeue!r}")
        order = [_sequence_of(view) for view in islice(value.order, self._ledger.running + 1)]
        if len(set(order)) != len(order):
            raise Nonsense("duplicate", "a victim is there twice")
        for seq in order:
            if seq.row == NO_ROW:
                code = "finished" if seq.state is State.FINISHED else "not-running"
                raise Nonsense(code, f"sequence {seq.id} is {seq.state.value} and cannot be preempted")
        return PlainVictims(order, value.how, value.requeue, bool(value.self_ends))


def _sequence_of(view: Any) -> SequenceState:  # noqa: ANN401 - whatever a policy returned
    if type(view) is not View:
        raise Nonsense("unknown", f"expected a request from the snapshot, got {type(view).__name__}")
    return view._seq


def _check_admission_traits(value: tuple[Any, Any]) -> tuple[bool, bool]:
    key, evicts = value
    if key is not None and not callable(key):
        raise Nonsense("nonsense", "key is a method or None")
    return key is not None, evicts is True


def _check_shares(value: Any, count: int) -> list[int]:  # noqa: ANN401 - whatever a policy returned
    shares = list(islice(value, count + 1))
    if len(shares) != count:
        raise Nonsense("nonsense", f"expected {count} shares, got {'more' if len(shares) > count else len(shares)}")
    for share in shares:
        if type(share) is not int or share < 0:
            raise Nonsense("nonsense", f"a share is a number of tokens, not {share!r}")
    return shares


def _check_key(value: Any) -> OrderKey:  # noqa: ANN401 - whatever a policy returned
    if type(value) is not tuple:
        raise Nonsense("nonsense", f"an order key is a tuple of numbers, not {type(value).__name__}")
    for part in value:
        if type(part) not in (int, float) or part != part:
            raise Nonsense("nonsense", f"an order key is a tuple of numbers, not {part!r}")
    return value


def _check_text(value: Any) -> str:  # noqa: ANN401 - whatever a policy returned
    if type(value) is not str:
        raise Nonsense("nonsense", f"a reason is a text, not {type(value).__name__}")
    return value[:200]


def plain_mapping(value: Any, depth: int = 4) -> dict[str, Any]:  # noqa: ANN401 - whatever a policy returned
    """A mapping as plain JSON values, bounded in depth and size; None is empty. Raises Nonsense."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Nonsense("nonsense", f"expected a dictionary, got {type(value).__name__}")
    return {str(name)[:100]: _plain(item, depth) for name, item in islice(value.items(), 1000)}


def _plain(value: Any, depth: int) -> Any:  # noqa: ANN401 - plain JSON values
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > 0 and isinstance(value, dict):
        return plain_mapping(value, depth - 1)
    if depth > 0 and isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in islice(value, 1000)]
    return str(value)[:200]
