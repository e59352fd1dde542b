"""The step-time model: each part of a step's work adds what it is said to."""

from __future__ import annotations

import pytest
from kvyard.core.scheduler import Scheduler
from kvyard.sim import disciplines
from kvyard.sim.cost import MACHINES, StepCost, copied_blocks

from tests.core.harness import Clock, spec
from tests.sim.loads import limits

FREE = StepCost(base=0, decode=0, prompt=0, context=0)


def scheduler(**changes: int) -> Scheduler:
    return Scheduler(limits(**changes), disciplines.make("vllm"), clock_ns=Clock())


def test_base_prompt_and_context_of_a_prefill() -> None:
    core = scheduler()
    core.add(spec(1, prompt_len=100))
    core.add(spec(2, prompt_len=50))
    plan = core.schedule(0.0)
    assert StepCost(3.0, 0, 0, 0).seconds(plan, 0, 150) == 3.0
    assert StepCost(0, 9.0, 2.0, 0).seconds(plan, 0, 150) == 300.0
    assert StepCost(0, 0, 0, 1.0).seconds(plan, 0, 150) == 150.0, "a chunk reads itself"
    assert StepCost(0, 0, 0, 0, pair=1.0).seconds(plan, 0, 150) == 100 * 50 + 50 * 25


def test_decodes_read_their_whole_context() -> None:
    core = scheduler()
    core.add(spec(1, prompt_len=100))
    plan = core.schedule(0.0)
    core.commit(plan, plan.ids.astype("int32"), plan.ids < 0)
    plan = core.schedule(1.0)
    assert StepCost(0, 5.0, 1.0, 0).seconds(plan, 1, 0) == 5.0
    assert StepCost(0, 0, 0, 1.0).seconds(plan, 1, 0) == 101.0
    assert StepCost(0, 0, 0, 0, pair=1.0).seconds(plan, 1, 0) == 0.0


def test_a_long_prompt_costs_the_same_pairs_in_chunks_as_whole() -> None:
    def pairs(step_tokens: int) -> float:
        core, total = scheduler(max_step_tokens=step_tokens, max_model_len=512), 0.0
        core.add(spec(1, prompt_len=400, max_new=1))
        while core.has_work():
            plan = core.schedule(0.0)
            total += StepCost(0, 0, 0, 0, pair=1.0).seconds(plan, 0, int(plan.granted.sum()))
            core.commit(plan, plan.ids[plan.samples].astype("int32"), plan.samples[plan.samples])
        return total

    assert pairs(400) == pytest.approx(400 * 200)
    assert pairs(64) == pytest.approx(400 * 200)


def test_copies_cost_by_the_block() -> None:
    core = Scheduler(
        limits(blocks=8, block_size=4, swap_blocks=8),
        disciplines.make("least-recompute", {"preemption": {"how": "swap"}}),
        clock_ns=Clock(),
    )
    core.add(spec(1, prompt_len=15, max_new=12))
    core.add(spec(2, prompt_len=12, max_new=12))
    for _ in range(20):
        plan = core.schedule(0.0)
        if plan.copies:
            break
        core.commit(plan, plan.ids[plan.samples].astype("int32"), plan.ids[plan.samples] < 0)
    assert copied_blocks(plan) >= 3
    assert StepCost(0, 0, 0, 0, copy=2.0).seconds(plan, 0, 0) == 2.0 * copied_blocks(plan)


@pytest.mark.parametrize("name", MACHINES)
def test_the_stated_machines_are_plausible(name: str) -> None:
    machine = MACHINES[name]
    cost, bounds = machine.cost, machine.limits
    assert machine.name == name
    assert 0.001 < cost.base < 0.1
    assert cost.prompt * bounds.max_step_tokens > cost.base, "a full step is bound by its prompts"
    assert cost.decode < cost.base and cost.context < cost.prompt
    assert bounds.blocks * bounds.block_size > bounds.max_model_len or bounds.blocks > 2000
    assert machine.objective.tpot > cost.base, "the objective can be met"
