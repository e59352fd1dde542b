"""Preemption by swap beside the prefix cache, through the real loop: blocks keep their owners and their contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvyard.core.policy_set import PolicySet
from kvyard.engine.loading import Loaded, load
from kvyard.policy import Admission, RequestView, Snapshot, Victims

from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill
from tests.engine.rig import GREEDY, Rig
from tests.engine.tiny import LLAMA, random_tensors, write_folder

VOCAB = LLAMA["vocab_size"]


def prompt_of(length: int, first: int) -> list[int]:
    return [(first * 31 + i * i * 7 + i) % VOCAB for i in range(length)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = write_folder(tmp_path_factory.mktemp("tiny"), LLAMA, random_tensors(LLAMA))
    quiet: Callable[[str, float], None] = lambda what, fraction: None  # noqa: E731 - a name for mypy
    return load(str(folder), device="cpu", dtype="float32", deterministic=True, block_size=4, progress=quiet)


def test_PREEMPT_13_blocks_of_a_restored_sequence_are_its_own(tiny: Loaded) -> None:
    """A goes out and comes back beside B, with whom it shares 64 tokens; then A ends and its cache is evicted."""
    shared = prompt_of(64, 1)
    a, b = [*shared, *prompt_of(5, 2)], [*shared, *prompt_of(6, 3)]
    quiet = Rig(tiny, hashes=True)
    (alone,) = quiet.submit(b, 120, GREEDY)
    quiet.run()

    first: list[int] = []
    preemption = ScriptedPreemption(_only(first))
    policies = PolicySet(ScriptedAdmission(lambda s: Admission(s.waiting)), preemption, ScriptedPrefill())
    rig = Rig(tiny, policies, hashes=True, blocks=60, swap_blocks=40, prefix_cache=True)
    first += rig.submit(a, 24, GREEDY)
    rig.step()
    (other,) = rig.submit(b, 120, GREEDY)
    rig.step()
    assert rig.got[other].cached == 64
    rig.submit(prompt_of(130, 4), 10, GREEDY)  # takes what is left, so that A is put out, and ends soon
    ways: list[str] = []
    while rig.got[first[0]].finish == "":
        rig.step()
        ways += [entry.how for entry in rig.records[-1].preempted]
    assert ways == ["swap"]
    assert rig.got[first[0]].finish == "length"
    evicted = rig.scheduler.ledger.index
    assert evicted is not None
    before = evicted.evicted
    for number in range(6):  # other prompts push everything that nobody holds out of the cache
        rig.submit(prompt_of(90, 10 + number), 1, GREEDY)
        for _ in range(3):
            rig.step()
    assert evicted.evicted > before + 60
    assert rig.got[other].finish == "", "it was meant to decode all the while"
    rig.run()
    assert rig.got[other].hashes == quiet.got[alone].hashes


def _only(ids: list[int]) -> Callable[[Snapshot, RequestView, str], Victims]:
    """The one in `ids` gives way, by swap; else the newest."""

    def decide(s: Snapshot, who: RequestView, cause: str) -> Victims:
        chosen = [view for view in s.running if view.id in ids]
        return Victims([*chosen, *(view for view in reversed(s.running) if view.id not in ids)], how="swap")

    return decide
