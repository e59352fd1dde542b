"""Numbers as people read them: short, with their unit, never more precise than they are."""

from __future__ import annotations

MISSING = "-"
"""Stands where there is no value yet; never a zero that was not measured."""


def duration(seconds: float | None) -> str:
    """A span of time in at most seven cells, from microseconds to days."""
    if seconds is None:
        return MISSING
    seconds = max(0.0, seconds)
    if seconds < 60:
        return _under_a_minute(seconds)
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m{int(seconds % 60):02d}s"
    hours = minutes // 60
    if hours < 48:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def _under_a_minute(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s"


def age(seconds: float) -> str:
    """How long ago, to the second: what changes less often is read more easily."""
    return f"{max(0, int(seconds))}s" if seconds < 60 else duration(seconds)


def micros(value: float | None) -> str:
    """A cost given in microseconds."""
    return MISSING if value is None else duration(value / 1e6)


def count(number: float | None) -> str:
    """A whole number in at most seven cells."""
    if number is None:
        return MISSING
    if abs(number) < 100_000:
        return f"{number:,.0f}"
    for limit, unit in ((1e6, "k"), (1e9, "M"), (1e12, "G")):
        if abs(number) < limit * 0.9995:
            scaled = number / (limit / 1e3)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number / 1e12:.1f}T"


def rate(value: float | None) -> str:
    """A rate per second: one decimal while it is small."""
    if value is None:
        return MISSING
    return f"{value:.1f}" if 0 < value < 9.95 else count(value)


def size(number: int) -> str:
    """Bytes in binary units."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def percent(part: float, whole: float) -> str:
    """A share; something that is not nothing never shows as 0 %."""
    if whole <= 0:
        return "0%"
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1%"
    if 99 < share < 100:
        return ">99%"
    return f"{share:.0f}%"


def value(item: object) -> str:
    """A parameter's value."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, float):
        return f"{item:g}"
    return str(item)
