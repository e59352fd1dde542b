"""Base classes of the three kinds of policy and of a discipline (docs/plugins.md).

Every method has a working default, so a policy overrides only what it is about. Policies advise and
the core disposes: an impossible decision is overridden and counted, a faulty policy is put out and
the built-in of its kind takes over in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, cast

from kvyard.policy.decisions import (
    RUNNING_FIRST,
    Admission,
    Cause,
    LinearKey,
    Shape,
    Victims,
)
from kvyard.policy.params import PolicyParams, Value
from kvyard.policy.snapshot import PolicyState, RequestView, Snapshot

API: tuple[int, int] = (1, 0)
"""Version of this interface: another major is refused, a lower or equal minor is accepted."""

Kind = Literal["admission", "preemption", "prefill"]
KINDS: tuple[Kind, ...] = ("admission", "preemption", "prefill")
BUILTIN = "builtin"
"""Name of the policy of each kind that takes over when another is put out; it cannot be removed."""
OrderKey = tuple[float, ...]
Divide = Callable[[Snapshot, Sequence[RequestView], int], Sequence[int]]
"""The form of `PrefillPolicy.divide`."""


class Policy:
    """What the three kinds have in common. Subclass one of the kinds, not this.

    `name` is what operators type; the entry point's name wins where both are given. `api` is the
    version the policy was written for. `doc` of the class is shown by `kvyard policy show`.
    """

    kind: ClassVar[Kind]
    name: ClassVar[str] = ""
    version: ClassVar[str] = ""
    api: ClassVar[tuple[int, int]] = API

    class Params(PolicyParams):
        """No parameters unless the policy declares its own."""

    def __init__(self, **values: Value) -> None:
        """Raises ParamError when a value is refused."""
        self.params: PolicyParams = self.Params(**values)

    def set_params(self, values: Mapping[str, Value]) -> None:
        """Change live parameters; called by the core at a step boundary. Raises ParamError."""
        self.params = self.params.changed(values)

    def adopt(self, views: Sequence[RequestView]) -> None:
        """Take over live requests before the policy is put in charge; called in slices of the whole.

        Raising refuses the swap with nothing changed.
        """

    def export_state(self) -> PolicyState | None:
        """State worth keeping over a restart of the engine, as plain JSON values with a version; or None."""
        return None

    def import_state(self, state: PolicyState) -> None:
        """Take up what `export_state` of the same policy (perhaps an older version) returned."""

    def dump(self) -> Mapping[str, Value]:
        """Private state for the operator's `dump` and for the exit record."""
        return {}


class AdmissionPolicy(Policy):
    """Who comes in, in which order."""

    kind: ClassVar[Kind] = "admission"
    evicts: ClassVar[bool] = False
    """Wants to be asked although all places are taken (it may return `evict=True`)."""
    key: Callable[[RequestView], OrderKey] | LinearKey | None = None
    """Order of the waiting queue, lower first; None is the order of arrival.

    Evaluated on arrival, on requeue and when parameters change, never per step: it must not depend on
    the time of the call. Aging is linear: `LinearKey(priority=1, arrived=rate)` needs no re-sorting, and asks nobody.
    """

    def admit(self, s: Snapshot) -> Admission:
        """Asked once per step when something waits, tokens are left and a place is free (or `evicts`)."""
        return Admission(s.waiting)


class PreemptionPolicy(Policy):
    """Who gives way when blocks are short."""

    kind: ClassVar[Kind] = "preemption"
    lookahead: ClassVar[int] = 1
    """Steps whose blocks must be there before a sequence's growth counts as fitting."""

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        """Asked once per phase, on the first shortage, for the whole order of preference.

        `short` blocks are missing for `who`; `cause` is `growth` (a running sequence) or `admission`
        (a waiting one that the admission policy allowed to evict).
        """
        return Victims(reversed(s.running)) if cause == "growth" else Victims(())


class PrefillPolicy(Policy):
    """How a step is made up of decodes and chunks of prompts."""

    kind: ClassVar[Kind] = "prefill"

    def shape(self, s: Snapshot) -> Shape:
        """Asked once at the start of a step."""
        return RUNNING_FIRST

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        """Most tokens for each of `prompts` in this step; the core cuts at what is left.

        `left` for each of them is right, and so is what each wants: together they may be more than a step has. More
        than four times the token budget and what the prompt wants is a fault (`over-budget`): for no bound, `left`.
        Called once for the running prompts of a phase, and once for each newcomer with that one view. A policy
        that cuts nothing, for the time being or ever, may have None in its place (a property that looks at
        the parameters, say): then each prompt takes what is left and the policy is not asked.
        """
        return [left] * len(prompts)


class Discipline:
    """A named bundle of one policy of each kind, with its parameters.

    Subclass it, or make one in the module that the entry point names. `parts` maps each kind to a
    policy's name and its parameters.
    """

    name: ClassVar[str] = ""
    doc: ClassVar[str] = ""
    api: ClassVar[tuple[int, int]] = API
    parts: ClassVar[Mapping[Kind, tuple[str, Mapping[str, Value]]]] = cast(
        "Mapping[Kind, tuple[str, Mapping[str, Value]]]", {}
    )
