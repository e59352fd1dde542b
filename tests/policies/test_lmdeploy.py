"""LMDeploy's turns."""

from __future__ import annotations

from tests.core.harness import run_step, spec
from tests.policies.cores import arrive, core, scheduled, steps

SMALL = "lmdeploy-turns,admission.max_prefill_token_num=16,prefill.max_prefill_token_num=16"


def test_short_prompts_go_by_size() -> None:
    scheduler = core(SMALL)
    arrive(scheduler, (1, 9, 2), (2, 3, 2), (3, 5, 2))
    assert list(scheduled(scheduler).items()) == [(2, 3), (3, 5)], "8 are left and 9 is not cut"
    assert scheduled(scheduler) == {1: 9}


def test_decodes_have_their_turns_while_half_of_the_places_are_taken() -> None:
    scheduler = core(SMALL + ",prefill.prefill_interval=4", max_running=2)
    arrive(scheduler, (1, 4, 30))
    steps(scheduler, 1)
    arrive(scheduler, (2, 4, 30))
    granted = [scheduled(scheduler) for _ in range(6)]
    assert [2 in step for step in granted] == [False, False, False, False, True, True]
    assert granted[4] == {2: 4}


def test_enough_waiting_prompt_tokens_make_a_prefill_turn() -> None:
    scheduler = core(SMALL, max_running=4)
    arrive(scheduler, (1, 4, 30), (2, 4, 30))
    steps(scheduler, 1)
    arrive(scheduler, (3, 15, 30))
    assert scheduled(scheduler) == {1: 1, 2: 1}, "15 tokens are too few"
    arrive(scheduler, (4, 1, 30))
    assert scheduled(scheduler) == {4: 1, 3: 15}


def test_a_long_prompt_has_every_fourth_turn() -> None:
    scheduler = core(SMALL, max_running=8, blocks=200)
    arrive(scheduler, (1, 40, 1), *((id, 16, 1) for id in range(2, 9)))
    granted = [scheduled(scheduler) for _ in range(4)]
    assert granted == [{2: 16}, {3: 16}, {4: 16}, {1: 16}]


def test_among_long_prompts_age_makes_up_for_size() -> None:
    first = []
    for wait in (1.0, 7.0):
        scheduler = core(SMALL, max_running=8, blocks=200)
        scheduler.add(spec(1, 60, 1, arrived=0.0))  # 4 chunks
        scheduler.add(spec(2, 20, 1, arrived=wait))  # 2 chunks
        first.append(list(run_step(scheduler, now=wait).scheduled))
    assert first == [[2], [1]], "after 7 seconds 4 chunks count as 1"


def test_a_long_prompt_under_way_ends_before_another_begins() -> None:
    scheduler = core(SMALL, max_running=8, blocks=200)
    arrive(scheduler, (1, 40, 1), (2, 40, 1))
    granted = [scheduled(scheduler) for _ in range(6)]
    assert granted[:3] == [{1: 16}, {1: 16}, {1: 8}]
    assert granted[3:] == [{2: 16}, {2: 16}, {2: 8}]


def test_a_long_queue_costs_no_more_than_its_first_part() -> None:
    scheduler = core(SMALL, max_running=2)
    arrive(scheduler, *((id, 8, 2) for id in range(1, 700)), (700, 1, 2))
    assert list(scheduled(scheduler)) == [1, 2], "the shortest stands behind those that are looked at"
