"""Turns what a policy returned into plain values, or says what is wrong with it; runs inside the guard.

Nothing a policy made is kept: views become the core's own sequences, lazy iterables become lists that end,
numbers and texts are exactly of their type. What is wrong is raised as `Nonsense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvyard.core.guard import Nonsense
from kvyard.core.ledger import Ledger
from kvyard.core.lifecycle import QUEUED, State
from kvyard.core.sequence import NO_ROW, SequenceState
from kvyard.core.snapshot import CoreSnapshot, View
from kvyard.core.step import StepState
from kvyard.policy.base import OrderKey
from kvyard.policy.decisions import Admission, How, LinearKey, Phase, Requeue, Shape, Victims

MAX_PHASES = 16
WHOLE = -1
"""An entry's need when it names none: the whole current sequence."""
GENEROUS = 4
"""An upper bound may be generous. This many times what there is, it is no bound but a mistake."""


class PlainAdmission(NamedTuple):
    """An admission whose entries are the core's own sequences, each with the tokens it must be able to hold."""

    entries: list[tuple[SequenceState, int]] | None
    """None: the queue as it is when it is walked; refusals and a new order come before that."""
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


class Checks:
    """The checks that need to know the scheduler's state."""

    def __init__(self, ledger: Ledger, step: StepState, snapshot: CoreSnapshot) -> None:
        self._ledger = ledger
        self._step = step
        self._snapshot = snapshot
        self._pool = ledger.pool.blocks * ledger.block_size
        """Tokens that the whole pool holds."""
        self._shapes: set[Shape] = set()
        """Shapes known to be right: most policies have one or two."""

    def shape(self, value: Any) -> Shape:  # noqa: ANN401 - whatever a policy returned
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

    def constant(self, value: Any) -> Shape | None:  # noqa: ANN401 - whatever a policy declares
        return self.shape(value) if type(value) is Shape else None

    def prefill_traits(self, value: tuple[Any, Any]) -> tuple[Shape | None, bool]:
        shape, divide = value
        if divide is not None and not callable(divide):
            raise Nonsense("nonsense", "divide is a method or None")
        return self.constant(shape), divide is not None

    def lookahead(self, value: Any) -> int:  # noqa: ANN401 - whatever a policy declares
        most = self._ledger.limits.max_model_len
        if type(value) is not int or not 1 <= value <= most:
            raise Nonsense("nonsense", f"lookahead is 1 to {most} steps, not {value!r}")
        return value - 1

    def admission(self, value: Any) -> PlainAdmission:  # noqa: ANN401 - whatever a policy returned
        if type(value) is not Admission:
            raise Nonsense("not-a-decision", f"expected an Admission, got {type(value).__name__}")
        keep, skip, wake, refuse = value.keep, value.skip, value.wake, value.refuse
        if type(keep) is not int or keep < 0:
            raise Nonsense("nonsense", f"keep is a count, not {keep!r}")
        if type(skip) is not int or skip < 0:
            raise Nonsense("nonsense", f"skip is a count, not {skip!r}")
        if wake is not None and type(wake) is not int:
            raise Nonsense("nonsense", f"wake is a step or None, not {wake!r}")
        # By position: this runs in every step that may let somebody in.
        return PlainAdmission(
            self._entries(value),
            keep,
            bool(value.hold),
            skip,
            bool(value.evict),
            "" if value.reason is None else _text(value.reason),
            -1 if wake is None else wake,
            [] if type(refuse) is tuple and not refuse else self._refusals(refuse),
        )

    def _entries(self, value: Admission) -> list[tuple[SequenceState, int]] | None:
        if value.entries is self._snapshot.waiting:
            # The queue is the core's own: it may be walked lazily, only as far as places and tokens reach.
            return None
        places = self._ledger.max_running - (0 if value.evict else self._ledger.running)
        most = max(0, places) + value.skip + len(self._step.preempted) + 1
        entries = [self._entry(entry) for entry in islice(value.entries, most)]
        if len({seq for seq, _ in entries}) != len(entries):
            raise Nonsense("duplicate", "an entry is there twice")
        return entries

    def _entry(self, entry: Any) -> tuple[SequenceState, int]:  # noqa: ANN401 - whatever a policy returned
        if type(entry) is not tuple:
            return self._waiting(entry), WHOLE
        if len(entry) != 2 or type(entry[1]) is not int or entry[1] < 0:
            raise Nonsense("nonsense", "an entry is a request, or a request and a number of tokens")
        seq, need = self._waiting(entry[0]), entry[1]
        if need > GENEROUS * self._pool:
            text = f"sequence {seq.id} is promised room for {need} tokens, and the whole pool holds {self._pool}"
            raise Nonsense("over-committed", text)
        return seq, need

    def shares(self, value: Any, prompts: Sequence[View]) -> list[int]:  # noqa: ANN401 - whatever a policy returned
        count, budget = len(prompts), self._ledger.max_step_tokens
        given = list(islice(value, count + 1))
        if len(given) != count:
            raise Nonsense("nonsense", f"expected {count} shares, got {'more' if len(given) > count else len(given)}")
        most = GENEROUS * budget
        for share, prompt in zip(given, prompts, strict=True):
            if type(share) is not int or share < 0:
                raise Nonsense("nonsense", f"a share is a number of tokens, not {share!r}")
            if share > most and share > GENEROUS * (wanted := prompt.wanted):
                text = f"sequence {prompt.id} is granted {share} tokens, wants {wanted}, and a step has {budget}"
                raise Nonsense("over-budget", text)
        return given

    def _refusals(self, value: Any) -> list[tuple[SequenceState, str]]:  # noqa: ANN401
        out: dict[SequenceState, str] = {}
        for pair in islice(value, len(self._ledger.queue) + 1):
            if type(pair) is not tuple or len(pair) != 2:
                raise Nonsense("nonsense", "a refusal is a request and a text")
            seq = self._waiting(pair[0])
            if seq in out:
                raise Nonsense("duplicate", f"sequence {seq.id} is refused twice")
            out[seq] = _text(pair[1])
        return list(out.items())

    def _waiting(self, view: Any) -> SequenceState:  # noqa: ANN401 - whatever a policy returned
        seq = _sequence_of(view)
        if seq.state not in QUEUED:
            code = "finished" if seq.state is State.FINISHED else "not-waiting"
            raise Nonsense(code, f"sequence {seq.id} is {seq.state.value} and cannot be admitted")
        return seq

    def victims(self, value: Any) -> PlainVictims:  # noqa: ANN401 - whatever a policy returned
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


def admission_traits(value: tuple[Any, Any]) -> tuple[bool, LinearKey | None, bool]:
    """Whether it has an order of its own, that order where it is declared, and whether it evicts. Raises Nonsense."""
    key, evicts = value
    if type(key) is LinearKey:
        if not all(type(weight) in (int, float) and abs(weight) <= MAX_WEIGHT for weight in key):
            raise Nonsense("nonsense", f"the weights of a LinearKey are numbers up to {MAX_WEIGHT:g}, unlike {key}")
        return True, LinearKey(*map(float, key)), evicts is True
    if key is not None and not callable(key):
        raise Nonsense("nonsense", "key is a method, a LinearKey or None")
    return key is not None, None, evicts is True


MAX_WEIGHT = 1e100
"""Of a LinearKey: whatever it weighs, the sum is a number that can be compared."""


def linear_keys(weights: LinearKey, seqs: Sequence[SequenceState]) -> list[float]:
    """The keys of these by a declared order."""
    priority, arrived, prompt_len, max_new = weights
    return [
        priority * s.priority + arrived * s.arrived + prompt_len * s.prompt_len + max_new * s.max_new for s in seqs
    ]


def order_key(value: Any) -> OrderKey:  # noqa: ANN401 - whatever a policy returned
    if type(value) is not tuple:
        raise Nonsense("nonsense", f"an order key is a tuple of numbers, not {type(value).__name__}")
    for part in value:
        if type(part) not in (int, float) or part != part:
            raise Nonsense("nonsense", f"an order key is a tuple of numbers, not {part!r}")
    return value


def _text(value: Any) -> str:  # noqa: ANN401 - whatever a policy returned
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


TOLD_ENTRIES = 16
"""Sequences that a decision in an exit record names."""


def plain_decision(value: object) -> Any:  # noqa: ANN401 - plain JSON values
    """A checked decision as plain JSON values, for an exit record."""
    if isinstance(value, Shape):
        return {"groups": [[phase.value for phase in group] for group in value.groups], "prompts": value.prompts}
    if isinstance(value, PlainAdmission):
        told = {name: getattr(value, name) for name in ("keep", "hold", "skip", "evict", "reason", "wake")}
        entries = value.entries
        named = "the queue" if entries is None else [[seq.id, need] for seq, need in entries[:TOLD_ENTRIES]]
        return {**told, "entries": named, "refuse": [seq.id for seq, _ in value.refuse[:TOLD_ENTRIES]]}
    if isinstance(value, PlainVictims):
        return {**value._asdict(), "order": [seq.id for seq in value.order[:TOLD_ENTRIES]]}
    return value[:TOLD_ENTRIES] if isinstance(value, list | tuple) else str(value)[:200]
