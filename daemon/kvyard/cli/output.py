"""Printing: JSON for programs, plain aligned text for people. Nothing a client named reaches the terminal raw."""

from __future__ import annotations

import select
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import msgspec


def say(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")


def until_readable(descriptor: int) -> None:
    """Write what was said, and wait until there is something to read.

    Raises BrokenPipeError as soon as nobody reads what is said (`| head`): otherwise that would be noticed with the
    next line, which may be hours away.
    """
    sys.stdout.flush()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(sys.stdout.fileno(), 0)  # tells POLLERR and POLLHUP alone
    for ready, event in poll.poll():
        if ready != descriptor and event & (select.POLLERR | select.POLLHUP):
            raise BrokenPipeError


def say_json(value: object) -> None:
    """A JSON value, indented on a terminal and on one line elsewhere."""
    raw = msgspec.json.encode(value)
    if sys.stdout.isatty():
        raw = msgspec.json.format(raw, indent=2)
    say(raw.decode())


def clean(text: str, width: int = 0) -> str:
    """A text without control and direction characters, cut to `width` columns if that is given."""
    safe = "".join(sign if unicodedata.category(sign)[0] != "C" else "?" for sign in text)
    return safe if not width or len(safe) <= width else safe[: width - 1] + "…"


def readable(text: str) -> str:
    """A model's text for a terminal: as it is, but for signs that would steer the terminal."""
    return "".join(sign if sign in "\n\t" else clean(sign) for sign in text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns under a head; the last column is not padded."""
    lines = [tuple(head), *(tuple(clean(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def duration(seconds: float | None) -> str:
    """A duration with three significant digits: `850 us`, `12.3 ms`, `4.56 s`, `3 h 12 m`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(number: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def count(number: float) -> str:
    """A large number with thousands separated; a rate with three digits."""
    if isinstance(number, int) or number >= 1000:
        return f"{round(number):,}"
    return f"{number:.3g}"
