"""The sampler: each row by its own parameters, reproducibly, whatever stands beside it and wherever it resumes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.engine.random import derive, uniform
from kvyard.engine.sampler import Sampled, Sampler
from kvyard.link.messages import Sampling
from torch import Tensor

_VOCAB = 64
_EOS = (2, 5)
_PROMPT = np.array([7, 8, 9, 8], np.int32)
_NONE = np.empty(0, np.int32)


def _sampler(*rows: Sampling, vocab: int = _VOCAB, hashes: bool = False) -> Sampler:
    sampler = Sampler(vocab, _EOS, len(rows), hashes=hashes)
    for slot, sampling in enumerate(rows):
        sampler.bind(slot, sampling, 0, _PROMPT, _NONE)
    return sampler


def _sample(sampler: Sampler, logits: Tensor, generated: list[int] | None = None) -> Sampled:
    count = len(logits)
    return sampler.sample(logits, np.arange(count), np.array(generated or [0] * count))


def _logits(rows: int = 1, seed: int = 0, vocab: int = _VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def _draw(sampling: Sampling, logits: Tensor, count: int = 300) -> list[int]:
    """The tokens of `count` consecutive outputs from one distribution."""
    sampler = _sampler(sampling)
    return [int(_sample(sampler, logits, [i]).tokens[0]) for i in range(count)]


# ---- greedy


def test_greedy_takes_the_best() -> None:
    logits = _logits(5)
    found = _sample(_sampler(*[Sampling(seed=i, temperature=0.0) for i in range(5)]), logits)
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    assert found.tokens.dtype == np.int32
    assert found.hashes is None
    assert found.logprobs == {}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, _VOCAB)
    logits[0, [9, 33, 60]] = 4.0
    assert _sample(_sampler(Sampling(seed=1, temperature=0.0)), logits).tokens.tolist() == [9]


# ---- temperature and seeds


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    logits, count = _logits(), 2500
    counts = Counter(_draw(Sampling(seed=11, temperature=temperature), logits, count))
    expected = torch.softmax(logits[0].double() / temperature, 0) * count
    rare = float(expected[expected < 5].sum())
    chi_square = sum((counts[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected) if e >= 5)
    chi_square += (sum(counts[i] for i, e in enumerate(expected) if e < 5) - rare) ** 2 / max(rare, 1e-9)
    bins = int((expected >= 5).sum())
    assert chi_square < bins + 4.5 * (2 * bins) ** 0.5


def test_the_draw_is_the_inverse_of_the_distribution_at_the_documented_number() -> None:
    logits = _logits()
    sums = torch.softmax(logits[0].double(), 0).cumsum(0).numpy()
    draws = uniform(np.full(50, 99, np.uint64), np.arange(50))
    assert _draw(Sampling(seed=99), logits, 50) == [int(np.searchsorted(sums, draw, side="right")) for draw in draws]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = _logits()
    assert set(_draw(Sampling(seed=1, temperature=1e-5), logits, 50)) == {int(logits[0].argmax())}
    assert len(set(_draw(Sampling(seed=1, temperature=1e6), logits, 600))) > 60


def test_one_seed_gives_one_text_and_another_gives_another() -> None:
    first = _draw(Sampling(seed=5), _logits(), 40)
    assert first == _draw(Sampling(seed=5), _logits(), 40)
    assert first != _draw(Sampling(seed=6), _logits(), 40)


def test_negative_and_large_seeds_are_taken_modulo_two_to_64() -> None:
    assert _draw(Sampling(seed=-1), _logits(), 20) == _draw(Sampling(seed=(1 << 64) - 1), _logits(), 20)


def test_sampling_08_sequences_of_a_request_draw_from_seeds_of_their_own() -> None:
    """SAMPLING-08: index 0 is the request's seed, others are derived from it."""
    texts = []
    for index in range(8):
        sampler = Sampler(_VOCAB, _EOS, 1, hashes=False)
        sampler.bind(0, Sampling(seed=7, temperature=1.2), index, _PROMPT, _NONE)
        texts.append(tuple(int(_sample(sampler, _logits(), [i]).tokens[0]) for i in range(32)))
    assert len(set(texts)) == 8
    assert list(texts[0]) == _draw(Sampling(seed=7, temperature=1.2), _logits(), 32)
    assert list(texts[3]) == _draw(Sampling(seed=derive(7, 3), temperature=1.2), _logits(), 32)


# ---- cuts


@pytest.mark.parametrize("top_k", [0, _VOCAB, _VOCAB + 1, 10**9])
def test_sampling_03_top_k_that_cuts_nothing_changes_nothing(top_k: int) -> None:
    """SAMPLING-03: off, the vocabulary and beyond give the same seeded text."""
    assert _draw(Sampling(seed=5, top_k=top_k), _logits(), 60) == _draw(Sampling(seed=5), _logits(), 60)


def test_top_k_one_is_greedy() -> None:
    assert set(_draw(Sampling(seed=5, top_k=1), _logits(), 60)) == {int(_logits()[0].argmax())}


@pytest.mark.parametrize("top_k", [2, 5, _VOCAB - 1])
def test_top_k_keeps_the_best(top_k: int) -> None:
    logits = _logits()
    allowed = set(torch.topk(logits[0], top_k).indices.tolist())
    drawn = set(_draw(Sampling(seed=3, top_k=top_k, temperature=3.0), logits, 400))
    assert drawn <= allowed
    if top_k <= 5:
        assert drawn == allowed


def test_top_k_among_equals_keeps_the_lowest_ids() -> None:
    assert set(_draw(Sampling(seed=3, top_k=3), torch.zeros(1, _VOCAB), 100)) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1e-9, 1e-4, 0.0])
def test_sampling_02_a_tiny_nucleus_is_greedy(top_p: float) -> None:
    """SAMPLING-02: at least one token is always left."""
    assert set(_draw(Sampling(seed=3, top_p=top_p, temperature=2.0), _logits(), 60)) == {int(_logits()[0].argmax())}


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95, 0.999999])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float) -> None:
    logits = _logits()
    probabilities = torch.softmax(logits[0].double(), 0)
    order = torch.argsort(probabilities, descending=True)
    count = int((probabilities[order].cumsum(0) < top_p).sum()) + 1
    drawn = set(_draw(Sampling(seed=4, top_p=top_p), logits, 1500))
    assert drawn <= set(order[:count].tolist())
    assert len(drawn) >= min(count, 6)


@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
def test_min_p_keeps_what_is_likely_beside_the_best(min_p: float) -> None:
    logits = _logits()
    probabilities = torch.softmax(logits[0].double(), 0)
    allowed = set(torch.nonzero(probabilities >= min_p * probabilities.max()).squeeze(1).tolist())
    assert set(_draw(Sampling(seed=4, min_p=min_p), logits, 800)) == allowed


def test_cuts_combine() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05] + [1e-9] * (_VOCAB - 5)]))
    assert set(_draw(Sampling(seed=4, top_k=4, top_p=0.8), logits, 300)) == {0, 1, 2}
    assert set(_draw(Sampling(seed=4, top_k=2, min_p=0.2), logits, 300)) == {0, 1}
    assert set(_draw(Sampling(seed=4, min_p=0.3, top_p=0.99), logits, 300)) == {0, 1, 2}


def test_the_shares_within_a_cut_keep_their_proportion() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1] + [1e-9] * (_VOCAB - 5)]))
    counts = Counter(_draw(Sampling(seed=8, top_k=3), logits, 2000))
    assert counts[0] / 2000 == pytest.approx(0.5, abs=0.05)
    assert counts[1] / 2000 == pytest.approx(0.25, abs=0.05)


# ---- penalties, bias, bans


def _greedy_after(sampling_fields: dict[str, object], emitted: list[int], logits: Tensor) -> int:
    sampler = Sampler(_VOCAB, _EOS, 1, hashes=False)
    sampling = Sampling(seed=1, temperature=0.0, **sampling_fields)  # type: ignore[arg-type] # names and types match
    sampler.bind(0, sampling, 0, _PROMPT, np.array(emitted, np.int32))
    return int(_sample(sampler, logits, [len(emitted)]).tokens[0])


def _peaks(**values: float) -> Tensor:
    logits = torch.full((1, _VOCAB), -10.0)
    for name, value in values.items():
        logits[0, int(name[1:])] = value
    return logits


def test_presence_counts_once_and_frequency_every_time() -> None:
    logits = _peaks(t20=2.0, t21=1.0)
    assert _greedy_after({"presence_penalty": 0.9}, [20, 20, 20], logits) == 20
    assert _greedy_after({"presence_penalty": 1.1}, [20], logits) == 21
    assert _greedy_after({"frequency_penalty": 0.6}, [20], logits) == 20
    assert _greedy_after({"frequency_penalty": 0.6}, [20, 20], logits) == 21


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    logits = _peaks(t8=2.0, t21=1.9)
    assert _greedy_after({"presence_penalty": 2.0, "frequency_penalty": 2.0}, [], logits) == 8


def test_negative_penalties_reward() -> None:
    assert _greedy_after({"presence_penalty": -2.0}, [21], _peaks(t20=2.0, t21=1.0)) == 21


def test_repetition_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    assert _greedy_after({"repetition_penalty": 2.0}, [20], _peaks(t20=2.0, t21=1.1)) == 21
    assert _greedy_after({"repetition_penalty": 1.5}, [20], _peaks(t20=2.0, t21=1.1)) == 20
    assert _greedy_after({"repetition_penalty": 2.0}, [20], _peaks(t20=-1.0, t21=-1.5)) == 21
    assert _greedy_after({"repetition_penalty": 0.5}, [21], _peaks(t20=2.0, t21=1.1)) == 21


def test_repetition_counts_the_prompt() -> None:
    assert _greedy_after({"repetition_penalty": 2.0}, [], _peaks(t8=2.0, t21=1.1)) == 21


@pytest.mark.parametrize("penalty", [0.01, 1.0, 2.0])
def test_sampling_04_allowed_penalties_give_a_token(penalty: float) -> None:
    """SAMPLING-04: the ends of the allowed range."""
    assert 0 <= _greedy_after({"repetition_penalty": penalty, "presence_penalty": -2.0}, [3, 4], _logits()) < _VOCAB


def test_bias_adds() -> None:
    assert _greedy_after({"logit_bias": ((21, 1.5), (20, -100.0))}, [], _peaks(t20=2.0, t21=1.0)) == 21
    assert _greedy_after({"logit_bias": ((63, 100.0),)}, [], _logits()) == 63


def test_min_tokens_holds_back_every_end_and_the_requests_own_stops() -> None:
    """SAMPLING-14: with all ends favoured, none comes before its time."""
    logits = _peaks(t2=9.0, t5=8.0, t30=7.0, t21=1.0)
    fields: dict[str, object] = {"min_tokens": 3, "stop_token_ids": (30,)}
    assert [_greedy_after(fields, [21] * n, logits) for n in range(5)] == [21, 21, 21, 2, 2]
    assert _greedy_after({"min_tokens": 3, "logit_bias": ((5, 100.0),)}, [], logits) == 30


def test_penalties_follow_the_outputs_as_they_come() -> None:
    sampler = _sampler(Sampling(seed=1, temperature=0.0, frequency_penalty=1.0))
    logits = _peaks(t20=3.0, t21=2.5, t22=0.9)
    tokens = [int(_sample(sampler, logits, [i]).tokens[0]) for i in range(6)]
    assert tokens == [20, 21, 20, 21, 20, 22]


def test_the_models_logits_are_not_changed_in_place() -> None:
    logits = _logits(2)
    before = logits.clone()
    _sample(_sampler(Sampling(seed=1, presence_penalty=1.0, min_tokens=4), Sampling(seed=2, top_k=3)), logits)
    assert torch.equal(logits, before)


# ---- ends


def test_every_end_id_stops() -> None:
    sampler = _sampler(*[Sampling(seed=1, temperature=0.0)] * 3)
    logits = torch.cat([_peaks(t2=1.0), _peaks(t5=1.0), _peaks(t6=1.0)])
    assert _sample(sampler, logits).stop.tolist() == [True, True, False]


def test_sampling_15_ignored_ends_do_not_stop_but_own_stops_do() -> None:
    """SAMPLING-15: `ignore_eos` covers every end id of the model, not the request's own stop ids."""
    ignoring = Sampling(seed=1, temperature=0.0, ignore_eos=True, stop_token_ids=(30,))
    sampler = _sampler(ignoring, ignoring, ignoring)
    logits = torch.cat([_peaks(t2=1.0), _peaks(t5=1.0), _peaks(t30=1.0)])
    assert _sample(sampler, logits).stop.tolist() == [False, False, True]


def test_an_end_that_is_also_an_own_stop_stops_although_ends_are_ignored() -> None:
    sampler = _sampler(Sampling(seed=1, temperature=0.0, ignore_eos=True, stop_token_ids=(2,)))
    assert _sample(sampler, _peaks(t2=1.0)).stop.tolist() == [True]


# ---- hashes and log-probabilities


def test_hashes_are_of_the_models_logits_whatever_the_sampling() -> None:
    logits = _logits(2)
    plain = _sample(_sampler(Sampling(seed=1), Sampling(seed=2), hashes=True), logits)
    bent = _sample(_sampler(Sampling(seed=1, top_k=3), Sampling(seed=2, presence_penalty=1.0), hashes=True), logits)
    assert plain.hashes is not None
    assert bent.hashes is not None
    assert plain.hashes.tolist() == bent.hashes.tolist()
    assert plain.hashes.dtype == np.uint64


def test_logprobs_are_the_models_own_for_those_that_ask() -> None:
    logits = _logits(3)
    asking = Sampling(seed=1, temperature=0.0, logprobs=2, logit_bias=((40, 100.0),))
    found = _sample(_sampler(Sampling(seed=1), asking, Sampling(seed=2, temperature=0.0, logprobs=0)), logits)
    assert sorted(found.logprobs) == [1, 2]
    expected = torch.log_softmax(logits[1].double(), 0)
    assert found.logprobs[1].token == 40
    assert found.logprobs[1].logprob == pytest.approx(float(expected[40]))
    assert [i for i, _ in found.logprobs[1].top] == torch.topk(expected, 2).indices.tolist()
    assert found.logprobs[2].rank == 1
    assert found.logprobs[2].top == []


# ---- independence of rows, and resuming

_KINDS = [
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=1, temperature=1.0),
    Sampling(seed=2, temperature=0.0, repetition_penalty=1.5),
    Sampling(seed=3, temperature=0.7, top_k=7, presence_penalty=0.5, logprobs=2),
    Sampling(seed=4, temperature=1.3, top_p=0.8, min_p=0.01, frequency_penalty=-0.3),
    Sampling(seed=5, temperature=1.0, min_tokens=6, stop_token_ids=(9, 10), logit_bias=((2, 5.0), (11, -3.0))),
    Sampling(seed=6, temperature=2.0, ignore_eos=True),
]


def _alone(
    sampling: Sampling, distributions: list[Tensor], start: int = 0, emitted: list[int] | None = None
) -> list[int]:
    sampler = Sampler(_VOCAB, _EOS, 1, hashes=False)
    sampler.bind(0, sampling, 0, _PROMPT, np.array(emitted or [], np.int32))
    return [int(_sample(sampler, distributions[i], [i]).tokens[0]) for i in range(start, len(distributions))]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=9), st.integers(0, 50), st.data())
def test_invariance_03_rows_are_as_alone(rows: list[Sampling], seed: int, data: st.DataObject) -> None:
    """INVARIANCE-03, -05, -06: any mix, rows coming and going, slots that differ from rows."""
    steps = 8
    distributions = [[_logits(1, seed + 100 * row + i) for i in range(steps)] for row in range(len(rows))]
    expected = [_alone(sampling, distributions[row]) for row, sampling in enumerate(rows)]
    slots = data.draw(st.permutations(range(len(rows) + 3)))[: len(rows)]
    starts = [data.draw(st.integers(0, 4)) for _ in rows]
    ends = [data.draw(st.integers(1, steps)) for _ in rows]
    sampler = Sampler(_VOCAB, _EOS, len(rows) + 3, hashes=False)
    found: list[list[int]] = [[] for _ in rows]
    for step in range(steps + 4):
        for row in range(len(rows)):
            if step == starts[row]:
                sampler.bind(slots[row], rows[row], 0, _PROMPT, _NONE)
        active = [r for r in range(len(rows)) if starts[r] <= step and len(found[r]) < ends[r]]
        active = data.draw(st.permutations(active))
        if not active:
            continue
        logits = torch.cat([distributions[r][len(found[r])] for r in active])
        generated = np.array([len(found[r]) for r in active])
        sampled = sampler.sample(logits, np.array([slots[r] for r in active]), generated)
        for i, r in enumerate(active):
            found[r].append(int(sampled.tokens[i]))
    assert found == [expected[r][: ends[r]] for r in range(len(rows))]


@pytest.mark.parametrize("sampling", _KINDS)
@pytest.mark.parametrize("preempted", [1, 5, 11])
def test_a_sequence_that_comes_back_goes_on_as_if_nothing_had_been(sampling: Sampling, preempted: int) -> None:
    distributions = [_logits(1, i) for i in range(12)]
    whole = _alone(sampling, distributions)
    assert _alone(sampling, distributions, preempted, whole[:preempted]) == whole[preempted:]


@pytest.mark.parametrize("sampling", _KINDS)
def test_a_step_that_is_sampled_again_gives_the_same_token(sampling: Sampling) -> None:
    distributions = [_logits(1, i) for i in range(10)]
    sampler = _sampler(sampling)
    tokens = []
    for i, logits in enumerate(distributions):
        first = int(_sample(sampler, logits, [i]).tokens[0])
        assert [int(_sample(sampler, logits, [i]).tokens[0]) for _ in range(2)] == [first, first]
        tokens.append(first)
    assert tokens == _alone(sampling, distributions)


def test_a_slot_forgets_who_had_it() -> None:
    sampler = Sampler(_VOCAB, _EOS, 1, hashes=False)
    busy = Sampling(seed=9, temperature=1.5, top_k=2, presence_penalty=2.0, min_tokens=9, logprobs=3, ignore_eos=True)
    sampler.bind(0, busy, 3, _PROMPT, np.array([1, 1, 1], np.int32))
    _sample(sampler, _logits(), [3])
    sampler.bind(0, Sampling(seed=1, temperature=0.0), 0, _PROMPT, _NONE)
    found = _sample(sampler, _peaks(t2=1.0))
    assert found.tokens.tolist() == [2]
    assert found.stop.tolist() == [True]
    assert found.logprobs == {}


def test_a_large_vocabulary_in_all_ways_at_once() -> None:
    vocab = 49_152
    logits = _logits(len(_KINDS), vocab=vocab)
    together = _sample(_sampler(*_KINDS, vocab=vocab), logits).tokens.tolist()
    for i, sampling in enumerate(_KINDS):
        assert _sample(_sampler(sampling, vocab=vocab), logits[i : i + 1]).tokens.tolist() == [together[i]]
