"""Several disciplines over the same arrivals on the same machine, and their figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvyard.core.conduct import ConductLimits
from kvyard.core.plan import Limits
from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.cost import Machine
from kvyard.sim.figures import totals
from kvyard.sim.simulation import UNDISTURBED, Progress, Run, Simulation

HEAD = (
    "DISCIPLINE",
    "QUEUE p50 / p99 s",
    "TTFT p50 / p99 s",
    "ITL p50 / p99 ms",
    "E2E p50 / p99 s",
    "TOKENS/s",
    "GOOD",
    "PREEMPTED",
    "RECOMPUTED",
    "RUNNING",
    "KV",
)


REFUSED = "REFUSED"
"""A column that is there only where a discipline refused any."""


def simulate(
    text: str,
    arrivals: Sequence[Arrival],
    machine: Machine,
    limits: Limits | None = None,
    progress: Progress | None = None,
    conduct: ConductLimits = UNDISTURBED,
) -> Run:
    """One discipline, as `disciplines.parse` reads it. Raises RegistryError, ParamError, Stalled."""
    policies = disciplines.make(*disciplines.parse(text))
    return Simulation(arrivals, policies, limits or machine.limits, machine.cost, conduct).to_the_end(progress)


def compare(
    texts: Iterable[str],
    arrivals: Sequence[Arrival],
    machine: Machine,
    limits: Limits | None = None,
    progress: Callable[[str], Progress] | None = None,
    conduct: ConductLimits = UNDISTURBED,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Total figures of each discipline as it is done."""
    blocks = (limits or machine.limits).blocks
    for text in texts:
        run = simulate(text, arrivals, machine, limits, progress(text) if progress else None, conduct)
        yield text, totals(run, machine.objective, blocks)


def table_of(results: Sequence[tuple[str, dict[str, Any]]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and a line for each discipline."""
    lines = [row(name, figures) for name, figures in results]
    if not any(figures["refused"] for _, figures in results):
        return HEAD, lines
    more = [f"{figures['refused']:,}" for _, figures in results]
    return (*HEAD, REFUSED), [(*line, refused) for line, refused in zip(lines, more, strict=True)]


def row(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """A discipline's line of the table under HEAD."""
    return (
        name,
        _pair(figures["queue_s"], 1),
        _pair(figures["ttft_s"], 1),
        _pair(figures["itl_s"], 1000),
        _pair(figures["e2e_s"], 1),
        f"{figures['output_tokens_per_s']:,.0f}",
        f"{figures['goodput']['share']:.0%}",
        f"{figures['preemptions']:,}",
        f"{figures['recomputed_tokens']:,}",
        f"{figures['mean_running']:.1f}",
        f"{figures['mean_kv_use']:.0%}",
    )


def _pair(values: dict[str, float | None], scale: float) -> str:
    shown = [values["p50"], values["p99"]]
    return " / ".join("-" if value is None else _digits(value * scale) for value in shown)


def _digits(value: float) -> str:
    """Three significant digits, without exponents."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
