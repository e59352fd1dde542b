"""The signs the screen is drawn with: one set for Unicode terminals, one for ASCII. Meaning is in the shape."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of signs; each is one cell wide."""

    used: str
    cached: str
    free: str
    full: str
    prefill: str
    empty: str
    rule: str
    dot: str
    ladder: str
    """Sparkline steps from lowest to highest; none is a whole cell, so that lines above each other stay apart."""
    running: str
    waiting: str
    preempted: str
    swapped: str
    ready: str
    busy: str
    failed: str
    paused: str
    draining: str
    warning: str
    up: str
    down: str


UNICODE = Glyphs(
    used="█", cached="▒", free="·", full="━", prefill="╍", empty="─", rule="─", dot="·", ladder="▁▂▃▄▅▆▇",
    running="▶", waiting="○", preempted="◀", swapped="◇", ready="●", busy="◐", failed="✖", paused="■",
    draining="▼", warning="▲", up="▲", down="▼",
)  # fmt: skip
ASCII = Glyphs(
    used="#", cached="=", free=".", full="#", prefill="=", empty="-", rule="-", dot="|", ladder="_.,-~+*#",
    running=">", waiting="o", preempted="<", swapped="s", ready="*", busy="~", failed="X", paused="=",
    draining="v", warning="!", up="^", down="v",
)  # fmt: skip


def shares(parts: Sequence[float], width: int) -> list[int]:
    """Cells for each part of a bar of `width` cells; whatever is not nothing shows, if there is room at all."""
    total = sum(parts)
    if total <= 0 or width <= 0:
        return [0] * len(parts)
    exact = [part * width / total for part in parts]
    cells = [max(int(share), 1 if share > 0 else 0) for share in exact]
    while sum(cells) < width:
        cells[max(range(len(parts)), key=lambda i: exact[i] - cells[i])] += 1
    while sum(cells) > width:
        cells[max(range(len(parts)), key=lambda i: (cells[i] > 1, cells[i] - exact[i], cells[i]))] -= 1
    return cells


def gauge(part: float, whole: float, width: int, full: str, empty: str) -> str:
    """A bar of `part` of `whole`; full only when it is complete."""
    share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    done = int(share * width)
    if share > 0 and done == 0:
        done = 1
    return full * done + empty * (width - done)


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """The newest `width` values from zero to their largest; the newest stands at the right edge."""
    newest = list(values)[-width:] if width > 0 else []
    top = max((v for v in newest if v is not None), default=0.0)
    steps = len(glyphs.ladder) - 1
    drawn = [" " if v is None else glyphs.ladder[round(steps * max(0.0, v) / top) if top > 0 else 0] for v in newest]
    return "".join(drawn).rjust(width)


def wants_ascii(environ: Mapping[str, str], encoding: str | None) -> bool:
    """Whether the locale is one without UTF-8; where the environment names none, `encoding` tells.

    The interpreter's own encoding does not: it takes UTF-8 in the locale C, too.
    """
    named = next((name for key in ("LC_ALL", "LC_CTYPE", "LANG") if (name := environ.get(key, ""))), "")
    charset = (named.partition("@")[0].partition(".")[2] or named) if named else encoding or ""
    return charset.replace("-", "").lower() != "utf8"


def given_environment() -> Mapping[str, str]:
    """The environment as the process was given it: in the locale C the interpreter sets LC_CTYPE to C.UTF-8."""
    try:
        given = Path("/proc/self/environ").read_bytes()
    except OSError:
        return os.environ
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in given.split(b"\0") if entry)
