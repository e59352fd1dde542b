"""What policies see: the truth, as views, read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvyard.core.scheduler import Scheduler
from kvyard.core.snapshot import CoreSnapshot, CountsView, RunningColumns, View, WaitingView
from kvyard.policy import Columns, Counts, RequestView, Snapshot, Victims, Waiting

from tests.core.harness import Clock, commit, limits, run_step, spec
from tests.core.scripted import ScriptedPreemption, scripted_set


@pytest.fixture
def scheduler() -> Scheduler:
    """Two run, one of them in the middle of its prompt; one waits after a preemption and one for the first time."""
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), how="swap"))
    made = Scheduler(
        limits(blocks=6, swap_blocks=9, max_running=3, max_step_tokens=24, prefix_cache=True),
        scripted_set(preemption=preemption),
        clock_ns=Clock(),
        salt=b"s",
    )
    for id in (1, 2, 3):
        made.add(spec(id, prompt_len=8, max_new=5, tokens=True, priority=id, tenant="t", deadline=9.0))
    run_step(made, now=1.0)
    run_step(made, now=2.0)
    made.add(spec(4, prompt_len=20, max_new=2, tokens=True))
    return made


@pytest.mark.parametrize(
    ("protocol", "made"),
    [
        (Snapshot, CoreSnapshot),
        (RequestView, View),
        (Columns, RunningColumns),
        (Counts, CountsView),
        (Waiting, WaitingView),
    ],
)
def test_everything_that_is_promised_is_there(protocol: type, made: type) -> None:
    promised = [name for name in vars(protocol) if not name.startswith("_")]
    assert promised or protocol is Waiting
    for name in promised:
        assert hasattr(made, name), name


def test_the_snapshot_tells_the_truth(scheduler: Scheduler) -> None:
    s = scheduler.snapshot
    assert (s.step, s.now, s.block_size, s.blocks, s.budget) == (2, 2.0, 4, 6, 24)
    assert [view.id for view in s.running] == [1, 2]
    assert [view.id for view in s.waiting] == [3, 4]
    assert len(s.waiting) == 2
    assert (s.slots, s.max_running, s.decoding) == (1, 3, 2)
    assert s.free == 0
    assert s.free + scheduler.blocks_used == 6
    assert (s.count.preempted, s.count.admitted, s.count.finished) == (1, 3, 0)
    assert (s.count.decode_steps, s.count.last_prefill) == (1, 0)
    assert s.blocks_for(9) == 3
    assert s.preempted == (3,)
    assert (s.left, s.placed) == (22, 2)


def test_a_view_of_a_running_sequence(scheduler: Scheduler) -> None:
    view = scheduler.snapshot.running[1]
    assert (view.id, view.arrival, view.arrived, view.priority, view.tenant, view.deadline) == (
        2,
        2,
        2.0,
        2,
        "t",
        9.0,
    )
    assert (view.prompt_len, view.max_new, view.kv_max) == (8, 5, 12)
    assert (view.total, view.generated, view.remaining, view.computed, view.wanted) == (10, 2, 3, 9, 1)
    assert (view.blocks, view.hits, view.preemptions, view.kept) == (3, 0, 0, "none")


def test_views_of_waiting_sequences(scheduler: Scheduler) -> None:
    swapped, fresh = scheduler.snapshot.waiting
    assert (swapped.total, swapped.generated, swapped.computed, swapped.wanted) == (9, 1, 8, 1)
    assert (swapped.blocks, swapped.kept, swapped.preemptions, swapped.hits) == (0, "swapped", 1, 0)
    assert (fresh.total, fresh.computed, fresh.wanted, fresh.kept) == (20, 0, 20, "none")


def test_a_view_is_one_object_for_the_life_of_its_sequence(scheduler: Scheduler) -> None:
    view = next(iter(scheduler.snapshot.waiting))
    assert next(iter(scheduler.snapshot.waiting)) is view
    scheduler.cancel([1])
    run_step(scheduler, now=3.0)
    assert scheduler.snapshot.running[-1] is view
    assert len({view, *scheduler.snapshot.running}) == len(scheduler.snapshot.running)
    assert "sequence 3, running" in repr(view)


def test_running_is_a_sequence_of_views(scheduler: Scheduler) -> None:
    running = scheduler.snapshot.running
    assert len(running) == 2
    assert [view.id for view in reversed(running)] == [2, 1]
    assert [view.id for view in running[0:2]] == [1, 2]
    assert running[-1] in running
    assert bool(running)
    scheduler.cancel([1, 2])
    assert not running, "it reads through"


def test_columns_are_those_of_the_views(scheduler: Scheduler) -> None:
    s = scheduler.snapshot
    names = [name for name in vars(Columns) if not name.startswith("_")]
    assert {"id", "kv_max", "blocks", "arrived"} <= set(names)
    for name in names:
        column = getattr(s.cols, name)
        assert column.tolist() == [getattr(view, name) for view in s.running], name
        assert column.dtype == (np.float64 if name == "arrived" else np.int64)
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_a_snapshot_shows_the_step_as_it_goes_on(scheduler: Scheduler) -> None:
    plan = scheduler.schedule(3.0)
    assert scheduler.snapshot.placed == len(plan)
    assert scheduler.snapshot.left == 24 - int(plan.granted.sum())
    commit(scheduler, plan)


def test_nothing_can_be_written(scheduler: Scheduler) -> None:
    s = scheduler.snapshot
    targets: list[Any] = [s, s.waiting, s.cols, s.count, next(iter(s.waiting))]
    for target in targets:
        with pytest.raises(AttributeError, match="policies read"):
            target.free = 1
        with pytest.raises(AttributeError, match="policies read"):
            del target.free
