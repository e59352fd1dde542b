"""What is kept of a sequence, where, and for how long: a long queue is as cheap as what waits in it is small."""

from __future__ import annotations

import numpy as np
import pytest
from kvyard.core.plan import Admitted
from kvyard.core.scheduler import Scheduler
from kvyard.core.sequence import IN_ROW
from kvyard.policy import Admission, RequestView, Snapshot

from tests.core.harness import commit, run_step, scheduler_of, spec
from tests.core.scripted import ScriptedAdmission, scripted_set


def _crowded(as_bytes: bool) -> Scheduler:
    """Two sequences in a pool that is too small for both: the second one is preempted and comes back."""
    scheduler = scheduler_of(scripted_set(), blocks=6)
    for id in (1, 2):
        new = spec(id, prompt_len=8, max_new=12, tokens=True, attached=b"of %d" % id)
        if as_bytes:
            assert isinstance(new.prompt, np.ndarray)
            new.prompt = new.prompt.tobytes()
        scheduler.add(new)
    return scheduler


def _admissions(scheduler: Scheduler) -> list[Admitted]:
    came: list[Admitted] = []
    while scheduler.has_work():
        plan = scheduler.schedule(float(scheduler.step))
        came += plan.admitted
        commit(scheduler, plan)
    return came


@pytest.mark.parametrize("as_bytes", [False, True])
def test_what_is_attached_comes_back_with_every_admission(as_bytes: bool) -> None:
    came = _admissions(_crowded(as_bytes))
    assert [(entry.id, entry.resumed) for entry in came] == [(1, False), (2, False), (2, True)]
    assert [(entry.attached, entry.prompt_len) for entry in came] == [(b"of 1", 8), (b"of 2", 8), (b"of 2", 8)]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_tokens_are_in_memory_once(as_bytes: bool) -> None:
    scheduler = _crowded(as_bytes)
    seq = scheduler.ledger.sequences[2]
    prompt = spec(2, prompt_len=8, tokens=True).prompt
    assert isinstance(prompt, np.ndarray)
    run_step(scheduler)
    assert seq.tokens is IN_ROW
    assert scheduler.ledger.cols.tokens[seq.row, :8].tolist() == prompt.tolist()
    preempted: list[int] = []
    while not preempted:
        preempted = run_step(scheduler).preempted
    assert preempted == [2]
    assert isinstance(seq.tokens, np.ndarray)
    assert seq.tokens.tolist() == [*prompt.tolist(), *[7] * (seq.total - 8)]
    assert scheduler.cancel([2]) == [2]
    assert seq.tokens is None


def test_a_view_is_made_when_a_policy_asks_and_stays_the_same() -> None:
    seen: list[RequestView] = []

    def admit(s: Snapshot) -> Admission:
        seen.extend(s.waiting)
        return Admission(s.waiting)

    scheduler = scheduler_of(scripted_set(admission=ScriptedAdmission(admit)), max_running=1)
    for id in (1, 2):
        scheduler.add(spec(id))
    seqs = [scheduler.ledger.sequences[id] for id in (1, 2)]
    assert [seq.view for seq in seqs] == [None, None]
    run_step(scheduler)
    assert [view.id for view in seen] == [1, 2]
    assert [seq.view for seq in seqs] == seen
    assert scheduler.ledger.views() == (seen[0],)
    while scheduler.has_work():
        run_step(scheduler)
    assert all(view is seen[1] for view in seen[2:]), "one object for one sequence, however often it is shown"
    assert [seq.view for seq in seqs] == [None, None], "the two would hold each other"


def test_an_ended_sequence_is_shown_without_being_held() -> None:
    """A policy that keeps an iterator over steps may be given one: the two would hold each other for ever."""
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1))
    seq = scheduler.ledger.sequences[1]
    scheduler.cancel([1])
    assert scheduler.ledger.view(seq).id == 1
    assert seq.view is None
