"""Log-probabilities of prompts through the real loop: the right numbers, once, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvyard.engine.backends.base import SCORED_PIECE, Batch
from kvyard.engine.loading import Loaded, load
from kvyard.engine.prompt_scores import PromptScores
from kvyard.link.messages import Sampling, Sequence, TokenLogprobs
from torch import Tensor

from tests.engine.rig import GREEDY, Got, Rig
from tests.engine.tiny import LLAMA, dense_logits, random_tensors, write_folder

VOCAB = LLAMA["vocab_size"]
SCORED = Sampling(seed=1, temperature=0.0, ignore_eos=True, prompt_logprobs=3)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first * 31 + i * i * 7 + i) % VOCAB for i in range(length)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A random model with 97 tokens, deterministic, blocks of 4."""
    folder = write_folder(tmp_path_factory.mktemp("tiny"), LLAMA, random_tensors(LLAMA))
    return _load(folder, block_size=4)


def _load(path: Path, block_size: int) -> Loaded:
    quiet: Callable[[str, float], None] = lambda what, fraction: None  # noqa: E731 - a name for mypy
    return load(str(path), device="cpu", dtype="float32", deterministic=True, block_size=block_size, progress=quiet)


def check(
    entries: list[TokenLogprobs | None], prompt: list[int], logits: Tensor, top: int, near: float = 1e-4
) -> None:
    """`logits` are float64 `[t, vocab]` of every position."""
    expected = torch.log_softmax(logits.double(), dim=1)
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for at, (token, entry) in enumerate(zip(prompt[1:], entries[1:], strict=True)):
        assert entry is not None
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(expected[at, token]), abs=near)
        least, most = (int((expected[at] > expected[at, token] + margin).sum()) for margin in (near, -near))
        assert 1 + least <= entry.rank <= max(1, most)
        best = expected[at].topk(top)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=near)
        for id, value in entry.top:
            assert float(expected[at, id]) == pytest.approx(value, abs=near)


def dense(prompt: list[int]) -> Tensor:
    return dense_logits(LLAMA, random_tensors(LLAMA), prompt)


def solo(tiny: Loaded, prompt: list[int], sampling: Sampling = SCORED, max_new: int = 4, **limits: int) -> Got:
    rig = Rig(tiny, None, hashes=True, **limits)
    (id,) = rig.submit(prompt, max_new, sampling)
    rig.run()
    return rig.got[id]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 63, 64, 65, 131])
def test_they_are_the_log_softmax_of_a_dense_float64_decoder(tiny: Loaded, length: int) -> None:
    prompt = prompt_of(length)
    (entries,) = solo(tiny, prompt, max_step_tokens=256).prompts
    check(entries, prompt, dense(prompt), 3)


@pytest.mark.parametrize("budget", [1, 3, 16, 50])
def test_chunks_change_nothing(tiny: Loaded, budget: int) -> None:
    prompt = prompt_of(40)
    whole, cut = solo(tiny, prompt), solo(tiny, prompt, max_step_tokens=budget)
    assert whole.prompts == cut.prompts
    assert whole.hashes == cut.hashes


def test_the_default_model_against_torch(default_model: Path) -> None:
    loaded = _load(default_model, 16)
    prompt = [(i * 7919 + 5) % 49000 for i in range(SCORED_PIECE + 9)]
    rig = Rig(loaded, max_step_tokens=50)
    (id,) = rig.submit(prompt, 1, SCORED)
    rig.run()
    (entries,) = rig.got[id].prompts
    logits = loaded.backend.forward(_every_position(prompt, 16))
    check(entries, prompt, logits, 3, near=1e-6)


def _every_position(prompt: list[int], block_size: int) -> Batch:
    count = len(prompt)
    return Batch(
        tokens=torch.tensor(prompt, dtype=torch.int32),
        positions=torch.arange(count, dtype=torch.int32),
        starts=torch.tensor([0, count], dtype=torch.int32),
        lengths=torch.tensor([count], dtype=torch.int32),
        tables=torch.arange(-(-count // block_size), dtype=torch.int32)[None],
        cache_slots=torch.arange(count),
        logit_rows=torch.arange(count),
        decodes=0,
    )


def test_the_output_is_that_of_a_request_without_them(tiny: Loaded) -> None:
    prompt = prompt_of(30)
    plain = solo(tiny, prompt, GREEDY)
    scored = solo(tiny, prompt)
    assert plain.prompts == []
    assert (plain.tokens, plain.hashes) == (scored.tokens, scored.hashes)


def test_zero_alternatives_give_the_prompts_own_tokens(tiny: Loaded) -> None:
    prompt = prompt_of(9)
    (entries,) = solo(tiny, prompt, Sampling(seed=1, temperature=0.0, prompt_logprobs=0)).prompts
    assert [entry and (entry.token, entry.top) for entry in entries] == [None, *((token, []) for token in prompt[1:])]


def test_neighbours_with_and_without_them(tiny: Loaded) -> None:
    prompts = [prompt_of(length, first) for first, length in enumerate((7, 33, 12, 1, 50, 4))]
    alone = [solo(tiny, prompt) for prompt in prompts]
    rig = Rig(tiny, hashes=True, max_step_tokens=20)
    ids = [rig.submit(prompt, 4, GREEDY if at % 2 else SCORED)[0] for at, prompt in enumerate(prompts)]
    rig.run()
    for at, (id, solo_run) in enumerate(zip(ids, alone, strict=True)):
        assert rig.got[id].hashes == solo_run.hashes
        assert rig.got[id].prompts == ([] if at % 2 else solo_run.prompts)


@pytest.mark.parametrize("swap_blocks", [0, 32])
def test_preempted_in_the_middle_of_the_prompt_they_are_told_once_and_whole(tiny: Loaded, swap_blocks: int) -> None:
    first, second = prompt_of(8), prompt_of(60, 5)
    alone = solo(tiny, second)
    rig = Rig(tiny, hashes=True, max_step_tokens=10, blocks=19, swap_blocks=swap_blocks)
    if swap_blocks:
        rig.scheduler.policies.preemption.victims = _swapping(rig)  # type: ignore[method-assign]
    rig.submit(first, 40)
    (id,) = rig.submit(second, 4, SCORED)
    rig.run()
    gave_way = {(entry.id, entry.how) for record in rig.records for entry in record.preempted}
    assert (id, "swap" if swap_blocks else "recompute") in gave_way, "the pool was meant to be too small"
    assert rig.got[id].prompts == alone.prompts
    assert rig.got[id].hashes == alone.hashes


def _swapping(rig: Rig) -> Callable[..., Any]:
    from kvyard.policy import Victims

    return lambda s, short, who, cause: Victims(list(reversed(s.running)), how="swap")


def test_forced_preemption_in_every_step_of_the_prompt(tiny: Loaded) -> None:
    prompt = prompt_of(30, 2)
    alone = solo(tiny, prompt)
    for moment in range(1, 7):
        rig = Rig(tiny, hashes=True, max_step_tokens=5)
        (id,) = rig.submit(prompt, 4, SCORED)
        for _ in range(moment):
            rig.step()
        seq = rig.scheduler.ledger.sequences[id]
        rig.scheduler._moves.preempt(seq, seq, "growth", "recompute", front=True)
        rig.scheduler._moves.flush()
        rig.run()
        assert rig.got[id].prompts == alone.prompts
        assert rig.got[id].hashes == alone.hashes


def test_LOGPROB_05_a_neighbour_that_is_cancelled_during_prefill_changes_nothing(tiny: Loaded) -> None:
    prompts = [prompt_of(length, length) for length in (20, 30, 40, 50)]
    alone = [solo(tiny, prompt, max_new=2) for prompt in prompts]
    rigs = [Rig(tiny, max_step_tokens=budget) for budget in (40, 64, 139, 140, 200)]
    for repeat in range(50):
        rig = rigs[repeat % len(rigs)]
        ids = [rig.submit(prompt, 2, SCORED)[0] for prompt in prompts]
        for _ in range(repeat % 3):
            rig.step()
        rig.cancel(ids[1])
        rig.run()
        for at in (0, 2, 3):
            assert rig.got[ids[at]].prompts == alone[at].prompts
            assert rig.got[ids[at]].tokens == alone[at].tokens


def test_the_prefix_cache_is_not_read_for_them_but_filled(tiny: Loaded) -> None:
    prompt = prompt_of(24)
    alone = solo(tiny, prompt)
    rig = Rig(tiny, hashes=True, prefix_cache=True)
    for sampling, cached in ((GREEDY, 0), (SCORED, 0), (GREEDY, 20)):
        (id,) = rig.submit(prompt, 4, sampling)
        rig.run()
        assert rig.got[id].cached == cached
        assert rig.got[id].hashes == alone.hashes
        assert rig.got[id].prompts == (alone.prompts if sampling is SCORED else [])


def test_after_an_engines_death_they_are_told_only_if_they_were_not(tiny: Loaded) -> None:
    prompt = prompt_of(24)
    alone = solo(tiny, prompt)
    rig = Rig(tiny, hashes=True)
    id = rig.add(1, 0, 1, prompt, 4, SCORED, alone.tokens[:2])
    rig.run()
    assert rig.got[id].prompts == []
    assert rig.got[id].hashes == alone.hashes[2:]


def test_the_sequences_of_a_request_get_the_same(tiny: Loaded) -> None:
    prompt = prompt_of(23)
    alone = solo(tiny, prompt)
    for budget in (5, 64):
        rig = Rig(tiny, max_step_tokens=budget)
        ids = rig.submit(prompt, 4, SCORED, n=3)
        rig.run()
        assert [rig.got[id].prompts for id in ids] == [alone.prompts] * 3


def test_nothing_is_kept_of_those_that_ended(tiny: Loaded) -> None:
    rig = Rig(tiny, max_step_tokens=8)
    ids = [*rig.submit(prompt_of(20), 4, SCORED, n=2), *rig.submit(prompt_of(30), 4, SCORED)]
    rig.step()
    assert rig.loop._scores
    rig.cancel(ids[2])
    rig.run()
    assert not rig.loop._scores
    assert rig.loop._scores._prompts == {}


def test_logits_exist_a_few_rows_at_a_time(tiny: Loaded) -> None:
    sizes: list[int] = []
    prompt = prompt_of(2 * SCORED_PIECE + 3)
    batch = _every_position(prompt, 4)
    Rig(tiny)
    whole = tiny.backend.forward(batch)
    batch.scored_rows, batch.logit_rows = batch.logit_rows, batch.logit_rows[-1:]
    pieces: list[Tensor] = []

    def read(logits: Tensor) -> None:
        sizes.append(len(logits))
        pieces.append(logits.clone())

    last = tiny.backend.forward(batch, read)
    assert sizes == [SCORED_PIECE, SCORED_PIECE, 3]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(last, whole[-1:])


def test_whoever_has_sent_an_output_token_has_told_them() -> None:
    def sequence(scored: bool, emitted: bytes) -> Sequence:
        return Sequence(1, 1, 0, 0.0, b"\0" * 8, 4, b"", emitted, scored=scored)

    asked = PromptScores.asked
    assert [asked(sequence(True, b"")), asked(sequence(False, b"")), asked(sequence(True, b"1234"))] == [
        True,
        False,
        False,
    ]
