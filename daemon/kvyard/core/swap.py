"""Changing policies while requests run: states, and what happens at each step boundary.

    adopting --> ordering --> done
        |            |
        +--> refused <+

A candidate first takes over the live requests in slices, then the queue's new order is built beside the old
one in slices, and then it is put in charge by assigning a pointer, which cannot fail. Until that moment the
old policy decides everything; whatever the candidate raises before refuses the change with nothing changed.
A small change is over within the call that begins it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvyard.core.advice import Advice
from kvyard.core.checks import plain_mapping
from kvyard.core.guard import Fault
from kvyard.core.ledger import Ledger
from kvyard.core.policy_set import PolicySet, Traits
from kvyard.core.queue import Reorder
from kvyard.core.sequence import SequenceState
from kvyard.policy.base import KINDS, Kind, Policy
from kvyard.policy.params import ParamError, Value

SLICE_NS = 500_000
"""Most time a change may take at one boundary."""
CHUNK = 64
"""Sequences handled between two looks at the clock."""


class SwapState(Enum):
    """How far a change of policies is."""

    ADOPTING = "adopting"
    ORDERING = "ordering"
    DONE = "done"
    REFUSED = "refused"


TRANSITIONS: Mapping[SwapState, frozenset[SwapState]] = {
    SwapState.ADOPTING: frozenset({SwapState.ORDERING, SwapState.REFUSED}),
    SwapState.ORDERING: frozenset({SwapState.DONE, SwapState.REFUSED}),
    SwapState.DONE: frozenset(),
    SwapState.REFUSED: frozenset(),
}
"""A shadow run has its place between ORDERING and DONE, where the candidate is complete and decides nothing yet;
probation between the commit and DONE, with `SwapTicket.previous` to go back to."""


class SwapBusy(RuntimeError):
    """Another change is under way; one at a time."""


@dataclass(slots=True)
class SwapTicket:
    """A change of policies under way or over; the engine answers the operator when it is `over`."""

    previous: PolicySet
    wanted: PolicySet
    state: SwapState = SwapState.ADOPTING
    code: str = ""
    error: str = ""
    trace: str = ""
    """Traceback of the candidate's fault, where there is one."""
    step: int = -1
    """The first step that the new policies decide."""
    changes: Mapping[Kind, Policy] = field(default_factory=dict)
    names: Mapping[Kind, str] = field(default_factory=dict)
    discipline: str | None = None
    kinds: Collection[Kind] = ()
    """Those whose policy, or its parameters, are changed."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """All parameters of the policy in charge, where one was changed."""

    @property
    def over(self) -> bool:
        """Done or refused."""
        return not TRANSITIONS[self.state]

    @property
    def ok(self) -> bool:
        """The new policies are in charge."""
        return self.state is SwapState.DONE

    @property
    def reorders(self) -> bool:
        """The order of the queue may change."""
        return "admission" in self.kinds

    def move(self, state: SwapState) -> None:
        """Go where the table says."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a change of policies cannot go from {self.state.value} to {state.value}")
        self.state = state


class Swapper:
    """Carries out one change at a time."""

    def __init__(self, advice: Advice, ledger: Ledger, clock_ns: Callable[[], int]) -> None:
        self._advice = advice
        self._ledger = ledger
        self._clock_ns = clock_ns
        self._ticket: SwapTicket | None = None
        self._traits: Traits | None = None
        self._adopt: list[tuple[Kind, Policy]] = []
        self._todo: list[SequenceState] = []
        self._seen = 0
        self._handed = True
        """The candidates have the state of those whose place they take."""
        self._order: Reorder | None = None

    @property
    def busy(self) -> bool:
        """A change is under way."""
        return self._ticket is not None

    def describe(self) -> dict[str, str]:
        """For the operator's dump."""
        ticket = self._ticket
        return {} if ticket is None else {"state": ticket.state.value, **{k: ticket.wanted.name(k) for k in KINDS}}

    def begin(self, changes: Mapping[Kind, Policy], names: Mapping[Kind, str], discipline: str | None) -> SwapTicket:
        """Begin a change and do its first slice. Raises SwapBusy, ValueError for a policy of the wrong kind."""
        if self._ticket is not None:
            raise SwapBusy("another change of policies is under way; try again when it is over")
        for kind, policy in changes.items():
            if kind not in KINDS or getattr(type(policy), "kind", None) != kind:
                raise ValueError(f"{type(policy).__name__} is no {kind} policy")
        old = self._advice.policies
        wanted = old.replaced(dict(changes), dict(names), discipline)
        ticket = SwapTicket(old, wanted, changes=changes, names=names, discipline=discipline, kinds=tuple(changes))
        self._ticket = ticket
        self._adopt = [(kind, policy) for kind, policy in changes.items() if type(policy).adopt is not Policy.adopt]
        self._todo, self._seen, self._handed = [], 0, False
        with self._advice.guard.armed():
            self.advance()
        return ticket

    def set_params(self, kind: Kind, values: Mapping[str, Value]) -> SwapTicket:
        """Change live parameters, and the queue's order with them. Raises ParamError, SwapBusy, Fault."""
        if self._ticket is not None:
            raise SwapBusy("another change of policies is under way; try again when it is over")
        advice = self._advice
        policy = advice.policies.get(kind)
        setting = _Setting(policy)
        with advice.guard.armed():
            try:
                params = advice.guard.call(kind, policy, "set_params", plain_mapping, dict(values), by=setting)
            except Fault as fault:
                advice.eject(fault)  # it may be half changed
                raise
            if setting.refused:
                raise ParamError(setting.refused[0])
            ticket = SwapTicket(advice.policies, advice.policies, kinds=(kind,), params=params)
            self._ticket, self._adopt, self._todo, self._seen, self._handed = ticket, [], [], 0, True
            self.advance()
        return ticket

    def advance(self) -> None:
        """One slice of the change under way, at a step boundary and with the guard armed."""
        ticket = self._ticket
        if ticket is None:
            return
        if self._gone(ticket):
            self._abandon(ticket, "", "it was put out before its new values were in force everywhere")
            return
        deadline = self._clock_ns() + SLICE_NS
        try:
            if not self._handed:
                self._handed = True
                self._hand_over(ticket)
            if ticket.state is SwapState.ADOPTING and self._adopted(deadline):
                self._traits = self._advice.read_traits(ticket.wanted, ticket.kinds)
                self._begin_order(ticket)
                ticket.move(SwapState.ORDERING)
            if self._order is not None and self._ledger.queue.reordering is not self._order:
                self._begin_order(ticket)  # an ejection in the meantime put the queue in another order
            if ticket.state is SwapState.ORDERING and self._ordered(ticket, deadline) and self._adopted(deadline):
                self._commit(ticket)
        except Fault as fault:
            self._refuse(ticket, fault)

    def _gone(self, ticket: SwapTicket) -> bool:
        """Whose parameters are changed was put out in the meantime, and nobody must be asked in its name."""
        in_charge = self._advice.policies
        return not ticket.changes and any(in_charge.get(kind) is not ticket.wanted.get(kind) for kind in ticket.kinds)

    def _hand_over(self, ticket: SwapTicket) -> None:
        """What a policy knows goes to what takes its place under the same name: another version, or the same anew."""
        guard, previous = self._advice.guard, ticket.previous
        for kind, policy in ticket.changes.items():
            if previous.name(kind) != ticket.wanted.name(kind) or type(policy).import_state is Policy.import_state:
                continue
            try:
                state = guard.call(kind, previous.get(kind), "export_state", plain_mapping)
            except Fault:
                continue  # it leaves; the candidate begins without
            if state:
                guard.call(kind, policy, "import_state", lambda value: None, dict(state))

    def _adopted(self, deadline: int) -> bool:
        """Show the candidates the live requests, those that came in the meantime too; True when all are shown."""
        if not self._adopt:
            return True
        self._add_newcomers()
        live = self._ledger.sequences
        while self._seen < len(self._todo):
            part = self._todo[self._seen : self._seen + CHUNK]
            views = [self._ledger.view(seq) for seq in part if seq.id in live]
            for kind, policy in self._adopt:
                self._advice.guard.call(kind, policy, "adopt", lambda value: None, views)
            self._seen += len(part)
            if self._clock_ns() >= deadline:
                return self._seen == len(self._todo)
        return True

    def _add_newcomers(self) -> None:
        """Sequences stand in the order of their arrival, so the new ones are those at the end."""
        last = self._todo[-1] if self._todo else None
        fresh: list[SequenceState] = []
        for seq in reversed(self._ledger.sequences.values()):
            if last is not None and seq.number <= last.number:
                break
            fresh.append(seq)
        self._todo += reversed(fresh)

    def _begin_order(self, ticket: SwapTicket) -> None:
        self._order = None
        if ticket.reorders:
            self._ledger.queue.settle()
            assert self._traits is not None
            policy = ticket.wanted.admission
            self._order = self._ledger.queue.reorder(self._advice.order_of(policy, self._traits))

    def _ordered(self, ticket: SwapTicket, deadline: int) -> bool:
        order = self._order
        while order is not None and not order.complete:
            order.advance(CHUNK)
            if order.fault is not None:
                raise order.fault
            if self._clock_ns() >= deadline:
                break
        if order is None or not order.complete:
            return order is None
        if order.keys_of is not None:
            self._advice.guard.examine("admission", ticket.wanted.admission)
        return True

    def _commit(self, ticket: SwapTicket) -> None:
        assert self._traits is not None
        if ticket.changes:  # on top of whatever is in charge now: a part may have been put out in the meantime
            ticket.wanted = self._advice.policies.replaced(
                dict(ticket.changes), dict(ticket.names), ticket.discipline
            )
        else:
            ticket.wanted = self._advice.policies
        self._advice.install(ticket.wanted, self._advice.traits.with_those_of(ticket.kinds, self._traits))
        if self._order is not None:
            self._order.keys_of = self._advice.order(self._traits)
            self._ledger.queue.adopt(self._order)
            self._advice.order_changed = False
        ticket.step = self._ledger.step
        ticket.move(SwapState.DONE)
        self._clear()

    def _refuse(self, ticket: SwapTicket, fault: Fault) -> None:
        """The candidate failed before it was in charge: the old ones stay."""
        if not ticket.changes:  # new parameters broke the policy in charge
            self._advice.eject(fault)
        ticket.trace = fault.trace
        self._abandon(ticket, fault.code, fault.message)

    def _abandon(self, ticket: SwapTicket, code: str, error: str) -> None:
        self._ledger.queue.abandon_reorder()
        ticket.code, ticket.error = code, error
        ticket.move(SwapState.REFUSED)
        self._clear()

    def _clear(self) -> None:
        self._ticket = self._traits = self._order = None
        self._adopt, self._todo, self._seen = [], [], 0


class _Setting:
    """Sets a policy's parameters, and takes down why it refuses them, which is no failure of the policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.refused: list[str] = []

    def set_params(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """The policy's own method, and all its parameters then.

        A ParamError stays here: its frames hold what the policy left there.
        """
        try:
            self._policy.set_params(values)
        except ParamError as error:
            self.refused.append(str(error))
        return self._policy.params.values()
