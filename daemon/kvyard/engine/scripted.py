"""Test hook: say which tokens a request gets. Off and unreachable unless KVYARD_TEST_SCRIPT is set.

The variable holds a JSON list of scripts, each with
    token    only for a sequence whose prompt contains this token id
    index    only for that choice of its request (the first is 0)
    tokens   ids of the output, the first first; behind the last of them the sampler chooses again

The first script that fits is a sequence's. Only the choice is taken from the sampler: the logits and their hashes,
log-probabilities, the count of the penalties, stop ids and all that comes behind the engine are those of the tokens
given. Which token it is depends on its place in the output alone, so a preemption or another engine changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvyard.core.plan import IntArray, TokenArray
from kvyard.engine.faults import asked
from kvyard.engine.sampler import Rows, Sampler
from kvyard.link.messages import Sampling

VARIABLE = "KVYARD_TEST_SCRIPT"


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """The output of the sequences that it fits."""

    token: int
    tokens: list[int]
    index: int | None = None

    def fits(self, index: int, prompt: TokenArray) -> bool:
        """Whether it is about sequence `index` of a request with this prompt."""
        return self.index in (None, index) and bool(np.any(prompt == self.token))


def make_sampler(vocab_size: int, eos_ids: Sequence[int], slots: int, *, hashes: bool) -> Sampler:
    """The sampler asked for: the plain one, if no script is."""
    text = asked(VARIABLE)
    if not text:
        return Sampler(vocab_size, eos_ids, slots, hashes=hashes)
    scripts = msgspec.json.decode(text, type=list[Script])
    return ScriptedSampler(scripts, vocab_size, eos_ids, slots, hashes=hashes)


class ScriptedSampler(Sampler):
    """A sampler whose choice is overruled where a script says so."""

    def __init__(
        self, scripts: Sequence[Script], vocab_size: int, eos_ids: Sequence[int], slots: int, *, hashes: bool
    ) -> None:
        super().__init__(vocab_size, eos_ids, slots, hashes=hashes)
        for token in (token for script in scripts for token in script.tokens):
            if not 0 <= token < vocab_size:
                raise ValueError(f"{VARIABLE}: token {token} is not in the vocabulary of {vocab_size}")
        self._scripts = tuple(scripts)
        self._outputs: list[list[int]] = [[]] * slots

    def bind(self, slot: int, sampling: Sampling, index: int, prompt: TokenArray, emitted: TokenArray) -> None:
        """As the sampler does, and with the script of this sequence."""
        super().bind(slot, sampling, index, prompt, emitted)
        self._outputs[slot] = next((each.tokens for each in self._scripts if each.fits(index, prompt)), [])

    def _choose(self, rows: Rows, slots: IntArray, generated: IntArray) -> TokenArray:
        tokens = super()._choose(rows, slots, generated)
        for row, (slot, at) in enumerate(zip(slots.tolist(), generated.tolist(), strict=True)):
            output = self._outputs[slot]
            if at < len(output):
                tokens[row] = output[at]
        return tokens
