"""Policies as the engine loads them: by name through the registry, never one that is in quarantine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import structlog

from kvyard import __version__
from kvyard.core import builtin
from kvyard.core.advice import PolicySet, builtin_set
from kvyard.core.policy_set import Declarations
from kvyard.policy import registry
from kvyard.policy.base import BUILTIN, KINDS, Kind, Policy
from kvyard.policy.params import ParamError
from kvyard.policy.registry import RegistryError

log = structlog.get_logger(__name__)

KEPT_NAMES = 16
"""Policies made lately whose names are known: those in charge and a candidate's."""
Candidate = tuple[dict[Kind, Policy], dict[Kind, str], str | None]
"""Policies by kind, their names, and the discipline they are."""


class Quarantined(RegistryError):
    """A policy was put out and may not be loaded yet; its code is `quarantined`."""

    def __init__(self, policy: str) -> None:
        """`policy` is `kind/name`."""
        text = f"{policy} is in quarantine; `kvyard policy release {policy}` lets it be loaded again"
        super().__init__(text, "quarantined")
        self.policy = policy


def _unwatched(label: str) -> AbstractContextManager[None]:
    return nullcontext()


class Loader:
    """Makes policy objects; knows which distribution each loaded name came from."""

    def __init__(self, watch: Callable[[str], AbstractContextManager[None]] = _unwatched) -> None:
        """`watch(kind/name)` is entered while a plugin is imported or constructed, for whoever looks on."""
        self._watch = watch
        self.origins: dict[str, tuple[str, str]] = {}
        """`kind/name` to distribution and version."""
        self._made: list[tuple[weakref.ref[Policy], str, str]] = []
        """Policies, their `kind/name`, and the version of the distribution that each was made from."""
        self.notes: list[str] = []
        """What could not be used as asked at the start, and what was taken instead."""

    def candidate(self, kind: str, name: str, params: Mapping[str, Any], blocked: Collection[str]) -> Candidate:
        """A policy or a whole discipline, ready to be swapped in. Raises RegistryError, ParamError."""
        if kind == "discipline":
            return self._discipline(name, params, blocked)
        if kind not in KINDS:
            raise RegistryError(f"{kind!r} is no kind of policy; one of discipline, {', '.join(KINDS)}")
        return {kind: self._one(kind, name, params, blocked)}, {kind: name}, None

    def _discipline(self, name: str, params: Mapping[str, Any], blocked: Collection[str]) -> Candidate:
        if name == BUILTIN:
            return {kind: builtin.BUILTIN[kind]() for kind in KINDS}, dict.fromkeys(KINDS, BUILTIN), BUILTIN
        _check_free("discipline", name, blocked)
        with self._watch(f"discipline/{name}"):
            parts = registry.load_discipline(name).parts
        given = _by_kind(params)
        changes: dict[Kind, Policy] = {}
        names: dict[Kind, str] = {}
        for kind in KINDS:
            part, values = parts[kind]
            own = {**values, **given.get(kind, {})}
            changes[kind], names[kind] = self._one(kind, part, own, blocked), part
        return changes, names, name

    def _one(self, kind: Kind, name: str, params: Mapping[str, Any], blocked: Collection[str]) -> Policy:
        _check_free(kind, name, blocked)
        if name == BUILTIN:
            return builtin.BUILTIN[kind](**params)
        with self._watch(f"{kind}/{name}"):
            loaded = registry.load(kind, name, dict(params))
        self.origins[f"{kind}/{name}"] = (loaded.distribution, loaded.version)
        # Weak: the end of a policy may run code of its own, and is for the guard to bring about.
        self._made = [*self._made[-KEPT_NAMES:], (weakref.ref(loaded.policy), f"{kind}/{name}", loaded.version)]
        return loaded.policy

    def label(self, kind: Kind, policy: Policy) -> str:
        """`kind/name` as operators know the policy. By identity: its own `__eq__` would run outside the guard."""
        for made, label, _ in reversed(self._made):
            if made() is policy:
                return label
        return f"{kind}/{policy.name or type(policy).__name__}"

    def version(self, policy: Policy) -> str:
        """The version of the distribution that the policy was made from, empty when it is not known any more."""
        return next((version for made, _, version in reversed(self._made) if made() is policy), "")

    def at_start(
        self,
        discipline: str,
        parts: Mapping[str, tuple[str, dict[str, Any]]],
        blocked: Collection[str],
        *,
        again: bool = False,
    ) -> PolicySet:
        """The policies a new engine begins with. Raises RegistryError when the discipline cannot be used.

        A part that was in charge before a restart, or a discipline (`again`), and cannot be loaded now is
        replaced by the built-in, with a line in the log: an engine that served must come up again.
        """
        params = parts["discipline"][1] if "discipline" in parts else {}
        policies = self._set_of(discipline, params, blocked, again)
        for kind in KINDS:
            if kind not in parts:
                continue
            name, params = parts[kind]
            try:
                policy = self._one(kind, name, params, blocked)
            except Exception as error:
                log.error("policy.unusable", kind=kind, name=name, problem=str(error))
                policy, name = builtin.BUILTIN[kind](), BUILTIN
            policies = policies.replaced({kind: policy}, {kind: name}, None)
        return policies

    def _set_of(self, discipline: str, params: Mapping[str, Any], blocked: Collection[str], again: bool) -> PolicySet:
        """Raises RegistryError, ParamError at a first start, unless a part in quarantine is in the way."""
        try:
            changes, names, name = self.candidate("discipline", discipline, params, blocked)
        except (RegistryError, ParamError) as error:
            if not again and not _part_blocked(discipline, blocked):
                raise
            self.notes.append(f"the discipline {discipline} cannot be used: {error}")
            return builtin_set()
        return builtin_set().replaced(changes, names, name)


def _check_free(kind: str, name: str, blocked: Collection[str]) -> None:
    """Raises Quarantined."""
    if f"{kind}/{name}" in blocked:
        raise Quarantined(f"{kind}/{name}")


def _part_blocked(discipline: str, blocked: Collection[str]) -> bool:
    if f"discipline/{discipline}" in blocked:  # importing it is what must not happen
        return True
    try:
        parts = registry.load_discipline(discipline).parts
    except RegistryError:
        return False
    return any(f"{kind}/{part}" in blocked for kind, (part, _) in parts.items())


def _by_kind(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A discipline's parameters, `{kind: {name: value}}` or `{"kind.name": value}`. Raises ParamError."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in params.items():
        kind, _, name = key.partition(".")
        if kind not in KINDS or bool(name) == isinstance(value, Mapping):
            raise ParamError(
                f"a discipline has no parameter {key!r}: name the kind as in admission.{name or key}=..., "
                f"kinds are {', '.join(KINDS)}"
            )
        found.setdefault(kind, {}).update({name: value} if name else value)
    return found


def describe_policy(
    kind: Kind, name: str, policy: Policy, about: Mapping[str, Any], loader: Loader
) -> dict[str, Any]:
    """What `policy show` says of a policy in charge; `about` is what it says of itself (`Declarations.about`)."""
    distribution, version = loader.origins.get(f"{kind}/{name}", ("kvyard", __version__))
    return {
        "kind": kind,
        "name": name,
        "distribution": distribution,
        "installed": loader.version(policy),
        **about,
        "version": about["version"] or version,
    }


def describe_builtin(kind: str, loader: Loader) -> dict[str, Any]:
    """What `policy show` says of a built-in, or of the discipline of all three, in charge or not."""
    if kind != "discipline":
        which = cast(Kind, kind)
        policy = builtin.BUILTIN[which]()
        return describe_policy(which, BUILTIN, policy, Declarations(policy).about(), loader)
    part = {"name": BUILTIN, "params": {}, "parameters": []}
    doc = "The policies that take over when others are put out; they cannot be removed."
    parts = {each: dict(part) for each in KINDS}
    return {
        "kind": kind, "name": BUILTIN, "distribution": "kvyard", "version": __version__, "doc": doc, "parts": parts,
    }  # fmt: skip
