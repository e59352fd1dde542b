"""What is shown at which size of the terminal."""

from __future__ import annotations

from typing import Literal

from kvyard_tui.spans import Line, fit_line, line

Mode = Literal["tiny", "compact", "normal", "wide"]

LEAST = (40, 10)
"""Columns and rows below which only a message is shown."""


TALL = 32
"""Rows from which sections are set apart by an empty line."""


def mode(width: int, height: int) -> Mode:
    """`wide` adds the event log at the side, `compact` turns the panels into two lines."""
    if width < LEAST[0] or height < LEAST[1]:
        return "tiny"
    if width < 80 or height < 22:
        return "compact"
    return "wide" if width >= 160 and height >= 24 else "normal"


def too_small(width: int, height: int) -> list[Line]:
    """The message of the `tiny` mode, for whatever room there is."""
    texts = ("too small", f"{width}x{height}", f"needs {LEAST[0]}x{LEAST[1]}")
    return [fit_line(line((text, "warn")), width) for text in texts[: max(1, height)]]
