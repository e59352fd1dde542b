"""`python -m kvyard.policy.describe KIND NAME [parts]`: loads one policy and prints what it is, as JSON.

With `parts` the policies of a discipline are loaded, too, and their parameters told.

Run in a process of its own, because loading runs the plugin's code.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from kvyard.policy.base import BUILTIN, KINDS, Kind
from kvyard.policy.params import ParamError, Value
from kvyard.policy.registry import RegistryError, load, load_discipline

PR_SET_PDEATHSIG = 1


def describe(kind: str, name: str, parts: str = "") -> dict[str, Any]:
    """Documentation, origin and parameters of a policy or a discipline. Raises RegistryError, ParamError."""
    if kind == "discipline":
        bundle = load_discipline(name)
        return {
            "kind": kind,
            "name": name,
            "distribution": bundle.distribution,
            "version": bundle.version,
            "doc": bundle.doc,
            "parts": {
                part: {"name": policy, "params": dict(params), **(_part(part, policy, params) if parts else {})}
                for part, (policy, params) in bundle.parts.items()
            },
        }
    if kind not in KINDS:
        raise RegistryError(f"{kind!r} is no kind of policy; one of discipline, {', '.join(KINDS)}", "unknown")
    loaded = load(kind, name)
    return {
        "kind": kind,
        "name": name,
        "distribution": loaded.distribution,
        "version": loaded.version,
        "api": ".".join(map(str, loaded.policy.api)),
        "doc": (type(loaded.policy).__doc__ or "").strip(),
        "params": loaded.policy.params.describe(),
    }


def _part(kind: Kind, name: str, params: Mapping[str, Value]) -> dict[str, Any]:
    if name == BUILTIN:  # the core has it
        return {"parameters": []}
    try:
        return {"parameters": load(kind, name, params).policy.params.describe()}
    except (RegistryError, ParamError) as error:
        return {"problem": str(error)}


def _end_with_parent() -> None:
    """Nobody is left then who would wait for the answer, or end a plugin that never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Entry of the process."""
    _end_with_parent()
    # What a plugin prints while it is imported must not stand in the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        text = json.dumps(describe(*sys.argv[1:4]))
    except (RegistryError, ParamError) as error:
        text = json.dumps({"error": str(error), "code": getattr(error, "code", "bad-params")})
    except Exception as error:  # whatever else a foreign class does where it is looked at
        words = f"{'/'.join(sys.argv[1:3])} cannot be described: {type(error).__name__}: {error}"
        text = json.dumps({"error": words, "code": "construct"})
    with os.fdopen(answer_to, "w", encoding="utf-8") as answer:
        answer.write(text)


if __name__ == "__main__":
    main()
