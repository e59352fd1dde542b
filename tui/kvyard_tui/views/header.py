"""The first line, the banner below it, and the line that answers the person."""

from __future__ import annotations

from kvyard.control.schema import Status

from kvyard_tui import fmt
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, Span, Tone, fit_line, line, split_line, width_of
from kvyard_tui.text import clean
from kvyard_tui.views.events import event_line, is_receipt


def header(shown: Shown, width: int) -> list[Line]:
    """Who serves what, how it stands, and whether keys may change anything."""
    status = shown.yard.status
    right = line(state(shown), "  ", badge(shown))
    if status is None:
        return [split_line(line(("kvyard", "strong"), (f"  {clean(shown.socket)}", "dim")), right, width)]
    model = status.model
    name = line(("kvyard", "strong"), "  ", clean(model.id))
    room = width - width_of(right) - 1
    for fact in (
        f"up {fmt.duration(status.uptime_s)}",
        f"{clean(model.device)} {clean(model.dtype)}{' deterministic' if model.deterministic else ''}",
        clean(status.address),
    ):
        longer = (*name, (f"  {fact}", "dim"))
        name = longer if width_of(longer) <= room else name
    return [split_line(name, right, width)]


def badge(shown: Shown) -> Span:
    """Whether this session may change anything."""
    if shown.writable:
        return (" CHANGES ALLOWED ", "alarm")
    return ("read-only", "dim")


def state(shown: Shown) -> Span:
    """One word for the daemon, with a shape of its own for each."""
    glyphs = shown.glyphs
    yard = shown.yard
    if yard.phase == "connecting":
        return (f"{glyphs.busy} connecting", "warn")
    if yard.phase == "lost" or yard.status is None:
        return (f"{glyphs.failed} no connection", "bad")
    return _serving(yard.status, shown)


def _serving(status: Status, shown: Shown) -> Span:
    glyphs = shown.glyphs
    engine = status.engine
    if engine.state == "failed":
        return (f"{glyphs.failed} engine failed", "bad")
    if status.draining or engine.state == "draining":
        return (f"{glyphs.draining} draining", "warn")
    if engine.state in ("starting", "recovering"):
        return (f"{glyphs.busy} engine {engine.state}", "warn")
    if status.paused:
        return (f"{glyphs.paused} paused", "warn")
    if status.stuck:
        return (f"{glyphs.warning} no step for {fmt.age(engine.last_step_age_s or 0)}", "bad")
    if not status.ready:
        return (f"{glyphs.busy} not ready", "warn")
    return (f"{glyphs.ready} ready", "good")


def banner(shown: Shown, width: int) -> list[Line]:
    """What is wrong with the picture itself: frozen, old, or without a connection; no line when nothing is."""
    glyphs = shown.glyphs
    if shown.frozen_at is not None:
        ago = fmt.age(shown.now - shown.frozen_at)
        return [fit_line(line((f" {glyphs.paused} FROZEN {ago} ago; space goes on", "alarm")), width)]
    yard = shown.yard
    if yard.phase == "lost":
        return [_bar(f"{glyphs.warning} {_lost(shown)}", width, "alarm")]
    stale = shown.stale
    if stale is not None:
        text = f"{glyphs.warning} DATA {fmt.age(stale)} OLD: the daemon is connected and sends nothing"
        return [_bar(text, width, "alarm")]
    engine = yard.status.engine if yard.status is not None else None
    if engine is not None and engine.reason:
        return [_bar(f"{glyphs.warning} {clean(engine.reason)}", width, "warn")]
    return []


def _lost(shown: Shown) -> str:
    yard = shown.yard
    age = shown.stale
    old = f"DATA {fmt.age(age)} OLD" if age is not None else "NO DATA YET"
    wait = (yard.retry_at or shown.now) - shown.now
    next_try = f"next try in {fmt.age(wait + 0.5)}" if wait >= 0.5 else "trying again"
    return f"{old}, {next_try}: {clean(yard.problem)}"


def _bar(text: str, width: int, tone: Tone) -> Line:
    return fit_line(line((f" {text} ", tone)), width)


def message(shown: Shown, width: int) -> list[Line]:
    """The answer to the last key press while it is fresh, else the newest event."""
    notice = shown.live_notice
    if notice is not None:
        return [fit_line(line((clean(notice.text), notice.tone)), width)]
    newest = next((event for event in reversed(shown.yard.events) if not is_receipt(event)), None)
    if newest is None:
        return [fit_line(line(("no events yet", "dim")), width)]
    return [fit_line(event_line(newest, shown.glyphs), width)]
