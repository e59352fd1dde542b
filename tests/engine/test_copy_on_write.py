"""The sequences of one request through the real loop: each is what it would be alone; the prompt is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from kvyard.core.policy_set import PolicySet
from kvyard.engine.loading import Loaded, load
from kvyard.link.messages import Sampling
from kvyard.policy import Admission, Victims
from kvyard.policy.decisions import How

from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill
from tests.engine.rig import Got, Rig
from tests.engine.tiny import LLAMA, random_tensors, write_folder

VOCAB = LLAMA["vocab_size"]
WARM = Sampling(seed=9, temperature=1.0, ignore_eos=True, prompt_logprobs=1, repetition_penalty=1.2)
LENGTHS = (1, 3, 4, 5, 13, 16, 17)
"""Blocks have 4 tokens."""


def prompt_of(length: int) -> list[int]:
    return [(length * 31 + i * i * 7 + i) % VOCAB for i in range(length)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder: Path = write_folder(tmp_path_factory.mktemp("tiny"), LLAMA, random_tensors(LLAMA))
    quiet: Callable[[str, float], None] = lambda what, fraction: None  # noqa: E731 - a name for mypy
    return load(str(folder), device="cpu", dtype="float32", deterministic=True, block_size=4, progress=quiet)


@pytest.fixture(scope="module")
def alone(tiny: Loaded) -> dict[tuple[int, int], Got]:
    """Every prompt's sequences 0 to 3, each alone."""
    rig = Rig(tiny, hashes=True)
    found: dict[tuple[int, int], Got] = {}
    for length in LENGTHS:
        for index in range(4):
            (id,) = rig.submit(prompt_of(length), 9, WARM, first_index=index)
            rig.run()
            found[length, index] = rig.got[id]
    return found


def check(rig: Rig, ids: dict[int, list[int]], alone: dict[tuple[int, int], Got], gone: tuple[int, ...] = ()) -> None:
    for length, sequences in ids.items():
        for index, id in enumerate(sequences):
            if id not in gone:
                # What the prefix cache gave is told of a request, not of each of its sequences.
                assert replace(rig.got[id], cached=0) == replace(alone[length, index], cached=0), (length, index)
    assert rig.scheduler.blocks_used == 0
    assert rig.scheduler.ledger.host.used == 0


def computed(rig: Rig) -> int:
    return sum(record.prompt_tokens + record.decode_tokens for record in rig.records)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("budget", [5, 64])
def test_each_is_what_it_would_be_alone(
    tiny: Loaded, alone: dict[tuple[int, int], Got], budget: int, prefix_cache: bool
) -> None:
    for length in LENGTHS:
        rig = Rig(tiny, hashes=True, max_step_tokens=budget, prefix_cache=prefix_cache)
        ids = {length: rig.submit(prompt_of(length), 9, WARM, n=4)}
        rig.run()
        check(rig, ids, alone)
        assert computed(rig) == length + 3 + 4 * 8, "the prompt once, and its last token by each"
        assert len({tuple(rig.got[id].tokens) for id in ids[length]}) > 1


def pressed(tiny: Loaded, how: How, **limits: int) -> Rig:
    """A pool for about a third of what runs; the newest gives way, in either way."""
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(list(reversed(s.running)), how=how))
    policies = PolicySet(ScriptedAdmission(lambda s: Admission(s.waiting)), preemption, ScriptedPrefill())
    return Rig(tiny, policies, hashes=True, blocks=22, max_step_tokens=17, **limits)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(("how", "swap_blocks"), [("recompute", 0), ("swap", 64), ("swap", 5)])
def test_under_pressure(
    tiny: Loaded, alone: dict[tuple[int, int], Got], how: How, swap_blocks: int, prefix_cache: bool
) -> None:
    rig = pressed(tiny, how, swap_blocks=swap_blocks, prefix_cache=prefix_cache)
    ids = {length: rig.submit(prompt_of(length), 9, WARM, n=4) for length in LENGTHS}
    rig.run()
    check(rig, ids, alone)
    assert sum(len(record.preempted) for record in rig.records) > 3


def test_any_of_them_may_be_cancelled_or_fail(tiny: Loaded, alone: dict[tuple[int, int], Got]) -> None:
    random = Random(4)
    for _ in range(6):
        rig = pressed(tiny, random.choice(("recompute", "swap")), swap_blocks=20)
        ids = {length: rig.submit(prompt_of(length), 9, WARM, n=4) for length in LENGTHS}
        every = [id for sequences in ids.values() for id in sequences]
        gone: list[int] = []
        while rig.scheduler.has_work():
            rig.step()
            if random.random() < 0.15:
                gone.append(random.choice(every))
                rig.cancel(gone[-1])
        check(rig, ids, alone, tuple(gone))


def test_greedy_ones_are_all_the_same(tiny: Loaded) -> None:
    rig = Rig(tiny, hashes=True)
    ids = rig.submit(prompt_of(13), 9, msgspec.structs.replace(WARM, temperature=0.0), n=4)
    rig.run()
    assert all(replace(rig.got[id], cached=0) == replace(rig.got[ids[0]], cached=0) for id in ids)


def test_after_an_engines_death_each_goes_on_behind_what_it_has_sent(
    tiny: Loaded, alone: dict[tuple[int, int], Got]
) -> None:
    """Sequences of one request come back with tokens of their own, one of them with none."""
    rig = Rig(tiny, hashes=True)
    length = 17
    sent = (3, 0, 7, 1)
    ids = [
        rig.add(1, index, 4, prompt_of(length), 9, WARM, alone[length, index].tokens[:count])
        for index, count in enumerate(sent)
    ]
    rig.run()
    for index, (id, count) in enumerate(zip(ids, sent, strict=True)):
        assert rig.got[id].hashes == alone[length, index].hashes[count:]
        assert rig.got[id].prompts == ([] if count else alone[length, index].prompts)
    # The scored prompt is computed by its own sequence, and once more for the three others.
    assert computed(rig) < 2 * length + 3 + sum(sent) + 4 * 9
