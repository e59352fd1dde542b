"""The sampler: from logits to output tokens, each row by its own parameters and nothing else.

Order of operations, as OpenAI's and vLLM's clients expect: penalties (repetition, presence, frequency),
logit bias, bans (`min_tokens`), then greedy choice or temperature, min-p, top-k, top-p and one uniform number.
State belongs to a sequence and is bound to its slot; it is rebuilt from prompt and output when the sequence
comes back, so a preemption or a restart cannot be told from the tokens. Log-probabilities are the model's own,
before penalties, bias, bans and temperature: finite, and comparable between requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvyard.core.plan import BoolArray, IntArray, TokenArray
from kvyard.engine.hashing import RowHash
from kvyard.engine.logprobs import token_logprobs
from kvyard.engine.random import derive, uniform
from kvyard.link.messages import Sampling, TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """What a step sampled; one row per row of logits."""

    tokens: TokenArray
    stop: BoolArray
    """The token ends its sequence: an end id (unless ignored) or one of the request's stop ids."""
    hashes: npt.NDArray[np.uint64] | None
    """Of each row's logits as the model gave them; None outside deterministic mode."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for those that asked."""


@dataclass(slots=True)
class _State:
    """A sequence's own part, for rows that are more than a temperature."""

    sampling: Sampling
    stops: frozenset[int]
    banned: Tensor | None
    """Ids that may not come before `min_tokens`."""
    bias: tuple[Tensor, Tensor] | None
    seen: Tensor | None
    """int32 `[vocab]`: how often each id was output; kept only where a penalty needs it."""
    in_prompt: Tensor | None
    """bool `[vocab]`, for the repetition penalty."""


class Sampler:
    """Samples rows of logits for sequences bound to slots."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], slots: int, *, hashes: bool) -> None:
        self._vocab = vocab_size
        self._eos = tuple(eos_ids)
        self._states: list[_State | None] = [None] * slots
        self._hash = RowHash(vocab_size) if hashes else None
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._temperature = np.zeros(slots, dtype=np.float64)
        self._shaped = np.zeros(slots, dtype=np.bool_)
        """Logits are changed before the choice: penalties, bias, bans."""
        self._cut = np.zeros(slots, dtype=np.bool_)
        """top-k, top-p or min-p."""
        self._logprobs = np.full(slots, -1, dtype=np.int64)
        self._stops = np.zeros(slots, dtype=np.bool_)
        """The sequence has stop ids of its own, or ignores the model's."""
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[[i for i in self._eos if i < vocab_size]] = True

    def bind(self, slot: int, sampling: Sampling, index: int, prompt: TokenArray, emitted: TokenArray) -> None:
        """Give a slot to sequence `index` of a request, at its first admission or when it comes back."""
        state = self._state(sampling, prompt, emitted)
        self._states[slot] = state
        self._seeds[slot] = derive(sampling.seed, index)
        self._temperature[slot] = sampling.temperature
        self._shaped[slot] = state.banned is not None or state.bias is not None or state.seen is not None
        self._cut[slot] = 0 < sampling.top_k < self._vocab or sampling.top_p < 1 or sampling.min_p > 0
        self._logprobs[slot] = sampling.logprobs
        self._stops[slot] = sampling.ignore_eos or bool(sampling.stop_token_ids)

    def sample(self, logits: Tensor, slots: IntArray, generated: IntArray) -> Sampled:
        """One token per row of float32 `[k, vocab]` logits.

        `generated` is the index of the output token that each row is about to make: 0 for the first.
        """
        given = logits
        hashes = None if self._hash is None else self._hash(logits.numpy())
        if self._shaped[slots].any():
            logits = self._shape(logits, slots, generated)
        tokens = self._choose(logits, slots, generated)
        for row in np.flatnonzero(self._shaped[slots]):
            self._count(int(slots[row]), int(tokens[row]))
        asked = np.flatnonzero(self._logprobs[slots] >= 0)
        logprobs = token_logprobs(given[torch.from_numpy(asked)], tokens[asked], self._logprobs[slots[asked]])
        stop = self._stop(tokens, slots)
        return Sampled(tokens, stop, hashes, dict(zip(asked.tolist(), logprobs, strict=True)))

    # ---- state

    def _state(self, sampling: Sampling, prompt: TokenArray, emitted: TokenArray) -> _State:
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(self._eos))
        banned = sorted(i for i in {*self._eos, *sampling.stop_token_ids} if 0 <= i < self._vocab)
        bias = [(i, value) for i, value in sampling.logit_bias if 0 <= i < self._vocab]
        repeats = sampling.repetition_penalty != 1
        counts = repeats or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        return _State(
            sampling=sampling,
            stops=stops,
            banned=torch.tensor(banned) if sampling.min_tokens > 0 and banned else None,
            bias=(torch.tensor([i for i, _ in bias]), torch.tensor([value for _, value in bias])) if bias else None,
            seen=self._occurrences(emitted) if counts else None,
            in_prompt=self._occurrences(prompt) > 0 if repeats else None,
        )

    def _occurrences(self, tokens: TokenArray) -> Tensor:
        return torch.from_numpy(np.bincount(tokens, minlength=self._vocab).astype(np.int32))

    def _count(self, slot: int, token: int) -> None:
        state = self._states[slot]
        if state is not None and state.seen is not None:
            state.seen[token] += 1

    # ---- logits

    def _shape(self, logits: Tensor, slots: IntArray, generated: IntArray) -> Tensor:
        """A copy of the logits with each row's penalties, bias and bans."""
        logits = logits.clone()
        for row in np.flatnonzero(self._shaped[slots]):
            state = self._states[slots[row]]
            assert state is not None
            _penalise(logits[row], state)
            if state.bias is not None:
                logits[row].index_add_(0, *state.bias)
            if state.banned is not None and generated[row] < state.sampling.min_tokens:
                logits[row, state.banned] = -torch.inf
        return logits

    # ---- choice

    def _choose(self, logits: Tensor, slots: IntArray, generated: IntArray) -> TokenArray:
        temperature = self._temperature[slots]
        tokens = logits.argmax(dim=-1).numpy().astype(np.int32)  # the lowest id among equals
        random = np.flatnonzero(temperature > 0)
        if not len(random):
            return tokens
        draws = uniform(self._seeds[slots[random]], generated[random])
        for row, draw in zip(random.tolist(), draws.tolist(), strict=True):
            state = self._states[slots[row]]
            assert state is not None
            cut = state.sampling if self._cut[slots[row]] else None
            tokens[row] = draw_token(logits[row].numpy(), float(temperature[row]), draw, cut)
        return tokens

    def _stop(self, tokens: TokenArray, slots: IntArray) -> BoolArray:
        stop: BoolArray = self._is_eos[tokens]
        for row in np.flatnonzero(self._stops[slots]):
            state = self._states[slots[row]]
            assert state is not None
            stop[row] = int(tokens[row]) in state.stops
        return stop


def _penalise(logits: Tensor, state: _State) -> None:
    """In place: repetition (prompt and output, CTRL's rule), frequency and presence (output alone)."""
    if state.seen is None:
        return
    sampling = state.sampling
    if state.in_prompt is not None:
        repeated = state.in_prompt | (state.seen > 0)
        factor = sampling.repetition_penalty
        logits.copy_(torch.where(repeated, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits.sub_(state.seen * sampling.frequency_penalty + (state.seen > 0) * sampling.presence_penalty)


def draw_token(logits: npt.NDArray[np.float32], temperature: float, draw: float, cut: Sampling | None) -> int:
    """The token at `draw` in (0, 1) of the row's distribution, restricted by `cut` if given.

    Without a cut the tokens lie in order of id, with one in descending order of probability (equals by id);
    the sums are float64 and the last token with any weight takes what rounding leaves over.
    """
    scores = logits.astype(np.float64)
    scores -= scores.max()
    weights = np.exp(scores / temperature)
    if cut is None:
        return _at(weights, draw)
    order = _candidates(weights, cut)
    kept = weights[order]
    if cut.top_p < 1:
        sums = np.cumsum(kept)
        total = sums[-1] if 0 < cut.top_k < len(weights) or cut.min_p > 0 else weights.sum()
        kept = kept[: 1 + int(np.searchsorted(sums, cut.top_p * total, side="left"))]
    return int(order[_at(kept, draw)])


def _candidates(weights: npt.NDArray[np.float64], cut: Sampling) -> npt.NDArray[np.int64]:
    """Ids that min-p and top-k leave, in descending order of weight, equals by id."""
    least = cut.min_p * weights.max()
    ids = np.flatnonzero(weights >= least) if least > 0 else np.arange(len(weights))
    if 0 < cut.top_k < len(ids):
        border = np.partition(weights[ids], len(ids) - cut.top_k)[len(ids) - cut.top_k]
        ids = ids[weights[ids] >= border]  # more than top_k where the last place is shared
    order = ids[np.argsort(-weights[ids], kind="stable")]
    return order[: cut.top_k] if cut.top_k > 0 else order


def _at(weights: npt.NDArray[np.float64], draw: float) -> int:
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, draw * sums[-1], side="right"))
    return index if index < len(weights) and weights[index] > 0 else int(np.flatnonzero(weights)[-1])
