"""SGLang: the ratio's life, the order of the queue, retraction, and chunks of whole pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kvyard.core.scheduler import Scheduler
from kvyard_policies.sglang import SglangAdmission

from tests.core.harness import run_all, run_step
from tests.policies.cores import arrive, core, scheduled, steps


def policy(scheduler: Scheduler) -> SglangAdmission:
    admission = scheduler.policies.admission
    assert isinstance(admission, SglangAdmission)
    return admission


def test_the_ratio_falls_with_decode_steps_and_no_lower_than_its_floor() -> None:
    scheduler = core("sglang,admission.decay=10", blocks=52, max_running=2)
    arrive(scheduler, (1, 4, 100))
    steps(scheduler, 1)
    arrive(scheduler, (2, 4, 200))  # needs the whole pool: it waits, and the policy is asked
    seen = []
    for number in range(30):
        policy(scheduler)._full = (-1, -1)  # asked in every step, as if somebody had left
        steps(scheduler, 1, number)
        seen.append(policy(scheduler).ratio)
    fall = (0.7 - 0.098) / 10
    assert seen[1] - seen[2] == pytest.approx(fall)
    assert seen[-1] == pytest.approx(0.098)
    assert all(a >= b for a, b in pairwise(seen))


def test_conservativeness_scales_the_first_ratio() -> None:
    for conservativeness, first in ((1.0, 0.7), (0.5, 0.35), (3.0, 1.0)):
        scheduler = core(f"sglang,admission.conservativeness={conservativeness}")
        arrive(scheduler, (1, 4, 4))
        steps(scheduler, 1)
        assert policy(scheduler).ratio == pytest.approx(first)


def test_a_retraction_raises_the_ratio_until_nothing_runs() -> None:
    scheduler = core("sglang,admission.conservativeness=0.01", blocks=20, max_running=8)
    arrive(scheduler, *((id, 8, 20) for id in range(1, 9)))
    before = retracted = 0.0
    while scheduler.has_work():
        log = run_step(scheduler)
        if log.preempted and not retracted:
            before = policy(scheduler).ratio
            run_step(scheduler)
            retracted = policy(scheduler).ratio
    assert before == pytest.approx(0.007)
    assert retracted == 1.0, "(outputs + 20 n) / (max + 1) is above 1 here"


def test_the_least_advanced_goes_and_to_the_tail() -> None:
    scheduler = core("sglang,admission.conservativeness=0.01,admission.clip=1", blocks=10, max_running=3)
    arrive(scheduler, (1, 8, 12), (2, 7, 12))
    steps(scheduler, 3)
    arrive(scheduler, (3, 4, 12))
    steps(scheduler, 1)
    arrive(scheduler, (4, 4, 1))
    preempted: list[int] = []
    for number in range(20):
        preempted = preempted or steps(scheduler, 1, number)[0].preempted
        waiting = [row.id for row in scheduler.request_rows(9) if row.state != "running"]
        if preempted:
            break
    assert preempted == [3], "it came last and has the fewest output tokens"
    assert waiting == [4, 3]


def test_among_equals_the_longest_prompt_goes() -> None:
    scheduler = core("sglang,admission.conservativeness=0.01,admission.clip=1", blocks=8, max_running=3)
    arrive(scheduler, (1, 4, 12), (2, 8, 12))
    preempted: list[int] = []
    while not preempted:
        preempted = steps(scheduler, 1)[0].preempted
    assert preempted == [2]


@pytest.mark.parametrize(("order", "first"), [("fcfs", 1), ("lof", 3)])
def test_the_order_of_the_queue(order: str, first: int) -> None:
    scheduler = core(f"sglang,admission.order={order}", max_running=1)
    arrive(scheduler, (1, 4, 4), (2, 4, 6), (3, 4, 9))
    assert list(scheduled(scheduler)) == [first]


def test_the_longest_cached_prefix_first() -> None:
    scheduler = core("sglang,admission.order=lpm", prefix_cache=True, max_running=1)
    tokens = list(range(24))
    arrive(scheduler, (1, 24, 1), tokens=tokens)
    run_all(scheduler)
    arrive(scheduler, (2, 24, 1), tokens=[t + 100 for t in tokens])
    arrive(scheduler, (3, 24, 1), tokens=[*tokens[:8], *(t + 200 for t in tokens[8:])])
    arrive(scheduler, (4, 24, 1), tokens=[*tokens[:16], *(t + 300 for t in tokens[16:])])
    assert [list(scheduled(scheduler)) for _ in range(3)] == [[4], [3], [2]]


def test_a_long_queue_is_served_in_order_whatever_is_asked() -> None:
    scheduler = core("sglang,admission.order=lof", max_running=1)
    arrive(scheduler, *((id, 4, id % 50 + 1) for id in range(1, 140)))
    assert list(scheduled(scheduler)) == [1]


def test_decodes_wait_for_prompts_unless_they_are_mixed() -> None:
    for text, expected in (("sglang", {2: 30}), ("sglang,prefill.mixed=true", {2: 30, 1: 1})):
        scheduler = core(text)
        arrive(scheduler, (1, 4, 9))
        steps(scheduler, 1)
        arrive(scheduler, (2, 30, 9))
        assert scheduled(scheduler) == expected


def test_mixed_decodes_are_charged_first() -> None:
    scheduler = core("sglang,prefill.mixed=true,prefill.chunk=16", max_step_tokens=64)
    arrive(scheduler, (1, 4, 9), (2, 4, 9))
    steps(scheduler, 1)
    arrive(scheduler, (3, 40, 9))
    assert scheduled(scheduler) == {3: 12, 1: 1, 2: 1}, "14 are left of 16, floored to blocks of 4"


def test_chunks_are_whole_blocks_and_one_prompt_is_under_way() -> None:
    scheduler = core("sglang,prefill.chunk=30", max_step_tokens=64)
    arrive(scheduler, (1, 50, 2), (2, 50, 2))
    assert scheduled(scheduler) == {1: 28}
    assert scheduled(scheduler) == {1: 22, 2: 8}
    assert scheduled(scheduler) == {2: 28}
    assert scheduled(scheduler) == {2: 14}


def test_what_fits_the_pool_exactly_is_served() -> None:
    scheduler = core("sglang", blocks=8)
    arrive(scheduler, (1, 20, 13))
    logs = run_all(scheduler)
    assert logs[-1].finished == [(1, "length")]


def test_admission_stays_closed_until_a_request_leaves() -> None:
    scheduler = core("sglang", blocks=20, max_running=4)
    arrive(scheduler, (1, 20, 6))
    steps(scheduler, 1)
    arrive(scheduler, (2, 40, 30), (3, 2, 2))
    for number in range(4):
        run_step(scheduler, now=float(number))
        assert scheduler.wait_reason()[0] in ("", "full until a request leaves")
    assert scheduler.wait_reason()[0] == "full until a request leaves"
    assert list(scheduled(scheduler)) == [1]
    assert 2 in scheduled(scheduler)


@pytest.mark.parametrize("text", ["sglang", "sglang,prefill.mixed=true"])
def test_a_chunk_smaller_than_a_block_is_a_block(text: str) -> None:
    scheduler = core(f"{text},prefill.chunk=1")
    arrive(scheduler, (1, 10, 2), (2, 10, 2))
    logs = run_all(scheduler)
    assert [log.scheduled for log in logs[:3]] == [{1: 4}, {1: 4}, {1: 2}]
    assert not any(log.overrides for log in logs)


@pytest.mark.parametrize("text", ["sglang", "sglang,prefill.mixed=true"])
def test_a_step_smaller_than_a_block_is_used(text: str) -> None:
    scheduler = core(text, max_step_tokens=3)
    arrive(scheduler, (1, 10, 2), (2, 10, 2))
    logs = run_all(scheduler)
    assert logs[0].scheduled == {1: 3}
    assert not any(log.overrides for log in logs)
