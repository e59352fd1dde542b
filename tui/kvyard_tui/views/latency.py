"""Queue time, TTFT, ITL and E2E, each by itself: a slow queue and a slow model ask for different hands."""

from __future__ import annotations

from kvyard.control.schema import Latency, Quantiles

from kvyard_tui import fmt
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, Span, fit_line, heading, line
from kvyard_tui.text import fit

NUMBER = 8
"""Cells of a column of numbers."""
_ROWS = (("queue", "Queue time"), ("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E"))


def latency(shown: Shown, width: int) -> list[Line]:
    """One line per latency: median, p95 (p99 where there is room) and how many it is of."""
    columns = ("p50", "p95", "p99", "n") if width >= 48 else ("p50", "p95", "n")
    names = "".join(fit(name, NUMBER, right=True) for name in columns)
    note = "last minute" if width >= 48 else "1 min"
    lines = [heading("Latency", width, shown.glyphs.rule, note, names.lstrip())]
    status = shown.yard.status
    for field, name in _ROWS:
        known: Quantiles | None = getattr(status.latency, field) if status is not None else None
        lines.append(_row(name, known, columns, width))
    rates = status.rates if status is not None else None
    done = fmt.rate(rates.requests) if rates is not None else fmt.MISSING
    lines.append(fit_line(line((fit("Finished", 11), "dim"), f"{done}", (" requests/s", "dim")), width))
    return lines


def _row(name: str, known: Quantiles | None, columns: tuple[str, ...], width: int) -> Line:
    spans: list[Span] = [(fit(name, width - NUMBER * len(columns)), "dim")]
    for column in columns:
        if column == "n":
            text = fmt.count(known.count) if known is not None else fmt.MISSING
        else:
            text = fmt.duration(getattr(known, column) if known is not None else None)
        spans.append((fit(text, NUMBER, right=True), "strong" if column == "p50" else "dim" if column == "n" else ""))
    return fit_line(tuple(spans), width)


def brief(latencies: Latency | None) -> Line:
    """Median and p95 of the three that matter, for one line."""
    spans: list[Span] = []
    for field, name in (("queue", "queue"), ("ttft", "TTFT"), ("itl", "ITL")):
        known: Quantiles | None = getattr(latencies, field) if latencies is not None else None
        p50, p95 = (known.p50, known.p95) if known is not None else (None, None)
        spans += [(f"{name} ", "dim"), (fmt.duration(p50), "strong"), (f"/{fmt.duration(p95)}  ", "")]
    return tuple(spans)
