"""Typed parameters of a policy: declared once, checked, shown to operators, changed while running.

    class Params(PolicyParams):
        fraction: float = live(0.01, ge=0, le=0.5, unit="of all blocks", doc="Blocks kept free.")

A `live` parameter can be changed at a step boundary; a `restart` one needs the policy to be loaded
anew. Values are immutable: a change makes a new `Params` object, so a policy never sees half of one.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

Value = int | float | bool | str
T = TypeVar("T", int, float, bool, str)
MOST = 10**12
"""Largest whole number of any parameter: more than any count of tokens, and sums over a thousand stay in 64 bits."""
_TYPES: dict[type, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}


class ParamError(ValueError):
    """A parameter's name or value was refused; the text names the parameter and what it accepts."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One declared parameter: its default, its range, its unit and whether it may change while running."""

    default: Value
    change: Literal["live", "restart"]
    ge: float | None = None
    le: float | None = None
    choices: tuple[str, ...] | None = None
    unit: str = ""
    doc: str = ""


def live(
    default: T,
    *,
    ge: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] | None = None,
    unit: str = "",
    doc: str = "",
) -> T:
    """Declare a parameter that an operator may change while the policy runs."""
    # The class body must read `name: float = live(0.01)`: PolicyParams turns the spec into the value.
    return cast(T, ParamSpec(default, "live", ge, le, choices, unit, doc))


def restart(
    default: T,
    *,
    ge: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] | None = None,
    unit: str = "",
    doc: str = "",
) -> T:
    """Declare a parameter that is fixed for as long as the policy is loaded."""
    return cast(T, ParamSpec(default, "restart", ge, le, choices, unit, doc))


class PolicyParams:
    """Base of a policy's `Params`. Raises ParamError for unknown names, wrong types and ranges."""

    specs: ClassVar[Mapping[str, ParamSpec]] = {}
    types: ClassVar[Mapping[str, type]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = typing.get_type_hints(cls)
        specs = dict(cls.specs)
        types = dict(cls.types)
        for name, spec in list(vars(cls).items()):
            if isinstance(spec, ParamSpec):
                if hints.get(name) not in _TYPES:
                    raise TypeError(f"{cls.__qualname__}.{name}: annotate it as int, float, bool or str")
                specs[name], types[name] = spec, hints[name]
                delattr(cls, name)
        cls.specs, cls.types = specs, types

    def __init__(self, **values: Value) -> None:
        for name in values:
            if name not in self.specs:
                known = ", ".join(self.specs) or "none"
                raise ParamError(f"there is no parameter {name!r}; this policy has: {known}")
        for name, spec in self.specs.items():
            value = self._checked(name, spec, values.get(name, spec.default))
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("parameters are immutable; kvyard makes a new object for a change")

    @classmethod
    def _checked(cls, name: str, spec: ParamSpec, value: object) -> Value:
        kind = cls.types[name]
        if type(value) is int and abs(value) > MOST:
            raise ParamError(f"{name} must be at most {MOST:,}; a number that large is no count of anything")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ParamError(f"{name} takes a {_TYPES[kind]}, not {value!r}")
        if spec.choices is not None and value not in spec.choices:
            raise ParamError(f"{name} is one of {', '.join(spec.choices)}, not {value!r}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            cls._check_range(name, spec, value)
        return cast(Value, value)

    @staticmethod
    def _check_range(name: str, spec: ParamSpec, value: float) -> None:
        if not math.isfinite(value):
            raise ParamError(f"{name} takes a finite number, not {value!r}")
        low = spec.ge is None or value >= spec.ge
        high = spec.le is None or value <= spec.le
        if low and high:
            return
        bounds = [f"at least {spec.ge:g}"] if spec.ge is not None else []
        bounds += [f"at most {spec.le:g}"] if spec.le is not None else []
        raise ParamError(
            f"{name} must be {' and '.join(bounds)}{' ' + spec.unit if spec.unit else ''}, not {value!r}"
        )

    def values(self) -> dict[str, Value]:
        """The values by name."""
        return {name: cast(Value, getattr(self, name)) for name in self.specs}

    def changed(self, values: Mapping[str, Value]) -> Self:
        """A new object with live parameters replaced. Raises ParamError, also for a `restart` one."""
        for name in values:
            spec = self.specs.get(name)
            if spec is not None and spec.change == "restart":
                raise ParamError(f"{name} is fixed while the policy is loaded; swap the policy to change it")
        return type(self)(**{**self.values(), **values})

    @classmethod
    def parse(cls, text: Mapping[str, str]) -> dict[str, Value]:
        """Values from `name=value` texts (the CLI's form). Raises ParamError."""
        return {name: cls._from_text(name, raw) for name, raw in text.items()}

    @classmethod
    def _from_text(cls, name: str, raw: str) -> Value:
        kind = cls.types.get(name, str)
        if kind is bool:
            if raw.lower() in ("true", "yes", "on", "1"):
                return True
            if raw.lower() in ("false", "no", "off", "0"):
                return False
            raise ParamError(f"{name} takes true or false, not {raw!r}")
        try:
            return cast(Value, kind(raw))
        except ValueError:
            raise ParamError(f"{name} takes a {_TYPES[kind]}, not {raw!r}") from None

    def describe(self) -> list[dict[str, Any]]:
        """One dictionary per parameter: name, type, value, default, change, range, choices, unit, doc."""
        return [
            {
                "name": name,
                "type": _TYPES[self.types[name]],
                "value": getattr(self, name),
                "default": spec.default,
                "change": spec.change,
                "ge": spec.ge,
                "le": spec.le,
                "choices": list(spec.choices) if spec.choices else None,
                "unit": spec.unit,
                "doc": spec.doc,
            }
            for name, spec in self.specs.items()
        ]
