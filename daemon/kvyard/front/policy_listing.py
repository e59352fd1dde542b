"""Installed policies as operators see them; no plugin's code runs in the front.

Details of a policy that is not in charge need its class, so they are read in a scratch process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kvyard import __version__
from kvyard.control.schema import PolicyListing, PolicyRow, QuarantineEntry
from kvyard.front.engine_child import how_it_ended
from kvyard.front.operations import OperationError
from kvyard.front.quarantine import concerns
from kvyard.front.scratch import output_of
from kvyard.policy.base import API, BUILTIN, KINDS
from kvyard.policy.discovery import OWN_DISTRIBUTION, discover
from kvyard.policy.registry import list_policies

SCRATCH_LIMIT_S = 20.0
BUILTIN_DOC = "A part of the core that takes over when a policy is put out; see docs/policies.md."


def listing(active: Mapping[tuple[str, str], str], quarantined: list[QuarantineEntry]) -> PolicyListing:
    """Everything installed; `active` are (kind, name) of what is in charge.

    Its values are the versions that run, which are older than the installed ones after an upgrade without a swap.
    They are empty where that is not known.
    """
    found = list_policies()
    rows = []
    for item in found.policies:
        label = f"{item.kind}/{item.name}"
        entry = next((e for e in quarantined if e.policy == label and concerns(e, item.version)), None)
        runs = active.get((item.kind, item.name), "") or item.version
        problem = item.problem or (f"in quarantine ({entry.code}: {entry.message})" if entry is not None else "")
        rows.append(
            PolicyRow(
                kind=item.kind,
                name=item.name,
                distribution=item.distribution,
                version=runs,
                api=item.api,
                active=(item.kind, item.name) in active,
                problem=problem,
                doc=item.doc,
                installed="" if runs == item.version else item.version,
            )
        )
    rows += [
        PolicyRow(kind, name, OWN_DISTRIBUTION, __version__, ".".join(map(str, API)), True, doc=BUILTIN_DOC)
        for kind, name in active
        if name == BUILTIN
    ]
    return PolicyListing(rows, list(found.problems))


def no_such_kind(word: str) -> OperationError:
    """What to say to `policy show WORD`, where WORD may be the name of something."""
    named = [f"{kind}/{name}" for kind, name in discover().offers if name == word]
    named += [f"{kind}/{BUILTIN}" for kind in ("discipline", *KINDS) if word == BUILTIN]
    named.sort(key=lambda text: not text.startswith("discipline/"))
    kinds = f"write a kind (discipline, {', '.join(KINDS)}), KIND/NAME, discipline/NAME, or nothing"
    hint = f"did you mean {' or '.join(named)}? Otherwise {kinds}" if named else kinds
    return OperationError("bad-kind", f"{word!r} is not a kind of policy", hint)


def installed_version(policy: str) -> str:
    """Version of the distribution that offers `kind/name` now, empty when none does."""
    kind, _, name = policy.partition("/")
    offer = discover().offers.get((kind, name))
    return "" if offer is None else offer.version


async def vet(kind: str, name: str) -> frozenset[str]:
    """Load somebody else's policy, or the parts of a discipline, in a scratch process before the engine does.

    Returns `kind/name` of all of them. A module that hangs or crashes so never reaches the engine. What is not
    installed is the registry's to say. Raises OperationError.
    """
    vetted = frozenset({f"{kind}/{name}"})
    offer = (await asyncio.to_thread(discover)).offers.get((kind, name))
    if offer is None or offer.distribution == OWN_DISTRIBUTION:
        return vetted
    described = await describe_installed(kind, name)
    for part, bundle in described.get("parts", {}).items():
        vetted |= await vet(part, bundle["name"])
    return vetted


async def describe_installed(kind: str, name: str, *, parts: bool = False) -> dict[str, Any]:
    """A policy's documentation and parameters, read in a scratch process. Raises OperationError.

    With `parts` also the parameters of a discipline's parts.
    """
    arguments = (kind, name, "parts" if parts else "")
    try:
        output, status = await output_of("kvyard.policy.describe", *arguments, limit_s=SCRATCH_LIMIT_S)
    except TimeoutError:
        raise OperationError(
            "hung",
            f"{kind}/{name} did not load within {SCRATCH_LIMIT_S:.0f} s in a process of its own; nothing changed",
            "docs/plugins.md says what a plugin may do while it is imported",
        ) from None
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        how = how_it_ended(status)
        raise OperationError(
            "crashed", f"{kind}/{name} ended the scratch process that loaded it, which {how}; nothing changed"
        ) from None
    if "error" in answer:
        raise OperationError(str(answer["code"]), str(answer["error"]))
    return answer
