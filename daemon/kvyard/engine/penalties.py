"""Penalties on what a sequence has already said: only the ids that occurred are kept and touched."""

from __future__ import annotations

import numpy as np

from kvyard.core.plan import TokenArray
from kvyard.engine.choice import Row
from kvyard.link.messages import Sampling


class Penalties:
    """Counts of one sequence's tokens, and what they do to its logits.

    Repetition (prompt and output): positive logits are divided by the penalty, others multiplied. Frequency
    and presence (output alone) are subtracted, per occurrence and once.
    """

    def __init__(self, sampling: Sampling, prompt: TokenArray, emitted: TokenArray) -> None:
        self._repetition = np.float32(sampling.repetition_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        seen = np.unique(np.concatenate([prompt, emitted]) if self._repetition != 1 else emitted)
        self._size = len(seen)
        self._ids = np.zeros(2 * self._size + 64, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._in_prompt = np.zeros(len(self._ids), dtype=np.bool_)
        self._in_prompt[: self._size] = np.isin(seen, prompt)
        self._ids[: self._size] = seen
        self._place = {int(token): i for i, token in enumerate(seen)}
        np.add.at(self._counts, np.searchsorted(seen, emitted), 1)
        self._outputs = [int(token) for token in emitted]

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        """Does this request have any?"""
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def count(self, token: int) -> None:
        """A token was output."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            self._size += 1
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._in_prompt = np.concatenate([self._in_prompt, np.zeros_like(self._in_prompt)])
            self._ids[place] = token
        self._counts[place] += 1
        self._outputs.append(token)

    def rewind(self, outputs: int) -> None:
        """Forget what was counted beyond the first `outputs` tokens: a step that was given up is computed again."""
        while len(self._outputs) > outputs:
            self._counts[self._place[self._outputs.pop()]] -= 1

    def apply(self, row: Row) -> None:
        """Change a row of logits in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = row[ids]
        said = counts > 0
        if self._repetition != 1:
            weaker = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(said | self._in_prompt[: self._size], weaker, values)
        row[ids] = values - (counts * self._frequency + said * self._presence)
