"""The status as plain text: what `kvyard status` prints and `kvyard top --plain` refreshes."""

from __future__ import annotations

from kvyard.cli.output import clean, count, duration, size, table
from kvyard.control.schema import Quantiles, RequestPage, Status

BAR = 30


def status_lines(s: Status) -> list[str]:
    """The whole status in about twenty lines."""
    return [*_head(s), "", *_load(s), "", *_latency(s), "", *_policies(s), *_troubles(s)]


def request_lines(page: RequestPage, limit: int, whole: bool = False) -> list[str]:
    """The unfinished sequences as a table; `whole` cuts no text, for what is piped on."""
    width = 0 if whole else 24
    head = ("ID", "REQUEST", "STATE", "WHY", "AGE", "PRIO", "PROMPT", "OUT", "BLOCKS", "PREEMPTED")
    rows = [
        (
            str(row.id), clean(row.request_id, width), row.state, clean(row.reason, width), duration(row.age_s),
            str(row.priority), f"{min(row.computed_tokens, row.prompt_tokens)}/{row.prompt_tokens}",
            f"{row.output_tokens}/{row.max_new}", str(row.blocks), str(row.preemptions),
        )
        for row in page.rows[:limit]
    ]  # fmt: skip
    lines = table(head, rows)
    if page.total > len(rows):
        lines.append(f"... and {page.total - len(rows)} more")
    return lines


def state(s: Status) -> str:
    """In one word what the daemon does; it agrees with /ready."""
    if s.draining:
        return "draining"
    if s.ready or s.engine.state != "ready":
        return s.engine.state
    return "paused" if s.paused else "not ready"


def _why(s: Status) -> str:
    """What the word does not say, in parentheses."""
    word = state(s)
    reason = clean(s.engine.reason).removeprefix(f"{word}: ")
    if not reason and s.stuck and word == "ready":
        reason = f"no step for {duration(s.engine.last_step_age_s)}"
    return f" ({reason})" if reason and reason != f"the engine is {word}" else ""


def _head(s: Status) -> list[str]:
    m, e = s.model, s.engine
    mode = ", deterministic" if m.deterministic else ""
    most = f", at most {count(m.max_model_len)} tokens" if m.max_model_len else ""
    return [
        f"kvyard {s.version}  {state(s)}{_why(s)}  {clean(s.address)}  up {duration(s.uptime_s)}  pid {s.pid or '-'}",
        f"model    {clean(m.id)}  {clean(m.family)}, {m.dtype} on {clean(m.device or m.backend)}{mode}{most}",
        f"engine   {e.state}  pid {e.pid or '-'}{_up(s)}  restarts {e.restarts}{_step(s)}",
    ]


def _up(s: Status) -> str:
    return f"  up {duration(s.engine.uptime_s)}" if s.engine.uptime_s else ""


def _step(s: Status) -> str:
    e = s.engine
    if not e.uptime_s or e.last_step_age_s is None:
        return ""
    return f"  step {count(e.step)}, {duration(e.last_step_age_s)} ago"


def _load(s: Status) -> list[str]:
    r, k, rate = s.requests, s.kv, s.rates
    why = ", ".join(f"{clean(reason)} {number}" for reason, number in sorted(r.waiting_by_reason.items()) if number)
    return [
        f"running  {r.running}/{s.limits.max_running}  waiting {r.waiting}{f' ({why})' if why else ''}  "
        f"preemptions {count(r.preemptions)}",
        f"ended    {count(r.finished)} finished, {count(r.cancelled)} cancelled, {count(r.failed)} failed, "
        f"{count(r.refused)} refused",
        f"KV       {_bar(k.used, k.cached, k.total)}  {k.used} used + {k.cached} cached + {k.free} free "
        f"of {k.total} blocks of {k.block_size} ({size(k.bytes)})",
        f"rate     {count(rate.output_tokens)} output tok/s, {count(rate.prompt_tokens)} prompt tok/s, "
        f"{count(rate.requests)} req/s; step {duration(rate.step_p50)} median, {duration(rate.step_p99)} p99",
    ]


def _bar(used: int, cached: int, total: int) -> str:
    if not total:
        return "[" + " " * BAR + "]"
    full = round(BAR * used / total)
    some = round(BAR * (used + cached) / total) - full
    return "[" + "#" * full + "-" * some + " " * (BAR - full - some) + "]"


def _latency(s: Status) -> list[str]:
    parts = (("queue", s.latency.queue), ("TTFT", s.latency.ttft), ("ITL", s.latency.itl), ("E2E", s.latency.e2e))
    return table(("LATENCY", "MEDIAN", "P95", "P99", "OF"), [(name, *_quantiles(q)) for name, q in parts])


def _quantiles(q: Quantiles) -> tuple[str, str, str, str]:
    return duration(q.p50), duration(q.p95), duration(q.p99), count(q.count)


def _policies(s: Status) -> list[str]:
    head = ("POLICY", "IN CHARGE", "CALLS", "MEDIAN", "P99", "OVERRIDES", "PUT OUT SINCE START")
    rows = [
        (
            p.kind, f"{p.name} {p.version}".strip(), count(p.calls),
            duration(None if p.p50_us is None else p.p50_us * 1e-6),
            duration(None if p.p99_us is None else p.p99_us * 1e-6),
            count(sum(p.overrides.values())), _put_out(p.ejected),
        )
        for p in s.policies
    ]  # fmt: skip
    told = f"discipline {clean(s.in_charge)}, generation {s.generation}; each policy's numbers since it took charge"
    return [told, *table(head, rows)]


def _put_out(ejected: dict[str, int]) -> str:
    return clean(", ".join(f"{name} {times}x" for name, times in ejected.items())) or "-"


def _troubles(s: Status) -> list[str]:
    lines = [
        f"quarantine  {clean(f'{q.policy} {q.version}'.strip())}: {clean(q.code)}, {clean(q.message, 80)}"
        for q in s.quarantine
    ]
    lines += [f"errors      {clean(code)}: {number}" for code, number in s.errors.items()]
    return ["", *lines] if lines else []
