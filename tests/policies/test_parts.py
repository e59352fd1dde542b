"""The other built-in parts: each does what its description says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvyard.core.advice import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard.policy import KINDS, AdmissionPolicy, PreemptionPolicy, PrefillPolicy
from kvyard.policy.registry import list_policies, load, load_discipline
from kvyard_policies.chunks import DecodeFirstPrefill
from kvyard_policies.reserve import WholeLifeAdmission
from kvyard_policies.victims import FewestComputedPreemption
from kvyard_policies.vllm import VllmAdmission, VllmPreemption, VllmPrefill

from tests.core.harness import run_all, run_step, scheduler_of, spec

DISCIPLINES = [entry.name for entry in list_policies().policies if entry.kind == "discipline"]


def scheduler_for(discipline: str, **changes: Any) -> Scheduler:  # noqa: ANN401
    parts = load_discipline(discipline).parts
    made = {kind: load(kind, *parts[kind]).policy for kind in KINDS}
    admission, preemption, prefill = made["admission"], made["preemption"], made["prefill"]
    assert isinstance(admission, AdmissionPolicy)
    assert isinstance(preemption, PreemptionPolicy)
    assert isinstance(prefill, PrefillPolicy)
    return scheduler_of(PolicySet(admission, preemption, prefill, discipline=discipline), **changes)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_every_discipline_serves_a_crowd_under_pressure(discipline: str) -> None:
    scheduler = scheduler_for(discipline, blocks=24, max_step_tokens=32, swap_blocks=30)
    random = np.random.default_rng(5)
    for id in range(1, 61):
        scheduler.add(
            spec(id, int(random.integers(1, 60)), int(random.integers(1, 30)), priority=int(random.integers(0, 3)))
        )
    finished = {id: reason for log in run_all(scheduler, most=6000) for id, reason in log.finished}
    assert finished == dict.fromkeys(range(1, 61), "length")
    assert scheduler.blocks_used == 0
    assert scheduler.take_exits() == []


def test_the_disciplines_decide_differently() -> None:
    def decisions(discipline: str) -> str:
        scheduler = scheduler_for(discipline, blocks=40, max_step_tokens=600, max_model_len=1024, max_running=6)
        for id in range(1, 13):
            scheduler.add(spec(id, 1 + 23 * id % 90, 5 + 11 * id % 40, priority=(id * 7) % 4, arrived=8.0 * id))
        return str([log.scheduled for log in run_all(scheduler)])

    seen = {name: decisions(name) for name in DISCIPLINES}
    assert len(set(seen.values())) >= 3
    assert len({seen[name] for name in ("kvyard", "vllm", "vllm-priority")}) == 3


def test_whole_life_never_preempts() -> None:
    policies = PolicySet(WholeLifeAdmission(), VllmPreemption(), VllmPrefill())
    scheduler = scheduler_of(policies, blocks=14)
    for id in range(1, 30):
        scheduler.add(spec(id, 1 + id % 9, 1 + id % 17))
    logs = run_all(scheduler)
    assert not [log for log in logs if log.preempted]
    assert len({id for log in logs for id, _ in log.finished}) == 29


def test_whole_life_counts_what_running_ones_have_still_to_get() -> None:
    policies = PolicySet(WholeLifeAdmission(), VllmPreemption(), VllmPrefill())
    scheduler = scheduler_of(policies, blocks=8)
    scheduler.add(spec(1, prompt_len=8, max_new=9))  # 4 blocks for its life, 2 now
    run_step(scheduler)
    scheduler.add(spec(2, prompt_len=8, max_new=13))  # 5 blocks for its life
    scheduler.add(spec(3, prompt_len=8, max_new=9))
    assert run_step(scheduler).scheduled == {1: 1}, "the head is a barrier"
    scheduler.cancel([2])
    assert run_step(scheduler).scheduled == {1: 1, 3: 8}


def test_decode_first_bounds_a_step_by_its_chunk() -> None:
    policies = PolicySet(VllmAdmission(), VllmPreemption(), DecodeFirstPrefill(chunk=16))
    scheduler = scheduler_of(policies, max_step_tokens=64, max_model_len=1024, blocks=200)
    for id in (1, 2, 3):
        scheduler.add(spec(id, prompt_len=4, max_new=40))
    run_step(scheduler)
    scheduler.add(spec(4, prompt_len=100))
    logs = [run_step(scheduler) for _ in range(4)]
    assert [log.scheduled for log in logs] == [{1: 1, 2: 1, 3: 1, 4: 13}] * 4
    assert list(logs[0].scheduled) == [1, 2, 3, 4]


def test_a_chunk_full_of_decodes_still_lets_decodes_go() -> None:
    policies = PolicySet(VllmAdmission(), VllmPreemption(), DecodeFirstPrefill(chunk=2))
    scheduler = scheduler_of(policies)
    for id in (1, 2, 3):
        scheduler.add(spec(id, prompt_len=2, max_new=6))
    finished = {id for log in run_all(scheduler) for id, _ in log.finished}
    assert finished == {1, 2, 3}


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_fewest_computed_goes_first_in_its_way(how: str) -> None:
    policies = PolicySet(VllmAdmission(), FewestComputedPreemption(how=how), VllmPrefill())
    scheduler = scheduler_of(policies, blocks=9, swap_blocks=20)
    for id, length in ((1, 12), (2, 8), (3, 16)):
        scheduler.add(spec(id, prompt_len=length))
    run_step(scheduler)
    plan = scheduler.schedule(1.0)
    (entry,) = scheduler.take_record_parts().preempted
    assert (entry.id, entry.how, entry.tokens) == (2, how, 8)
    assert len(plan.copies) == (how == "swap")


def test_vllm_admits_nobody_in_a_step_that_preempted() -> None:
    policies = PolicySet(VllmAdmission(), VllmPreemption(), VllmPrefill())
    scheduler = scheduler_of(policies, blocks=5)
    scheduler.add(spec(1))
    scheduler.add(spec(2, prompt_len=9))
    run_step(scheduler)
    scheduler.add(spec(3, prompt_len=1, max_new=1))
    log = run_step(scheduler)
    assert log.preempted == [2]
    assert 3 not in log.scheduled
    assert scheduler.wait_reason()[0] == "after a preemption"


def test_vllms_long_prefill_threshold_counts_who_waits() -> None:
    policies = PolicySet(VllmAdmission(), VllmPreemption(), VllmPrefill(long_prefill=10))
    scheduler = scheduler_of(policies)
    scheduler.add(spec(1, prompt_len=30))
    assert run_step(scheduler).scheduled == {1: 30}, "alone it is not cut"
    scheduler.add(spec(2, prompt_len=30))
    assert run_step(scheduler).scheduled == {1: 1, 2: 10}


def test_vllms_watermark_holds_only_while_something_runs() -> None:
    policies = PolicySet(VllmAdmission(watermark=0.5), VllmPreemption(), VllmPrefill())
    scheduler = scheduler_of(policies, blocks=8)
    scheduler.add(spec(1, prompt_len=24))
    assert run_step(scheduler).scheduled == {1: 24}
    scheduler.add(spec(2, prompt_len=4))
    assert 2 not in run_step(scheduler).scheduled
