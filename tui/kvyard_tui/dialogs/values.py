"""Parameters as a person types them, and errors as a person reads them."""

from __future__ import annotations

import json
import shlex
from typing import Any

from kvyard.control.client import ControlError


def parse_values(text: str) -> dict[str, Any]:
    """`name=value name=value` as names and JSON values. Raises ValueError with a text for people."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise ValueError("a quotation mark is not closed") from None
    values: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise ValueError(f"write name=value, not {word!r}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = parse_value(value)
    return values


def parse_value(text: str) -> Any:  # noqa: ANN401 - a parameter's value is any JSON value
    """A number, true, false or quoted text as JSON has it; anything else is text."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def said(error: ControlError) -> str:
    """An error of the daemon in one line: what happened and what to do."""
    return f"{error.message}. {error.hint}" if error.hint else error.message
