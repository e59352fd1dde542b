"""A discipline by name, with changed parameters: the same policy objects that the engine loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvyard.core.advice import PolicySet, builtin_set
from kvyard.policy import registry
from kvyard.policy.base import KINDS, Kind
from kvyard.policy.params import PolicyParams, Value
from kvyard.policy.registry import RegistryError

Changes = Mapping[Kind, Mapping[str, Value]]


def names() -> list[str]:
    """Installed disciplines that can be used."""
    return [row.name for row in registry.list_policies().policies if row.kind == "discipline" and not row.problem]


def make(name: str, changes: Changes | None = None, offered: Changes | None = None) -> PolicySet:
    """The policies of a discipline. Raises RegistryError, ParamError.

    `changes` replaces parameters by kind. `offered` holds values that a policy takes where it has a parameter of
    that name, and where `changes` does not set it.
    """
    if name == "builtin":
        return builtin_set()
    parts = registry.load_discipline(name).parts
    policies: dict[str, Any] = {}
    for kind in KINDS:
        part, values = parts[kind]
        own = dict(values)
        policy = registry.load(kind, part, own).policy
        own |= {key: value for key, value in (offered or {}).get(kind, {}).items() if key in policy.params.specs}
        own |= (changes or {}).get(kind, {})
        policies[kind] = policy if own == dict(values) else registry.load(kind, part, own).policy
    return PolicySet(**policies, discipline=name, names={kind: parts[kind][0] for kind in KINDS})


def parse(text: str) -> tuple[str, dict[Kind, dict[str, Value]]]:
    """`NAME`, or `NAME,kind.parameter=value,...`. Raises RegistryError, ParamError."""
    name, *settings = text.split(",")
    texts: dict[Kind, dict[str, str]] = {}
    for setting in settings:
        target, equals, value = setting.partition("=")
        kind, dot, parameter = target.strip().partition(".")
        if not (equals and dot) or kind not in KINDS:
            raise RegistryError(f"{setting!r} is no parameter; write {'|'.join(KINDS)}.name=value", "bad-params")
        texts.setdefault(kind, {})[parameter] = value.strip()
    if not texts:
        return name, {}
    parts = registry.load_discipline(name).parts
    return name, {kind: _params(kind, parts[kind][0]).parse(values) for kind, values in texts.items()}


def _params(kind: Kind, name: str) -> type[PolicyParams]:
    return type(registry.load(kind, name).policy.params)
