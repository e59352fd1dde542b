"""Loaded by schemathesis: requests that get as far as they can, so that not all of them end at the first check."""

from __future__ import annotations

from typing import Any

import schemathesis

Json = Any


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Json) -> Json:
    """Of the names of models that are made up, half are left out, which means the served one."""
    name = body.get("model") if isinstance(body, dict) else None
    return {**body, "model": None} if isinstance(name, str) and len(name) % 2 == 0 else body
