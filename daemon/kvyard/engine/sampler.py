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
from kvyard.engine.choice import draw
from kvyard.engine.hashing import RowHash
from kvyard.engine.logprobs import token_logprobs
from kvyard.engine.penalties import Penalties
from kvyard.engine.random import derive, uniform
from kvyard.link.messages import Sampling, TokenLogprobs

Rows = npt.NDArray[np.float32]
"""`[k, vocab]` logits."""


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
    banned: npt.NDArray[np.int64]
    """Ids that may not come before `min_tokens`."""
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None
    penalties: Penalties | None

    @property
    def shapes(self) -> bool:
        """Are logits changed before the choice?"""
        return bool(len(self.banned)) or self.bias is not None or self.penalties is not None


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
        self._shaped[slot] = state.shapes
        self._cut[slot] = 0 < sampling.top_k < self._vocab or sampling.top_p < 1 or sampling.min_p > 0
        self._logprobs[slot] = sampling.logprobs
        self._stops[slot] = sampling.ignore_eos or bool(sampling.stop_token_ids)

    def sample(self, logits: Tensor, slots: IntArray, generated: IntArray) -> Sampled:
        """One token per row of float32 `[k, vocab]` logits.

        `generated` is the index of the output token that each row is about to make: 0 for the first.
        """
        rows = logits.numpy()
        hashes = None if self._hash is None else self._hash(rows)
        shaped = np.flatnonzero(self._shaped[slots])
        choices = self._shape(rows, shaped, slots, generated) if len(shaped) else rows
        tokens = self._choose(choices, slots, generated)
        for row in shaped:
            state = self._states[slots[row]]
            if state is not None and state.penalties is not None:
                state.penalties.count(int(tokens[row]))
        asked = np.flatnonzero(self._logprobs[slots] >= 0)
        found = token_logprobs(logits[torch.from_numpy(asked)], tokens[asked], self._logprobs[slots[asked]])
        return Sampled(tokens, self._stop(tokens, slots), hashes, dict(zip(asked.tolist(), found, strict=True)))

    # ---- state

    def _state(self, sampling: Sampling, prompt: TokenArray, emitted: TokenArray) -> _State:
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(self._eos))
        ends = {*self._eos, *sampling.stop_token_ids} if sampling.min_tokens > 0 else set()
        bias = [(i, value) for i, value in sampling.logit_bias if 0 <= i < self._vocab]
        return _State(
            sampling=sampling,
            stops=stops,
            banned=np.array(sorted(i for i in ends if 0 <= i < self._vocab), dtype=np.int64),
            bias=(np.array([i for i, _ in bias]), np.array([value for _, value in bias], np.float32))
            if bias
            else None,
            penalties=Penalties(sampling, prompt, emitted) if Penalties.wanted(sampling) else None,
        )

    # ---- a step

    def _shape(self, rows: Rows, shaped: IntArray, slots: IntArray, generated: IntArray) -> Rows:
        """A copy of the logits with each row's penalties, bias and bans."""
        rows = rows.copy()
        for row in shaped:
            state = self._states[slots[row]]
            assert state is not None
            if state.penalties is not None:
                state.penalties.rewind(int(generated[row]))
                state.penalties.apply(rows[row])
            if state.bias is not None:
                np.add.at(rows[row], *state.bias)
            if generated[row] < state.sampling.min_tokens:
                rows[row, state.banned] = -np.inf
        return rows

    def _choose(self, rows: Rows, slots: IntArray, generated: IntArray) -> TokenArray:
        temperature = self._temperature[slots]
        tokens = np.empty(len(rows), dtype=np.int32)
        greedy, random = np.flatnonzero(temperature <= 0), np.flatnonzero(temperature > 0)
        for row in greedy:
            tokens[row] = rows[row].argmax()  # the lowest id among equals
        numbers = uniform(self._seeds[slots[random]], generated[random])
        for row, number in zip(random, numbers.tolist(), strict=True):
            state = self._states[slots[row]]
            assert state is not None
            cut = state.sampling if self._cut[slots[row]] else None
            tokens[row] = draw(rows[row], float(temperature[row]), number, cut)
        return tokens

    def _stop(self, tokens: TokenArray, slots: IntArray) -> BoolArray:
        stop: BoolArray = self._is_eos[tokens]
        for row in np.flatnonzero(self._stops[slots]):
            state = self._states[slots[row]]
            assert state is not None
            stop[row] = int(tokens[row]) in state.stops
        return stop
