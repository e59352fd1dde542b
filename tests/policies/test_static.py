"""Static batching."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import run_all
from tests.policies.cores import arrive, core, scheduled

LOAD = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=25)


def test_a_batch_is_no_larger_than_asked() -> None:
    scheduler = core("static,admission.batch=3")
    arrive(scheduler, *((id, 4, 2) for id in range(1, 8)))
    batches = [sorted(log.cached) for log in run_all(scheduler) if log.cached]
    assert batches == [[1, 2, 3], [4, 5, 6], [7]]


def test_a_batch_is_bound_by_whole_lives_not_by_prompts() -> None:
    scheduler = core("static", blocks=10)
    arrive(scheduler, (1, 4, 17), (2, 4, 17), (3, 4, 1))
    assert scheduled(scheduler) == {1: 4, 2: 4}, "5 blocks each are promised; 3 waits although 8 are free"


def test_all_prompts_of_a_batch_come_before_its_decodes() -> None:
    scheduler = core("static", max_step_tokens=32)
    arrive(scheduler, *((id, 20, 3) for id in range(1, 5)))
    granted = [log.scheduled for log in run_all(scheduler)]
    assert granted == [{1: 20, 2: 12}, {2: 8, 3: 20, 4: 4}, {4: 16}, *2 * [{1: 1, 2: 1, 3: 1, 4: 1}]]


@settings(max_examples=40, deadline=None)
@given(load=LOAD)
def test_nothing_is_preempted_and_batches_do_not_overlap(load: list[tuple[int, int]]) -> None:
    scheduler = core("static", blocks=40)
    arrive(scheduler, *((id, prompt, output) for id, (prompt, output) in enumerate(load, 1)))
    running: set[int] = set()
    order: list[int] = []
    for log in run_all(scheduler):
        assert not log.preempted
        if log.cached:
            assert not running, "a batch begins when nothing runs"
        running |= set(log.cached)
        order += log.cached
        running -= {id for id, _ in log.finished}
    assert order == list(range(1, len(load) + 1))
