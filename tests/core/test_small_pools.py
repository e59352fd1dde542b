"""The disciplines people use, in pools that are exactly large enough or much too small."""

from __future__ import annotations

from collections import Counter

import pytest
from kvyard.core.policy_set import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard.policy.registry import load, load_discipline

from tests.core.harness import run_step, scheduler_of, spec

DISCIPLINES = ("kvyard", "vllm", "sarathi")


def policies(discipline: str) -> PolicySet:
    parts = load_discipline(discipline).parts
    admission, preemption, prefill = (
        load(kind, *parts[kind]).policy for kind in ("admission", "preemption", "prefill")
    )
    return PolicySet(admission, preemption, prefill)  # type: ignore[arg-type]  # each of its kind


def serving(discipline: str, count: int, outputs: int, prompt: int, blocks: int, prefix_cache: bool) -> Scheduler:
    """`count` sequences, blocks of 16."""
    scheduler = scheduler_of(
        policies(discipline),
        blocks=blocks,
        block_size=16,
        max_running=64,
        max_step_tokens=512,
        max_model_len=256,
        prefix_cache=prefix_cache,
    )
    for id in range(1, count + 1):
        scheduler.add(spec(id, prompt_len=prompt, max_new=outputs, tokens=True))
    return scheduler


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_PREEMPT_07_nobody_is_preempted_again_and_again(discipline: str, prefix_cache: bool) -> None:
    """64 sequences of 200 tokens in a pool for two of them. Every step places somebody, and all end."""
    scheduler = serving(discipline, 64, 200, prompt=8, blocks=26, prefix_cache=prefix_cache)
    times: Counter[int] = Counter()
    ended = 0
    steps = 0
    while scheduler.has_work():
        assert steps < 64 * 200, "no end"
        log = run_step(scheduler, now=steps * 0.01, check=not steps % 50)
        assert log.scheduled, "a step in which nothing advances"
        times.update(log.preempted)
        ended += len(log.finished)
        steps += 1
    assert ended == 64
    assert 0 < max(times.values()) <= 8
    assert scheduler.take_exits() == []


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_BOUNDARY_06_two_that_fit_exactly_never_preempt_each_other(discipline: str, prefix_cache: bool) -> None:
    """10 blocks of 16; a prompt of 16 and 64 outputs leave 79 tokens in KV: the last token needs no place."""
    scheduler = serving(discipline, 2, 64, prompt=16, blocks=10, prefix_cache=prefix_cache)
    finished = 0
    while scheduler.has_work():
        log = run_step(scheduler)
        assert log.preempted == []
        assert log.plan is not None
        for row in scheduler.request_rows(2):
            assert row.blocks <= -(-(row.computed + 1) // 16)
        assert scheduler.blocks_used <= 10
        finished += len(log.finished)
    assert finished == 2
