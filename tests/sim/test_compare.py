"""Several disciplines side by side: no two decide alike, and the table says what the figures say."""

from __future__ import annotations

from hashlib import sha256
from itertools import combinations

import numpy as np
from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.compare import HEAD, compare, row, table_of
from kvyard.sim.simulation import Simulation

from tests.sim.loads import COST, crowd, limits, machine

LIMITS = limits(blocks=160, max_running=14, max_step_tokens=700, max_model_len=2048, swap_blocks=200)


def comparison_load() -> list[Arrival]:
    """Bursts and pauses, short and long, more asked for than got: what each discipline is about occurs."""
    load = crowd(160, seed=11, gap=0.06, spare=120)
    draw = np.random.default_rng(12)
    long = [
        Arrival(float(draw.uniform(0, 8)), int(draw.integers(600, 1500)), 20, 40, "few", 1, 30.0) for _ in range(12)
    ]
    return sorted([*load, *long], key=lambda arrival: arrival.at)


def decisions(name: str, load: list[Arrival]) -> str:
    """A digest of every step's plan."""
    simulation = Simulation(load, disciplines.make(name), LIMITS, COST)
    digest = sha256()
    schedule = simulation.scheduler.schedule

    def noting(now: float):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a Plan
        plan = schedule(now)
        if len(plan):
            digest.update(plan.ids.tobytes() + plan.granted.tobytes())
        return plan

    simulation.scheduler.schedule = noting  # type: ignore[method-assign]
    run = simulation.to_the_end()
    assert run.exits == []
    return digest.hexdigest()


def test_no_two_disciplines_decide_alike() -> None:
    load = comparison_load()
    found = {name: decisions(name, load) for name in disciplines.names()}
    alike = [pair for pair in combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert alike == []


def test_the_comparison_has_a_line_for_each() -> None:
    names = ["vllm", "static", "sarathi,prefill.chunk=64"]
    results = list(compare(names, crowd(40), machine()))
    assert [name for name, _ in results] == names
    lines = [row(name, totals) for name, totals in results]
    assert all(len(line) == len(HEAD) for line in lines)
    by_name = dict(results)
    assert by_name["static"]["ttft_s"]["p50"] > by_name["vllm"]["ttft_s"]["p50"]
    assert by_name["sarathi,prefill.chunk=64"]["itl_s"]["p99"] < by_name["vllm"]["itl_s"]["p99"]


def test_refused_requests_have_a_column_where_there_are_any() -> None:
    load = crowd(10)
    served = list(compare(["vllm", "static"], load, machine()))
    head, lines = table_of(served)
    assert head == HEAD and lines == [row(name, totals) for name, totals in served]
    late = "deadline,admission.late=refuse,admission.patience=0.5"
    crowded = list(compare(["vllm", late], crowd(80, gap=0.001), machine(max_running=2)))
    head, lines = table_of(crowded)
    assert head == (*HEAD, "REFUSED")
    refused = dict(crowded)[late]["refused"]
    assert refused > 0
    assert [line[-1] for line in lines] == ["0", str(refused)]
    assert all(len(line) == len(head) for line in lines)


def test_numbers_are_short() -> None:
    name, totals = next(iter(compare(["vllm"], [Arrival(0.0, 10, 1, 1)], machine())))
    line = row(name, totals)
    assert line[3] == "- / -", "an answer of one token has no time between tokens"
    assert all(len(cell) < 24 for cell in line)


def test_other_limits_than_the_machines() -> None:
    (_, tight), (_, wide) = (
        next(iter(compare(["vllm"], crowd(60), machine(), limits(blocks=blocks)))) for blocks in (30, 600)
    )
    assert tight["preemptions"] > 0 == wide["preemptions"]
