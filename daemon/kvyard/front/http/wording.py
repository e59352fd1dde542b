"""From the decoder's own words about a wrong body to an error that names the field, the rule and the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvyard.front.http.errors import ApiError, invalid

_AT: Final = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$")
_STEP: Final = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]")
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_LENGTH: Final = re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)")
_RANGE: Final = re.compile(r"Expected `\w+` (>=|<=) (\S+)")
_TYPE: Final = re.compile(r"Expected `([^`]+)`, got `(\w+)`")
_TYPES: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a text",
}
_PARTS: Final = {"str": "characters", "array": "entries", "object": "entries"}
_BOUNDS: Final = {">=": "at least", "<=": "at most"}
_LONGEST_SHOWN: Final = 40
_UNKNOWN: Final = object()


def wrong_body(error: msgspec.ValidationError, body: bytes) -> ApiError:
    """The 400 for a body that is JSON and no request."""
    text = str(error)
    at = _AT.search(text)
    path = at["path"] if at else ""
    reason = text[: at.start()] if at else text
    if missing := _MISSING.fullmatch(reason):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(f"{name} is missing and has no default.", name, "missing_required_parameter")
    param = path.replace("[...]", "")
    if at and at["key"]:
        return invalid(f'{param}: each name must be a token id in decimal digits, such as "42".', param)
    return _wrong_value(reason, path, param, _value_at(body, path))


def _wrong_value(reason: str, path: str, param: str, value: object) -> ApiError:
    named = f"{param}: each value" if path.endswith("[...]") else param or "The request body"
    field = param or None
    if (length := _LENGTH.fullmatch(reason)) is not None:
        return _wrong_length(length[1], length[2], length[3], named, param, value)
    if (bound := _RANGE.fullmatch(reason)) is not None:
        return invalid(f"{named} must be {_BOUNDS[bound[1]]} {_number(bound[2])}{_but(value, _shown)}.", field)
    if (kind := _TYPE.fullmatch(reason)) is not None:
        wanted = " or ".join(_TYPES.get(name, name) for name in kind[1].split(" | ") if name != "null")
        found = _but(value, _shown) or f", not {_TYPES.get(kind[2], kind[2])}"
        return invalid(f"{named} must be {wanted}{found}.", field, "invalid_type")
    return invalid(f"{named}: {reason[:1].lower()}{reason[1:]}.", field)


def _wrong_length(kind: str, bound: str, number: str, named: str, param: str, value: object) -> ApiError:
    if bound == ">=" and number == "1":
        code = "empty_prompt" if param.partition("[")[0] == "prompt" else "invalid_value"
        return invalid(
            f"{named} is empty; at least one {_PARTS[kind][:-1].replace('ie', 'y')} is needed.", param, code
        )
    return invalid(f"{named} must have {_BOUNDS[bound]} {number} {_PARTS[kind]}{_but(value, _size)}.", param)


def _but(value: object, show: Callable[[Any], str]) -> str:
    shown = "" if value is _UNKNOWN else show(value)
    return f", not {shown}" if shown else ""


def _shown(value: object) -> str:
    """A short value as JSON has it; nothing for what would fill the screen."""
    if isinstance(value, list | dict):
        return ""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else ""


def _size(value: Any) -> str:  # noqa: ANN401 - a text, a list or an object
    return str(len(value))


def _number(text: str) -> str:
    return text.removesuffix(".0")


def _value_at(body: bytes, path: str) -> object:
    """What stands there; `_UNKNOWN` for the body as a whole, and where the decoder does not say which it was."""
    if not path or "[...]" in path:
        return _UNKNOWN
    try:
        found: Any = msgspec.json.decode(body)
        for step in _STEP.finditer(path):
            found = found[step["name"]] if step["name"] else found[int(step["index"])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return _UNKNOWN
    return found
