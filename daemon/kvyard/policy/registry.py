"""Installed policies and disciplines: list them without importing any, load one when it is wanted.

Built-in policies are found exactly as third-party ones are. Whatever a plugin does wrong ends in a
`RegistryError` that names it; it never hides or harms another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvyard.policy.base import API, KINDS, AdmissionPolicy, Discipline, Kind, Policy, PreemptionPolicy, PrefillPolicy
from kvyard.policy.discovery import GROUPS, Discovery, Offer, discover
from kvyard.policy.generations import import_generation
from kvyard.policy.params import ParamError, PolicyParams, Value
from kvyard.policy.reading import read_source

BASES: Mapping[Kind, type[Policy]] = {
    "admission": AdmissionPolicy,
    "preemption": PreemptionPolicy,
    "prefill": PrefillPolicy,
}


class RegistryError(Exception):
    """A policy or discipline cannot be used; the text says which one, why, and what else there is.

    `code` is machine-readable: `unknown`, `import`, `not-a-policy`, `api`, `construct`, `incomplete`.
    """

    def __init__(self, message: str, code: str = "refused") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Installed:
    """One installed policy or discipline, as its distribution and its source describe it."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    """`module:class`."""
    api: str
    """Version of the policy API it was written for, as far as its source says."""
    doc: str
    problem: str
    """Why it cannot be used, empty when nothing speaks against it."""


@dataclass(slots=True)
class Listing:
    """Result of `list_policies`."""

    policies: list[Installed] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read, and names offered twice."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy object and where it came from."""

    policy: Policy
    kind: Kind
    name: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class LoadedDiscipline:
    """A discipline: for each kind the name of a policy and its parameters."""

    name: str
    doc: str
    parts: Mapping[Kind, tuple[str, Mapping[str, Value]]]
    distribution: str
    version: str


def list_policies(path: Sequence[str] | None = None) -> Listing:
    """Everything installed on `path` (default: `sys.path`), sorted by kind and name; nothing is imported."""
    found = discover(path)
    kinds = list(GROUPS)
    offers = sorted(found.offers.values(), key=lambda offer: (kinds.index(offer.kind), offer.name))
    return Listing([_describe(offer, path) for offer in offers], found.problems)


def _describe(offer: Offer, path: Sequence[str] | None) -> Installed:
    facts = read_source(offer, path)
    api = facts.api or API
    return Installed(
        kind=offer.kind,
        name=offer.name,
        distribution=offer.distribution,
        version=offer.version,
        target=f"{offer.module}:{offer.attribute}",
        api=f"{api[0]}.{api[1]}",
        doc=facts.doc,
        problem=facts.problem or _api_problem(api),
    )


def load(
    kind: Kind, name: str, params: Mapping[str, Any] | None = None, *, path: Sequence[str] | None = None
) -> LoadedPolicy:
    """Import and construct a policy. Raises RegistryError, or ParamError for its parameters."""
    if kind not in KINDS:
        raise RegistryError(f"{kind!r} is no kind of policy; the kinds are {', '.join(KINDS)}", "unknown")
    offer = _offer(discover(path), kind, name)
    found = _imported(offer)
    if not (isinstance(found, type) and issubclass(found, BASES[kind])):
        raise RegistryError(f"{_title(offer)} is no subclass of {BASES[kind].__name__}", "not-a-policy")
    _check_api(offer, found)
    return LoadedPolicy(_constructed(offer, found, params or {}), kind, name, offer.distribution, offer.version)


def load_discipline(name: str, *, path: Sequence[str] | None = None) -> LoadedDiscipline:
    """Import a discipline and check its parts; the parts themselves are not loaded. Raises RegistryError."""
    offer = _offer(discover(path), "discipline", name)
    found = _imported(offer)
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, Discipline):
        raise RegistryError(f"{_title(offer)} is no Discipline", "not-a-policy")
    _check_api(offer, found)
    parts = _checked_parts(offer, cast(Discipline, found))
    doc = str(getattr(found, "doc", "") or kind.__doc__ or "")
    return LoadedDiscipline(name, doc.strip(), parts, offer.distribution, offer.version)


def _checked_parts(offer: Offer, found: Discipline) -> dict[Kind, tuple[str, Mapping[str, Value]]]:
    parts: dict[Kind, tuple[str, Mapping[str, Value]]] = {}
    for kind in KINDS:
        try:
            name, params = found.parts[kind]
            parts[kind] = (str(name), dict(params))
        except (KeyError, TypeError, ValueError):
            raise RegistryError(f"{_title(offer)} names no {kind} policy and its parameters", "incomplete") from None
    return parts


def _offer(found: Discovery, kind: str, name: str) -> Offer:
    offer = found.offers.get((kind, name))
    if offer is None:
        names = ", ".join(found.names(kind)) or "none"
        what = "discipline" if kind == "discipline" else f"{kind} policy"
        raise RegistryError(f"there is no {what} {name!r}; installed are: {names}", "unknown")
    return offer


def _imported(offer: Offer) -> object:
    """The object that the entry point names. A plugin's module may fail in any way, SystemExit included."""
    try:
        found: Any = import_generation(offer.module)
        for part in offer.attribute.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RegistryError(f"{_title(offer)} cannot be imported: {_words(error)}", "import") from error
    return cast(object, found)


def _constructed(offer: Offer, found: type[Policy], params: Mapping[str, Any]) -> Policy:
    try:
        policy = found(**params)
        complete = isinstance(getattr(policy, "params", None), PolicyParams)
    except (ParamError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RegistryError(f"{_title(offer)} cannot be constructed: {_words(error)}", "construct") from error
    if not complete:
        what = "it has no `params`; its __init__ must call super().__init__(**values), which makes them"
        raise RegistryError(f"{_title(offer)} cannot be used: {what}", "construct")
    return policy


def _check_api(offer: Offer, found: object) -> None:
    match getattr(found, "api", None):
        case (int() as major, int() as minor):
            problem = _api_problem((major, minor))
        case other:
            problem = f"its api is {other!r}, not a pair of numbers"
    if problem:
        raise RegistryError(f"{_title(offer)} cannot be used: {problem}", "api")


def _api_problem(api: tuple[int, int]) -> str:
    """Why a policy written for that version cannot be used; empty when it can."""
    if api[0] == API[0] and 0 <= api[1] <= API[1]:
        return ""
    return f"it is written for policy API {api[0]}.{api[1]} and this is {API[0]}.{API[1]}"


def _title(offer: Offer) -> str:
    return f"{offer.kind} {offer.name!r} of {offer.distribution} ({offer.module}:{offer.attribute})"


def _words(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())[:500]
    except Exception:  # an exception's own text may fail as well
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
