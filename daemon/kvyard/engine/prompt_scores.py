"""Log-probabilities of prompts, gathered chunk by chunk until the first output token takes them along.

What is kept is the finished entries, never logits: the backend hands over a few rows at a time. Entries belong
to a request, because its sequences have one prompt; what one of them has computed, none computes again. They
outlive a preemption, so that nothing is computed, or told, twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvyard.core.plan import Plan
from kvyard.engine.logprobs import token_logprobs
from kvyard.link.codec import decode_sampling
from kvyard.link.messages import Sequence, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions `begin..end` of a plan's row; the logits of each say something of the token after it."""

    row: int
    begin: int
    end: int


@dataclass(slots=True)
class _Prompt:
    """Of one request."""

    length: int
    top: int
    entries: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """So far, from the first token on, which nothing predicts."""
    sequences: set[int] = field(default_factory=set)
    """Unfinished ones: a later one may take over the KV of one that has told them, and then needs the entries."""


class PromptScores:
    """The prompts whose log-probabilities are asked for and not yet told; false while there are none."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._request: dict[int, int] = {}
        """Of each sequence that asked and has not ended."""
        self._untold: set[int] = set()
        """Those of them that have yet to tell their entries."""

    def __bool__(self) -> bool:
        return bool(self._untold)

    @staticmethod
    def asked(sequence: Sequence) -> bool:
        """They go out with the first output token: who has sent one has sent them."""
        return sequence.scored and not sequence.emitted

    def take(self, sequence: Sequence) -> None:
        """A sequence that asks for them."""
        prompt = _Prompt(len(sequence.prompt) // 4, decode_sampling(sequence.sampling).prompt_logprobs)
        self._prompts.setdefault(sequence.request, prompt).sequences.add(sequence.id)
        self._request[sequence.id] = sequence.request
        self._untold.add(sequence.id)

    def forget(self, sequence_id: int) -> None:
        """A sequence ended; unknown ones are ignored."""
        self._untold.discard(sequence_id)
        request = self._request.pop(sequence_id, None)
        if request is not None:
            prompt = self._prompts[request]
            prompt.sequences.discard(sequence_id)
            if not prompt.sequences:
                del self._prompts[request]

    def tables(self) -> dict[str, int]:
        """Entries of each table; all 0 when no sequence that asked is left."""
        return {"scored": len(self._request), "scored_prompts": len(self._prompts)}

    def stretches(self, plan: Plan) -> list[Stretch]:
        """What the plan's chunks can add."""
        found: list[Stretch] = []
        for row, sequence_id in enumerate(plan.ids.tolist()):
            if sequence_id not in self._untold:
                continue
            prompt = self._prompts[self._request[sequence_id]]
            begin, upto = int(plan.computed[row]), int(plan.computed[row] + plan.granted[row])
            begin, end = max(begin, len(prompt.entries) - 1), min(upto, prompt.length - 1)
            if begin < end:
                found.append(Stretch(row, begin, end))
        return found

    def reader(self, plan: Plan, stretches: Rows[Stretch]) -> Reader:
        """Takes the logits of these stretches, in their order, in pieces of any size."""
        return Reader([self._prompts[self._request[int(plan.ids[s.row])]] for s in stretches], plan, stretches)

    def told(self, ids: list[int]) -> dict[int, list[TokenLogprobs | None]]:
        """Whole lists of those among `ids`, which have just made their first output token; each is told once."""
        lists: dict[int, list[TokenLogprobs | None]] = {}
        for sequence_id in ids:
            if sequence_id in self._untold:
                self._untold.remove(sequence_id)
                prompt = self._prompts[self._request[sequence_id]]
                assert len(prompt.entries) == prompt.length, "a position of the prompt was not computed"
                lists[sequence_id] = prompt.entries
        return lists


class Reader:
    """One step's rows of logits, turned into entries as they come."""

    def __init__(self, prompts: list[_Prompt], plan: Plan, stretches: Rows[Stretch]) -> None:
        self._prompts = [prompt for prompt, s in zip(prompts, stretches, strict=True) for _ in range(s.begin, s.end)]
        self._places = [position + 1 for s in stretches for position in range(s.begin, s.end)]
        self._tokens = np.concatenate([plan.tokens[plan.slots[s.row], s.begin + 1 : s.end + 1] for s in stretches])
        self._next = 0

    def __call__(self, logits: Tensor) -> None:
        """The next rows, float32 `[m, vocab]` on the CPU."""
        first, self._next = self._next, self._next + len(logits)
        prompts = self._prompts[first : self._next]
        tops = np.array([prompt.top for prompt in prompts], np.int64)
        found = token_logprobs(logits, self._tokens[first : self._next], tops)
        for prompt, place, entry in zip(prompts, self._places[first : self._next], found, strict=True):
            if place == len(prompt.entries):  # two sequences of a request may bring the same row
                prompt.entries.append(entry)
