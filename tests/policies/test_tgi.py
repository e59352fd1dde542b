"""TGI: batches that are worth a break."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import run_all
from tests.policies.cores import arrive, core, scheduled, steps

LOAD = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=25)


def running(count: int) -> str:
    return f"tgi,admission.waiting_served_ratio=0.5,admission.max_waiting_tokens={count}"


def test_a_batch_joins_when_it_is_large_enough() -> None:
    scheduler = core(running(1000))
    arrive(scheduler, *((id, 4, 20) for id in range(1, 5)))
    steps(scheduler, 1)
    arrive(scheduler, (5, 4, 20))
    assert scheduled(scheduler) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert scheduler.wait_reason() == ("too few for a batch", 1001)
    arrive(scheduler, (6, 4, 20))
    assert scheduled(scheduler) == {5: 4, 6: 4}


def test_any_batch_joins_after_enough_decode_steps() -> None:
    scheduler = core(running(5))
    arrive(scheduler, *((id, 4, 20) for id in range(1, 5)))
    steps(scheduler, 1)
    arrive(scheduler, (5, 4, 20))
    granted = [log.scheduled for log in steps(scheduler, 7)]
    assert [5 in step for step in granted] == [False] * 5 + [True, True]
    assert granted[5] == {5: 4}


def test_prompts_of_a_batch_are_bound_and_never_cut() -> None:
    text = "tgi,admission.max_batch_prefill_tokens=40,prefill.max_batch_prefill_tokens=40"
    scheduler = core(text)
    arrive(scheduler, (1, 30, 2), (2, 11, 2), (3, 5, 2))
    assert scheduled(scheduler) == {1: 30}, "2 would make it 41, and holds 3 back"
    assert scheduled(scheduler) == {2: 11, 3: 5}


def test_with_chunking_decodes_go_on_and_the_last_prompt_is_cut() -> None:
    text = "tgi,admission.chunking=true,prefill.chunking=true,prefill.max_batch_prefill_tokens=20"
    scheduler = core(text)
    arrive(scheduler, (1, 4, 9), (2, 4, 9))
    steps(scheduler, 1)
    arrive(scheduler, (3, 10, 2), (4, 10, 2))
    assert scheduled(scheduler) == {1: 1, 2: 1, 3: 10, 4: 8}
    assert scheduled(scheduler) == {1: 1, 2: 1, 3: 1, 4: 2}


@settings(max_examples=40, deadline=None)
@given(load=LOAD, chunking=st.booleans())
def test_nothing_is_preempted(load: list[tuple[int, int]], chunking: bool) -> None:
    flag = str(chunking).lower()
    scheduler = core(f"tgi,admission.chunking={flag},prefill.chunking={flag}", blocks=40)
    arrive(scheduler, *((id, prompt, output) for id, (prompt, output) in enumerate(load, 1)))
    logs = run_all(scheduler)
    assert not [log for log in logs if log.preempted]
    assert [id for log in logs for id in log.cached] == list(range(1, len(load) + 1)), "first come, first served"


def test_a_step_is_prompts_or_decodes() -> None:
    scheduler = core("tgi")
    arrive(scheduler, *((id, 7, 9) for id in range(1, 20)))
    for log in run_all(scheduler):
        assert len(set(log.scheduled.values()) & {1}) == 0 or set(log.scheduled.values()) == {1}
