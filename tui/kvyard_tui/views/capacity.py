"""What the machine is doing: KV blocks used, cached and free; token rates; step time."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.control.schema import KvStatus

from kvyard_tui import fmt
from kvyard_tui.glyphs import Glyphs, shares, sparkline
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, Span, fit_line, heading, line, split_line
from kvyard_tui.text import fit
from kvyard_tui.views.latency import brief

LABEL = 9


def capacity(shown: Shown, width: int) -> list[Line]:
    """The KV bar with its legend, and three sparklines of one second per sign."""
    status, glyphs, history = shown.yard.status, shown.glyphs, shown.yard.history
    kv = status.kv if status is not None else None
    note = f"{fmt.count(kv.total)} blocks of {kv.block_size}, {fmt.size(kv.bytes)}" if kv is not None else ""
    rates = status.rates if status is not None else None
    lines = [heading("KV cache", width, glyphs.rule, note)]
    lines.append(fit_line(kv_bar(kv, width, glyphs), width))
    lines.append(fit_line(kv_legend(kv, glyphs), width))
    output = rates.output_tokens if rates is not None else None
    prompt = rates.prompt_tokens if rates is not None else None
    lines.append(_spark("output", history.output, f"{fmt.rate(output)} tok/s", width, glyphs))
    lines.append(_spark("prompt", history.prompt, f"{fmt.rate(prompt)} tok/s", width, glyphs))
    p50, p99 = (rates.step_p50, rates.step_p99) if rates is not None else (None, None)
    wide = f"{fmt.duration(p50)} p99 {fmt.duration(p99)}"
    lines.append(_spark("step", history.step, wide, width, glyphs))
    return lines


def kv_bar(kv: KvStatus | None, width: int, glyphs: Glyphs) -> Line:
    """Used, cached and free, in this order, each with its own sign and tone."""
    if kv is None:
        return line((glyphs.free * width, "free"))
    used, cached, free = shares((kv.used, kv.cached, kv.free), width)
    return line((glyphs.used * used, "used"), (glyphs.cached * cached, "cached"), (glyphs.free * free, "free"))


def kv_legend(kv: KvStatus | None, glyphs: Glyphs) -> Line:
    """The signs of the bar, their names and shares."""
    spans: list[Span] = []
    for sign, name in ((glyphs.used, "used"), (glyphs.cached, "cached"), (glyphs.free, "free")):
        share = fmt.percent(getattr(kv, name), kv.total) if kv is not None else fmt.MISSING
        spans += [(sign, name), (f" {name} ", "dim"), (share, "strong"), ("  ", "")]  # type: ignore[list-item]  # the three names are tones
    return tuple(spans)


def _spark(name: str, values: Sequence[float | None], now: str, width: int, glyphs: Glyphs) -> Line:
    number = fit(now, 18, right=True)
    room = max(0, width - LABEL - len(number))
    drawn = sparkline(values, room, glyphs)
    return fit_line(line((fit(name, LABEL), "dim"), (drawn, "accent"), (number, "")), width)


def brief_lines(shown: Shown, width: int) -> list[Line]:
    """Two lines that stand for the panels on a small screen."""
    status, glyphs = shown.yard.status, shown.glyphs
    kv = status.kv if status is not None else None
    rates = status.rates if status is not None else None
    used = fmt.percent(kv.used, kv.total) if kv is not None else fmt.MISSING
    right = line(
        (f" {used}", "strong"), (" KV  ", "dim"), (fmt.rate(rates.output_tokens if rates else None), "strong")
    )
    right = (*right, (" tok/s", "dim"))
    room = max(4, width - sum(len(text) for text, _ in right) - 1)
    bar = kv_bar(kv, room, glyphs)
    return [
        fit_line(brief(status.latency if status is not None else None), width),
        split_line(bar, right, width),
    ]
