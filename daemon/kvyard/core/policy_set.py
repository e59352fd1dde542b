"""The policies in charge as one value, and what they declare once instead of deciding in every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from kvyard.core.builtin import BuiltinAdmission, BuiltinPreemption, BuiltinPrefill
from kvyard.policy.base import KINDS, AdmissionPolicy, Kind, Policy, PreemptionPolicy, PrefillPolicy
from kvyard.policy.decisions import RUNNING_FIRST, LinearKey, Shape


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


class Traits(NamedTuple):
    """What the policies in charge declare once instead of deciding in every step."""

    keyed: bool = False
    """The admission policy has an order of its own."""
    linear: LinearKey | None = None
    """That order, where the policy has a constant instead of a method."""
    evicts: bool = False
    """It wants to be asked although all places are taken."""
    lookahead: int = 0
    """Steps beyond this one whose blocks must be there before growth counts as fitting."""
    shape: Shape | None = None
    """The shape of every step, where the prefill policy has a constant instead of a method."""
    divides: bool = False
    """The prefill policy cuts prompts; otherwise each takes what is left."""

    def with_those_of(self, kinds: Collection[Kind], others: Traits) -> Traits:
        """What the policies of `kinds` declare is taken from `others`."""
        return self._replace(**{name: getattr(others, name) for kind in kinds for name in DECLARED[kind]})


DECLARED: Mapping[Kind, tuple[str, ...]] = {
    "admission": ("keyed", "linear", "evicts"),
    "preemption": ("lookahead",),
    "prefill": ("shape", "divides"),
}
"""The traits of each kind."""


class Declarations:
    """Reads a policy's declarations as a call, since they may be properties and so the policy's code."""

    def __init__(self, policy: Any) -> None:  # noqa: ANN401 - one of the three kinds
        self._policy = policy

    def key_and_evicts(self) -> tuple[Any, Any]:
        """Key and `evicts`."""
        return self._policy.key, self._policy.evicts

    def lookahead(self) -> Any:  # noqa: ANN401 - whatever the policy declares
        """`lookahead`."""
        return self._policy.lookahead

    def parameters(self) -> Any:  # noqa: ANN401 - whatever the policy declares
        """Parameter values."""
        return self._policy.params.values()

    def about(self) -> dict[str, Any]:
        """What operators are told of it."""
        policy = self._policy
        return {
            "version": policy.version,
            "api": ".".join(map(str, policy.api)),
            "doc": (type(policy).__doc__ or "").strip(),
            "params": policy.params.describe(),
        }

    def shape_and_divide(self) -> tuple[Any, Any]:
        """A constant shape, or the method; and the method that divides, or None."""
        policy = self._policy
        shape = RUNNING_FIRST if type(policy).shape is PrefillPolicy.shape else policy.shape
        return shape, None if type(policy).divide is PrefillPolicy.divide else policy.divide
