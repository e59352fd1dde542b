"""Who decides: the policies in charge, what they cost, how often they were overridden, and who was put out."""

from __future__ import annotations

from kvyard.control.schema import PolicyStatus, QuarantineEntry, RequestCounts, Status

from kvyard_tui import fmt
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, Span, Tone, fit_line, heading, line
from kvyard_tui.text import clean, fit

KIND = 11
NUMBER = 9


def policies(shown: Shown, width: int) -> list[Line]:
    """One line per policy in charge, then one per quarantined policy."""
    status = shown.yard.status
    wide = width >= 100
    columns = ("calls", "p50", "p99", "overrides") if wide else ("calls", "p99", "overrides")
    names = "".join(fit(name, NUMBER + (name == "overrides"), right=True) for name in columns)
    note = _in_charge(status) if status is not None else ""
    lines = [heading("Policies", width, shown.glyphs.rule, note, names.lstrip())]
    if status is None:
        return lines
    lines += [_policy(policy, columns, width) for policy in status.policies]
    lines += [_quarantined(entry, shown, width) for entry in status.quarantine]
    return lines


def _in_charge(status: Status) -> str:
    return f"{clean(status.in_charge)}, generation {status.generation}"


def _policy(policy: PolicyStatus, columns: tuple[str, ...], width: int) -> Line:
    numbers: list[Span] = []
    total = sum(policy.overrides.values())
    for column in columns:
        if column == "overrides":
            numbers.append((fit(fmt.count(total), NUMBER + 1, right=True), "warn" if total else "dim"))
        elif column == "calls":
            numbers.append((fit(fmt.count(policy.calls), NUMBER, right=True), "dim"))
        else:
            cost = policy.p50_us if column == "p50" else policy.p99_us
            numbers.append((fit(fmt.micros(cost), NUMBER, right=True), ""))
    room = width - KIND - sum(len(text) for text, _ in numbers)
    return fit_line(((fit(policy.kind, KIND), "dim"), *_name(policy, max(1, room)), *numbers), width)


def _name(policy: PolicyStatus, room: int) -> Line:
    """Name, parameters, and what went wrong under it, as far as there is room."""
    spans: list[Span] = [(clean(policy.name), "strong")]
    if policy.ejections:
        spans.append((f"  ejected {policy.ejections}x", "bad"))
    others = {name: times for name, times in policy.ejected.items() if name != policy.name}
    if others:
        spans.append((clean(f"  ejected {', '.join(f'{name} {times}x' for name, times in others.items())}"), "bad"))
    if policy.overrides:
        spans.append((f"  {overrides(policy.overrides)}", "warn"))
    if policy.params:
        params = " ".join(f"{key}={fmt.value(value)}" for key, value in policy.params.items())
        spans.append((f"  {clean(params)}", "dim"))
    return fit_line(tuple(spans), room)


def overrides(causes: dict[str, int]) -> str:
    """Causes by how often, most frequent first."""
    ordered = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    return clean(", ".join(f"{cause} {fmt.count(times)}" for cause, times in ordered))


def _quarantined(entry: QuarantineEntry, shown: Shown, width: int) -> Line:
    until = "until released" if entry.until is None else f"for {fmt.duration(entry.until - shown.wall)}"
    times = f", {entry.times} times" if entry.times > 1 else ""
    return fit_line(
        line(
            (f"{shown.glyphs.failed} quarantined {until}{times}: ", "bad"),
            (clean(f"{entry.policy} {entry.version}".strip()), "strong"),
            (f" {clean(entry.code)}", "bad"),
            (f" {clean(entry.message)}", ""),
        ),
        width,
    )


def totals(shown: Shown, width: int) -> list[Line]:
    """How requests ended since the start, and, when there are any, the errors by code."""
    status = shown.yard.status
    if status is None:
        return [fit_line(line(("no totals yet", "dim")), width)]
    spans: list[Span] = []
    for name, number, tone in _ends(status.requests, status.engine.restarts):
        spans += [(f"{name} ", "dim"), (fmt.count(number), tone), ("  ", "")]
    lines = [fit_line(tuple(spans), width)]
    if status.errors:
        lines.append(fit_line(line(("errors ", "dim"), (overrides(status.errors), "bad")), width))
    return lines


def _ends(counts: RequestCounts, restarts: int) -> list[tuple[str, int, Tone]]:
    return [
        ("finished", counts.finished, ""),
        ("cancelled", counts.cancelled, ""),
        ("failed", counts.failed, "bad" if counts.failed else ""),
        ("refused", counts.refused, "warn" if counts.refused else ""),
        ("preempted", counts.preemptions, ""),
        ("restarts", restarts, "warn" if restarts else ""),
    ]
