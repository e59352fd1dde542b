"""TensorRT-LLM: capacity to the end or to the next step, and prompts in units."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard_policies.trtllm import _greedy, _in_turn

from tests.core.harness import run_all
from tests.policies.cores import arrive, core, scheduled, steps

WANTED = st.lists(st.integers(1, 200), min_size=1, max_size=12)
LOAD = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=25)


@settings(max_examples=100)
@given(wanted=WANTED, left=st.integers(0, 600), unit=st.integers(1, 32))
@pytest.mark.parametrize("divide", [_greedy, _in_turn])
def test_shares_fit_and_cut_chunks_are_whole_units(divide, wanted, left, unit) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    shares = divide(wanted, left, unit)
    assert len(shares) == len(wanted)
    assert sum(shares) <= left
    for share, want in zip(shares, wanted, strict=True):
        assert 0 <= share <= want
        assert share == want or share % (max(1, min(unit, left)) if divide is _in_turn else unit) == 0


@settings(max_examples=100)
@given(wanted=WANTED, left=st.integers(0, 600), unit=st.integers(1, 32))
def test_equal_progress_is_equal(wanted: list[int], left: int, unit: int) -> None:
    shares = _in_turn(wanted, left, unit)
    cut = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    if cut:
        assert max(cut) - min(cut) <= unit, "nobody is more than a round ahead of another that is not done"
        assert left - sum(shares) < unit, "what is left is no unit"


def test_first_come_first_served_fills_one_after_the_other() -> None:
    assert _greedy([10, 50, 6], 30, 8) == [10, 16, 0]
    assert _greedy([10, 50, 3], 30, 8) == [10, 16, 3], "what is left of a cut chunk may end another prompt"


@settings(max_examples=100)
@given(wanted=WANTED, left=st.integers(1, 600), unit=st.integers(1, 1000))
def test_under_equal_progress_the_first_never_stands_still(wanted: list[int], left: int, unit: int) -> None:
    assert _in_turn(wanted, left, unit)[0] > 0


def test_under_equal_progress_a_long_prompt_moves_on_beside_decodes_and_short_ones() -> None:
    scheduler = core("trtllm-no-evict,prefill.chunks=equal-progress,prefill.unit=16", max_step_tokens=16)
    arrive(scheduler, (1, 100, 2), (2, 4, 100))
    steps(scheduler, 1)
    for id in range(3, 30):
        arrive(scheduler, (id, 4, 6))
        log = steps(scheduler, 1)[0]
        if 1 in log.sampled:
            break
        assert log.scheduled[1] > 0
    assert 1 in log.sampled


def test_equal_progress_in_the_core() -> None:
    scheduler = core("trtllm-no-evict,prefill.chunks=equal-progress,prefill.unit=8", max_step_tokens=32)
    arrive(scheduler, (1, 60, 2), (2, 20, 2))
    assert scheduled(scheduler) == {1: 16, 2: 16}
    arrive(scheduler, (3, 60, 2))
    assert scheduled(scheduler) == {1: 16, 2: 4, 3: 8}, "a newcomer takes part in the division at once"


@settings(max_examples=40, deadline=None)
@given(load=LOAD)
def test_no_evict_never_preempts(load: list[tuple[int, int]]) -> None:
    scheduler = core("trtllm-no-evict", blocks=30)
    arrive(scheduler, *((id, prompt, output) for id, (prompt, output) in enumerate(load, 1)))
    logs = run_all(scheduler)
    assert not [log for log in logs if log.preempted]
    assert sum(len(log.finished) for log in logs) == len(load)


def test_max_utilization_admits_what_no_evict_does_not() -> None:
    load = [(id, 8, 40) for id in range(1, 7)]
    wide, safe = core("trtllm-max-utilization", blocks=24), core("trtllm-no-evict", blocks=24)
    arrive(wide, *load)
    arrive(safe, *load)
    assert len(scheduled(wide)) == 6 > len(scheduled(safe)) == 2


def test_the_latest_arrival_is_paused_though_another_was_admitted_later() -> None:
    scheduler = core("trtllm-max-utilization", blocks=6, max_running=3)
    arrive(scheduler, (2, 7, 9), (3, 7, 9))
    steps(scheduler, 1)
    arrive(scheduler, (1, 7, 9))  # its arrival number is the smallest: it came back to the front of the queue
    preempted: list[int] = []
    while not preempted:
        preempted = steps(scheduler, 1)[0].preempted
    assert preempted[0] == 3


def test_nobody_comes_in_behind_a_pause() -> None:
    scheduler = core("trtllm-max-utilization", blocks=8)
    arrive(scheduler, *((id, 6, 12) for id in range(1, 9)))
    for log in run_all(scheduler):
        assert not (log.preempted and (log.cached or log.resumed))
