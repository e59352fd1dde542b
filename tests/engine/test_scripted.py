"""The hook that says which tokens come: only the choice is its own, and only where a script says so."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from kvyard.engine.sampler import Sampled, Sampler
from kvyard.engine.scripted import VARIABLE, Script, ScriptedSampler, make_sampler
from kvyard.link.messages import Sampling
from torch import Tensor

VOCAB = 64
MARK = 60
EMPTY = np.empty(0, np.int32)
PROMPT = np.array([3, MARK, 4], np.int32)
GREEDY = Sampling(seed=1, temperature=0.0)


def scripted(*each: Script, slots: int = 1) -> ScriptedSampler:
    return ScriptedSampler(each, VOCAB, (2,), slots, hashes=True)


def plain(slots: int = 1) -> Sampler:
    return Sampler(VOCAB, (2,), slots, hashes=True)


def rows(count: int = 1) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(5))


def sample(sampler: Sampler, logits: Tensor, *generated: int) -> Sampled:
    return sampler.sample(logits, np.arange(len(logits)), np.array(generated))


def test_each_place_gets_its_token_and_the_sampler_chooses_behind_them() -> None:
    sampler, logits = scripted(Script(MARK, [9, 7, 9])), rows()
    sampler.bind(0, GREEDY, 0, PROMPT, EMPTY)
    best = int(logits.argmax())
    assert [int(sample(sampler, logits, at).tokens[0]) for at in range(5)] == [9, 7, 9, best, best]


def test_who_comes_back_goes_on_where_it_was() -> None:
    sampler = scripted(Script(MARK, [9, 7, 8]))
    for emitted in ([], [9], [9, 7]):
        sampler.bind(0, GREEDY, 0, PROMPT, np.array(emitted, np.int32))
        assert sample(sampler, rows(), len(emitted)).tokens.tolist() == [[9, 7, 8][len(emitted)]]


def test_prompts_without_the_mark_and_other_choices_are_left_alone() -> None:
    sampler, logits = scripted(Script(MARK, [9], index=1), slots=3), rows(3)
    for slot, (index, prompt) in enumerate([(0, PROMPT), (1, PROMPT), (1, PROMPT[:1])]):
        sampler.bind(slot, GREEDY, index, prompt, EMPTY)
    best = logits.argmax(-1).tolist()
    assert sample(sampler, logits, 0, 0, 0).tokens.tolist() == [best[0], 9, best[2]]


def test_the_first_script_that_fits_counts_and_a_slots_next_user_is_free() -> None:
    sampler, logits = scripted(Script(MARK, [9], index=0), Script(MARK, [8])), rows()
    for index, token in ((0, 9), (1, 8)):
        sampler.bind(0, GREEDY, index, PROMPT, EMPTY)
        assert sample(sampler, logits, 0).tokens.tolist() == [token]
    sampler.bind(0, GREEDY, 0, PROMPT[:1], EMPTY)
    assert sample(sampler, logits, 0).tokens.tolist() == [int(logits.argmax())]


def test_hashes_logprobs_ends_and_penalties_are_those_of_the_tokens_given() -> None:
    asked = Sampling(seed=1, temperature=0.0, logprobs=2, frequency_penalty=1.0, stop_token_ids=(7,))
    by_script, by_bias = scripted(Script(MARK, [9, 7])), plain()
    for sampler in (by_script, by_bias):
        sampler.bind(0, asked, 0, PROMPT, EMPTY)
    for at, token in enumerate((9, 7)):
        logits = rows()
        logits[0, token] = 50.0  # what the script does by decree the plain one does by itself
        want, got = sample(by_bias, logits.clone(), at), sample(by_script, logits.clone(), at)
        assert want.tokens.tolist() == got.tokens.tolist() == [token]
        assert want.stop.tolist() == got.stop.tolist() == [token == 7]
        assert want.hashes is not None
        assert got.hashes is not None
        assert want.hashes.tolist() == got.hashes.tolist()
        assert want.logprobs == got.logprobs
    logits = rows()
    assert sample(by_bias, logits.clone(), 2).tokens.tolist() == sample(by_script, logits, 2).tokens.tolist()


def test_an_unlikely_token_has_its_own_log_probability() -> None:
    sampler, logits = scripted(Script(MARK, [9])), rows()
    sampler.bind(0, Sampling(seed=1, temperature=1.0, logprobs=0), 0, PROMPT, EMPTY)
    (found,) = sample(sampler, logits, 0).logprobs.values()
    assert found.token == 9
    assert found.logprob == pytest.approx(float(torch.log_softmax(logits[0], 0)[9]), abs=1e-5)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE}: token {VOCAB} is not in the vocabulary of {VOCAB}"):
        scripted(Script(MARK, [1, VOCAB]))


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_there_is_the_plain_sampler(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert type(make_sampler(VOCAB, (2,), 1, hashes=True)) is Sampler


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f'[{{"token": {MARK}, "tokens": [9], "index": 0}}]')
    sampler = make_sampler(VOCAB, (2,), 1, hashes=True)
    monkeypatch.delenv(VARIABLE)
    sampler.bind(0, GREEDY, 0, PROMPT, EMPTY)
    assert sample(sampler, rows(), 0).tokens.tolist() == [9]


@pytest.mark.parametrize("value", ["{", '[{"token": 1}]', '[{"token": 1, "tokens": [1], "tokns": 2}]'])
def test_a_script_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(msgspec.DecodeError):
        make_sampler(VOCAB, (2,), 1, hashes=True)
