"""Orca: whole prompts, whole lives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import run_all
from tests.policies.cores import arrive, core, scheduled

LOAD = st.lists(st.tuples(st.integers(1, 32), st.integers(1, 30)), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(load=LOAD)
def test_prompts_are_never_cut_and_nothing_is_preempted(load: list[tuple[int, int]]) -> None:
    scheduler = core("orca", blocks=40, max_step_tokens=32)
    arrive(scheduler, *((id, prompt, output) for id, (prompt, output) in enumerate(load, 1)))
    for log in run_all(scheduler):
        assert not log.preempted
        for id in log.cached:
            assert log.scheduled[id] == load[id - 1][0]


def test_decodes_go_on_beside_a_prompt() -> None:
    scheduler = core("orca")
    arrive(scheduler, (1, 4, 5))
    scheduled(scheduler)
    arrive(scheduler, (2, 30, 5))
    assert scheduled(scheduler) == {1: 1, 2: 30}


def test_the_reservation_can_be_the_longest_of_all() -> None:
    """Vidur reserves the model's longest sequence for each request."""
    scheduler = core("orca,admission.reserve=80", blocks=64)
    arrive(scheduler, *((id, 4, 4) for id in range(1, 6)))
    assert list(scheduled(scheduler)) == [1, 2, 3], "20 blocks each of 64"


def test_a_batch_is_no_larger_than_asked() -> None:
    scheduler = core("orca,admission.batch=2")
    arrive(scheduler, *((id, 4, 4) for id in range(1, 6)))
    assert list(scheduled(scheduler)) == [1, 2]
    assert list(scheduled(scheduler)) == [1, 2]


def test_a_prompt_longer_than_a_step_waits_until_it_is_alone_and_goes_in_pieces() -> None:
    scheduler = core("orca", max_step_tokens=16)
    arrive(scheduler, (1, 4, 3), (2, 40, 1), (3, 2, 1))
    granted = [log.scheduled for log in run_all(scheduler)]
    assert granted == [{1: 4}, {1: 1}, {1: 1}, {2: 16}, {2: 16}, {2: 8, 3: 2}]


def test_prefix_hits_shorten_what_must_fit_in_a_step() -> None:
    scheduler = core("orca", max_step_tokens=16, prefix_cache=True)
    tokens = list(range(40))
    arrive(scheduler, (1, 40, 1), tokens=tokens)
    while scheduler.has_work():
        scheduled(scheduler)
    arrive(scheduler, (2, 4, 9))
    scheduled(scheduler)
    arrive(scheduler, (3, 40, 1), tokens=tokens)
    assert scheduled(scheduler) == {2: 1, 3: 4}, "36 of 40 tokens are cached"
