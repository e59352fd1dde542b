"""Declared parameters of a policy, as `policy.show` tells them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from kvyard_tui import fmt


class Spec(Struct):
    """One declared parameter (PolicyParams.describe)."""

    name: str
    type: str = ""
    value: Any = None
    default: Any = None
    change: str = "live"
    ge: float | None = None
    le: float | None = None
    choices: list[str] | None = None
    unit: str = ""
    doc: str = ""


class Described(Struct):
    """What `policy.show` tells of one policy; a discipline has parts instead of parameters."""

    kind: str
    name: str
    params: list[Spec] = []
    parts: dict[str, dict[str, Any]] = {}


class InForce(Struct):
    """What `policy.show` tells without a name: every policy in charge."""

    policies: list[Described] = []


def accepts(spec: Spec) -> str:
    """Type, range, unit and meaning in one sentence."""
    words = [spec.type or "value"]
    if spec.choices:
        words.append("one of " + ", ".join(spec.choices))
    if spec.ge is not None:
        words.append(f"at least {spec.ge:g}")
    if spec.le is not None:
        words.append(f"at most {spec.le:g}")
    if spec.unit:
        words.append(spec.unit)
    text = ", ".join(words)
    return f"{text}. {spec.doc}" if spec.doc else text


def summary(described: Described) -> str:
    """All parameters with their values, or the parts of a discipline."""
    if described.parts:
        return "parts: " + ", ".join(f"{kind} {part.get('name', '?')}" for kind, part in described.parts.items())
    if not described.params:
        return "no parameters"
    return "parameters: " + ", ".join(f"{spec.name}={fmt.value(spec.value)}" for spec in described.params)
