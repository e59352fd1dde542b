"""A discipline by name, with changed parameters and single policies in place of its own: what the engine loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvyard.core.advice import PolicySet, builtin_set
from kvyard.policy import registry
from kvyard.policy.base import KINDS, Kind, Policy
from kvyard.policy.params import ParamError, PolicyParams, Value
from kvyard.policy.registry import RegistryError

Changes = Mapping[Kind, Mapping[str, Value]]


class Choice(NamedTuple):
    """What a text asks for."""

    name: str
    """The discipline."""
    changes: dict[Kind, dict[str, Value]]
    """Parameters by kind."""
    parts: dict[Kind, str]
    """Policies that stand in for the discipline's own, by kind."""


def names() -> list[str]:
    """Installed disciplines that can be used."""
    return [row.name for row in registry.list_policies().policies if row.kind == "discipline" and not row.problem]


def make(
    name: str, changes: Changes | None = None, parts: Mapping[Kind, str] | None = None, offered: Changes | None = None
) -> PolicySet:
    """The policies of a discipline. Raises RegistryError, ParamError.

    `changes` replaces parameters by kind, `parts` policies: those have their own defaults. `offered` holds values
    that a policy takes where it has a parameter of that name, and where `changes` does not set it.
    """
    parts = parts or {}
    bundle = _bundle(name, parts)
    policies: dict[Kind, Policy] = {}
    for kind, (part, values) in bundle.items():
        own = dict(values)
        policy = registry.load(kind, part, own).policy
        own |= {key: value for key, value in (offered or {}).get(kind, {}).items() if key in policy.params.specs}
        own |= (changes or {}).get(kind, {})
        policies[kind] = policy if own == dict(values) else _loaded(kind, part, own)
    discipline = name if not parts else None
    if name == "builtin":
        return builtin_set().replaced(policies, {kind: bundle[kind][0] for kind in bundle}, discipline)
    chosen: dict[str, Any] = {kind: policies[kind] for kind in KINDS}
    return PolicySet(**chosen, discipline=discipline, names={kind: bundle[kind][0] for kind in KINDS})


def _bundle(name: str, parts: Mapping[Kind, str]) -> dict[Kind, tuple[str, Mapping[str, Value]]]:
    """By kind the policy and its values; of `builtin` those that stand in for its own, which have no names."""
    own = {} if name == "builtin" else dict(registry.load_discipline(name).parts)
    own |= {kind: (part, {}) for kind, part in parts.items()}
    return own


def parse(text: str) -> Choice:
    """`NAME[,kind=POLICY...][,kind.parameter=value...]`. Raises RegistryError, ParamError."""
    name, *settings = text.split(",")
    texts: dict[Kind, dict[str, str]] = {}
    parts: dict[Kind, str] = {}
    for setting in settings:
        target, equals, value = setting.partition("=")
        kind, dot, parameter = target.strip().partition(".")
        if not equals or kind not in KINDS or not (parameter if dot else value.strip()):
            raise RegistryError(f"{setting!r} is no parameter and no policy; {_known(name, parts)}", "bad-params")
        if dot:
            texts.setdefault(kind, {})[parameter] = value.strip()
        else:
            parts[kind] = value.strip()
    if not texts:
        return Choice(name, {}, parts)
    bundle = _bundle(name, parts)
    lost = [kind for kind in texts if kind not in bundle]
    if lost:
        raise RegistryError(f"the {lost[0]} policy of {name} has no parameters", "bad-params")
    return Choice(name, {kind: _values(kind, bundle[kind][0], values) for kind, values in texts.items()}, parts)


def _known(name: str, parts: Mapping[Kind, str]) -> str:
    """What may be written behind a discipline's name, for who wrote something else."""
    found = [
        f"{kind}.{parameter}"
        for kind, (part, _) in _bundle(name, parts).items()
        for parameter in _params(kind, part).specs
    ]
    return f"write kind=POLICY or kind.parameter=value; {name} has {', '.join(found) or 'no parameters'}"


def _values(kind: Kind, part: str, texts: Mapping[str, str]) -> dict[str, Value]:
    try:
        values = _params(kind, part).parse(texts)
        _params(kind, part)(**values)
    except ParamError as error:
        raise ParamError(f"{kind} {part}: {error}") from error
    return values


def _loaded(kind: Kind, part: str, values: Mapping[str, Value]) -> Policy:
    try:
        return registry.load(kind, part, values).policy
    except ParamError as error:
        raise ParamError(f"{kind} {part}: {error}") from error


def _params(kind: Kind, name: str) -> type[PolicyParams]:
    return type(registry.load(kind, name).policy.params)
