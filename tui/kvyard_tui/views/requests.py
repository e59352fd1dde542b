"""The table of unfinished requests: filter, order, columns by width, and the text of every cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvyard.control.schema import RequestRow

from kvyard_tui import fmt
from kvyard_tui.glyphs import gauge
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, Span, Tone, fit_line, heading
from kvyard_tui.text import clean, fit

STATES = ("running", "waiting", "preempted", "swapped")
BAR = 8
WHY = 48
"""Cells for the reason of a wait before the name of the request gets more."""
DIGITS = 5
"""Cells of a sequence's number, as long as the longest has no more."""
MOST_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, its width in cells (0 takes what is left), and what it shows."""

    key: str
    title: str
    width: int
    cell: Callable[[RequestRow, Shown], Line]
    order: Callable[[RequestRow], float | str]
    from_width: int = 0
    """Shown on screens at least this wide."""
    right: bool = False


def _state(row: RequestRow, shown: Shown) -> Line:
    glyphs = shown.glyphs
    known: dict[str, tuple[str, Tone]] = {
        "running": (glyphs.running, "good"),
        "waiting": (glyphs.waiting, "dim"),
        "preempted": (glyphs.preempted, "warn"),
        "swapped": (glyphs.swapped, "warn"),
    }
    sign, tone = known.get(row.state, (glyphs.dot, ""))
    return ((f"{sign} {clean(row.state)}", tone),)


def progress(row: RequestRow) -> tuple[float, str]:
    """Share done of the phase it is in, and the same in words: the prompt first, then the output."""
    if row.output_tokens == 0:
        share = row.computed_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
        return share, f"prompt {fmt.percent(row.computed_tokens, row.prompt_tokens)}"
    share = row.output_tokens / row.max_new if row.max_new else 1.0
    return share, f"{fmt.count(row.output_tokens)}/{fmt.count(row.max_new)}"


def _progress(row: RequestRow, shown: Shown) -> Line:
    glyphs = shown.glyphs
    share, words = progress(row)
    tone: Tone = "used" if row.output_tokens else "cached"
    fill = glyphs.full if row.output_tokens else glyphs.prefill
    bar = gauge(share, 1.0, BAR, fill, glyphs.empty)
    done = len(bar.rstrip(glyphs.empty))
    return ((bar[:done], tone), (bar[done:], "rule"), (f" {words}", ""))


def _text(value: str, tone: Tone = "") -> Line:
    return ((clean(value), tone),)


def _number(value: int, tone: Tone = "") -> Line:
    return ((fmt.count(value), tone if value else "dim"),)


COLUMNS: tuple[Column, ...] = (
    Column("number", "#", DIGITS, lambda r, s: _text(str(r.id), "dim"), lambda r: r.id, 72, True),
    Column("request", "REQUEST", 13, lambda r, s: _text(r.request_id, "strong"), lambda r: r.request_id),
    Column("state", "STATE", 11, _state, lambda r: STATES.index(r.state) if r.state in STATES else 9),
    Column("age", "AGE", 6, lambda r, s: _text(fmt.age(r.age_s)), lambda r: -r.age_s, right=True),
    Column("progress", "PROGRESS", 20, _progress, lambda r: -progress(r)[0] - (r.output_tokens > 0)),
    Column("prompt", "PROMPT", 7, lambda r, s: _number(r.prompt_tokens), lambda r: -r.prompt_tokens, 104, True),
    Column("blocks", "BLOCKS", 6, lambda r, s: _number(r.blocks), lambda r: -r.blocks, 90, True),
    Column("priority", "PRI", 4, lambda r, s: _text(str(r.priority)), lambda r: r.priority, 78, True),
    Column("preempted", "PRE", 4, lambda r, s: _number(r.preemptions, "warn"), lambda r: -r.preemptions, 110, True),
    Column("tenant", "TENANT", 10, lambda r, s: _text(r.tenant or fmt.MISSING, "dim"), lambda r: r.tenant, 124),
    Column("why", "WHY IT WAITS", 0, lambda r, s: _text(s.yard.why(r), "warn"), lambda r: r.reason, 64),
)
SORTS = ("order", *(column.key for column in COLUMNS))
"""`order` is the daemon's own: running first, then waiting in the order of admission."""


def columns_for(width: int, digits: int = DIGITS) -> list[tuple[Column, int]]:
    """The columns that fit, with their widths; one cell between two columns, `digits` of them for the numbers."""
    if width < 64:  # a narrow screen keeps the name, the state's sign and the progress
        narrow = [("request", max(6, width - 2 - 7 - 21)), ("state", 2), ("age", 6), ("progress", 0)]
        by_key = {column.key: column for column in COLUMNS}
        return _stretch([(by_key[key], size) for key, size in narrow], width, 0)
    more = max(0, digits - DIGITS)
    changed = {"number": more, "request": -more}
    chosen = [column for column in COLUMNS if width >= column.from_width]
    numbered = any(column.key == "number" for column in chosen)
    sized = [(column, column.width + (changed.get(column.key, 0) if numbered else 0)) for column in chosen]
    return _stretch(sized, width, WHY)


def digits_of(rows: Sequence[RequestRow]) -> int:
    """Cells that the numbers need."""
    return min(MOST_DIGITS, max((len(str(row.id)) for row in rows), default=DIGITS))


def _stretch(columns: list[tuple[Column, int]], width: int, enough: int) -> list[tuple[Column, int]]:
    """What is left goes to the column without a width; what is more than `enough` for it, to the name."""
    left = max(0, width - sum(size for _, size in columns) - len(columns) + 1)
    extra = max(0, min(25, left - enough)) if enough else 0
    wide = {"request": extra}
    return [(column, left - extra if size == 0 else size + wide.get(column.key, 0)) for column, size in columns]


def matches(row: RequestRow, wanted: str) -> bool:
    """Every word of the filter is found in the row (`!word`: is not found); case does not matter."""
    if not wanted:
        return True
    text = clean(f"{row.request_id} {row.state} {row.reason} {row.tenant} {row.priority}").casefold()
    for word in wanted.casefold().split():
        negated, needle = word.startswith("!"), word.lstrip("!")
        if needle and (needle in text) is negated:
            return False
    return True


def rows(shown: Shown) -> list[RequestRow]:
    """The rows to show: filtered, then in the chosen order; equal ones stay in the daemon's order."""
    page = shown.yard.requests
    if page is None:
        return []
    kept = [row for row in page.rows if matches(row, shown.filter)] if shown.filter else list(page.rows)
    column = next((column for column in COLUMNS if column.key == shown.sort), None)
    if column is not None:
        kept.sort(key=column.order, reverse=shown.reverse)
    elif shown.reverse:
        kept.reverse()
    return kept


def table_head(columns: Sequence[tuple[Column, int]], shown: Shown) -> Line:
    """The titles; the sorted one carries an arrow."""
    arrow = shown.glyphs.up if shown.reverse else shown.glyphs.down
    spans: list[Span] = []
    for column, size in columns:
        sorted_by = column.key == shown.sort
        title = f"{column.title}{arrow}" if sorted_by else column.title
        spans += [(fit(title, size, right=column.right), "accent" if sorted_by else "dim"), (" ", "")]
    return tuple(spans[:-1])


def table_row(row: RequestRow, columns: Sequence[tuple[Column, int]], shown: Shown) -> Line:
    """The cells of a row, each in exactly its width."""
    spans: list[Span] = []
    for column, size in columns:
        cell = column.cell(row, shown)
        if column.right:
            text, tone = cell[0]
            spans.append((fit(text, size, right=True), tone))
        else:
            spans += fit_line(cell, size)
        spans.append((" ", ""))
    return tuple(spans[:-1])


def requests_heading(shown: Shown, width: int) -> list[Line]:
    """How many run and wait, and why they wait; the filter and the order when they hide or move rows."""
    status, page = shown.yard.status, shown.yard.requests
    note = ""
    if status is not None:
        counts = status.requests
        note = f"{counts.running} of {status.limits.max_running} running {shown.glyphs.dot} {counts.waiting} waiting"
        why = sorted(counts.waiting_by_reason.items(), key=lambda item: -item[1])
        if why:
            note += f" ({', '.join(f'{clean(reason)} {number}' for reason, number in why)})"
    marks: list[str] = []
    if shown.filter and page is not None:
        marks.append(f"filter {clean(shown.filter)!r}: {len(rows(shown))} of {len(page.rows)}")
    if page is not None and page.total > len(page.rows):
        marks.append(f"first {len(page.rows)} of {page.total}")
    return [heading("Requests", width, shown.glyphs.rule, note, ", ".join(marks))]


def details(row: RequestRow, why: str) -> list[tuple[str, str]]:
    """Everything known about a request, as name and text."""
    return [
        ("request", clean(row.request_id)),
        ("sequence", str(row.id)),
        ("state", clean(row.state)),
        ("why", clean(why) or fmt.MISSING),
        ("age", fmt.duration(row.age_s)),
        ("priority", str(row.priority)),
        ("tenant", clean(row.tenant) or fmt.MISSING),
        ("prompt", f"{fmt.count(row.prompt_tokens)} tokens"),
        ("computed", f"{fmt.count(row.computed_tokens)} tokens in KV"),
        ("output", f"{fmt.count(row.output_tokens)} of at most {fmt.count(row.max_new)} tokens"),
        ("blocks", fmt.count(row.blocks)),
        ("preempted", f"{row.preemptions} times"),
    ]
