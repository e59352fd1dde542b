"""Cores with a discipline in charge, for the tests of policies."""

from __future__ import annotations

from typing import Any

from kvyard.core.scheduler import Scheduler
from kvyard.sim import disciplines

from tests.core.harness import StepLog, run_step, scheduler_of, spec


def core(text: str, **changes: Any) -> Scheduler:  # noqa: ANN401 - any field of Limits
    """A small core with `NAME[,kind.parameter=value...]` in charge."""
    return scheduler_of(disciplines.make(*disciplines.parse(text)), **changes)


def arrive(scheduler: Scheduler, *requests: tuple[int, int, int], **changes: Any) -> None:  # noqa: ANN401
    """Add requests (id, prompt, most output)."""
    for id, prompt, output in requests:
        scheduler.add(spec(id, prompt, output, **{"arrived": 0.0, **changes}))


def steps(scheduler: Scheduler, count: int, start: int = 0) -> list[StepLog]:
    """So many steps, a second each."""
    return [run_step(scheduler, now=float(start + number)) for number in range(count)]


def scheduled(scheduler: Scheduler, now: float = 0.0) -> dict[int, int]:
    """What one step schedules."""
    return run_step(scheduler, now=now).scheduled
