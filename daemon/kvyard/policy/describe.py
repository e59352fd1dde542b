"""`python -m kvyard.policy.describe KIND NAME`: loads one policy and prints what it is, as JSON.

Run in a process of its own, because loading runs the plugin's code.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvyard.policy.base import KINDS
from kvyard.policy.params import ParamError
from kvyard.policy.registry import RegistryError, load, load_discipline


def describe(kind: str, name: str) -> dict[str, Any]:
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
                part: {"name": policy, "params": dict(params)} for part, (policy, params) in bundle.parts.items()
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


def main() -> None:
    """Entry of the process."""
    try:
        answer = describe(*sys.argv[1:3])
    except (RegistryError, ParamError) as error:
        answer = {"error": str(error), "code": getattr(error, "code", "bad-params")}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
