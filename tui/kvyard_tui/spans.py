"""Lines of toned text: what a view makes and a widget draws. A tone is a meaning; the theme gives it a look."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from kvyard_tui.text import cells, fit

Tone = Literal[
    "", "dim", "strong", "title", "rule", "good", "warn", "bad", "accent", "used", "cached", "free", "alarm"
]
TONES: tuple[Tone, ...] = (
    "dim", "strong", "title", "rule", "good", "warn", "bad", "accent", "used", "cached", "free", "alarm",
)  # fmt: skip
Span = tuple[str, Tone]
Line = tuple[Span, ...]


def line(*spans: Span | str) -> Line:
    """A line of spans; a bare string has no tone."""
    return tuple((span, "") if isinstance(span, str) else span for span in spans)


def plain(spans: Iterable[Span]) -> str:
    """The text alone."""
    return "".join(text for text, _ in spans)


def width_of(spans: Iterable[Span]) -> int:
    """Cells of a line."""
    return sum(cells(text) for text, _ in spans)


def fit_line(spans: Line, width: int) -> Line:
    """The line in exactly `width` cells."""
    out: list[Span] = []
    left = width
    for text, tone in spans:
        size = cells(text)
        if size > left:
            out.append((fit(text, left), tone))
            return tuple(out)
        out.append((text, tone))
        left -= size
    if left > 0:
        out.append((" " * left, ""))
    return tuple(out)


def split_line(left: Line, right: Line, width: int) -> Line:
    """`left` at the left edge and `right` at the right one; where both do not fit, `left` is cut."""
    room = width - width_of(right)
    if room < 1:
        return fit_line(right, width)
    return fit_line(left, room) + right


def heading(title: str, width: int, rule: str, note: str = "", columns: str = "") -> Line:
    """A section's title on a rule; `columns` stands at the right edge and names what is below it."""
    head: Line = ((title, "title"), *(((f" {note}", "dim"),) if note else ()))
    tail: Line = ((f" {columns}", "dim"),) if columns else ()
    room = width - width_of(tail)
    if width_of(head) + 1 > room:
        return fit_line(split_line(head, tail, width), width)
    fill = room - width_of(head) - 1
    return (*head, (" " + rule * fill, "rule"), *tail)
