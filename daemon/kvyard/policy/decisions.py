"""The values that policies return: a step's shape, an admission, an order of victims (docs/plugins.md).

A decision is plain data. Its iterables may be lazy: the core walks them inside the guard and turns
them into plain lists before anything is applied, so no policy code ever runs outside the guard.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from kvyard.policy.snapshot import RequestView


class Phase(Enum):
    """A part of a step: which sequences are asked whether they take tokens."""

    RUNNING = "running"
    """All running sequences in order of admission."""
    DECODE = "decode"
    """Running sequences with exactly one token left to compute."""
    PROMPT = "prompt"
    """Running sequences whose prompt (or recomputed prefix) is not wholly computed yet."""
    ADMIT = "admit"
    """Waiting sequences, through the admission policy."""


RUNNING, DECODE, PROMPT, ADMIT = Phase.RUNNING, Phase.DECODE, Phase.PROMPT, Phase.ADMIT


class Shape(NamedTuple):
    """The phases of one step, in groups.

    The first group that places any token is the step; later groups are not tried. `prompts` caps the
    prompt tokens (running and new together) of the step; None leaves them to the token budget.
    """

    groups: tuple[tuple[Phase, ...], ...]
    prompts: int | None = None


RUNNING_FIRST = Shape(((RUNNING, ADMIT),))
"""vLLM: whatever runs first, then newcomers, in one token budget."""
DECODE_FIRST = Shape(((DECODE, PROMPT, ADMIT),))
"""Sarathi: decodes are never delayed by a prompt."""
PROMPT_OR_DECODE = Shape(((PROMPT, ADMIT), (DECODE,)))
"""Prefill first: a step is either prompts or decodes, prompts win."""


class LinearKey(NamedTuple):
    """The order of the waiting queue as a sum of weights times what is known of a request, lower first.

    In the place of the method `AdmissionPolicy.key` it is read once, and the policy is not asked for every request.
    Weights are numbers up to 1e100.
    """

    priority: float = 0.0
    """Of its priority, where smaller numbers are more urgent."""
    arrived: float = 0.0
    """Of the seconds at which it arrived: an order by priority with aging weighs both."""
    prompt_len: float = 0.0
    """Of the tokens of its prompt."""
    max_new: float = 0.0
    """Of the most output tokens that it may have."""


Entry: TypeAlias = "RequestView | tuple[RequestView, int]"
"""A candidate, or a candidate and the tokens whose blocks must be there before it is admitted."""

How = Literal["recompute", "swap"]
Requeue = Literal["front", "tail"]
Cause = Literal["growth", "admission"]


class Admission(NamedTuple):
    """Who may come in, in which order, and under which conditions.

    entries  candidates in order, as many as wait; `(view, tokens)` states the need (default: the whole
             current sequence; less: it may come in before there is room for all it has). The core tests
             each at its turn: `blocks(need) - hits + idle hits + keep <= free`. A need of more than four
             times the whole pool is a fault (`over-committed`): it would never be met.
    keep     blocks that must stay free.
    hold     what an entry was promised and has not taken yet stays reserved for the rest of the step.
    skip     how many refused entries may be passed over; 0 makes the first refusal a barrier.
    evict    a refused entry may take room from running sequences through the preemption policy.
    reason   why nobody, or nobody else, comes in: shown to the operator.
    wake     the step at which it is worth asking again, with `reason`; None asks in every step.
    refuse   requests to end for good, each with a text for its client.
    """

    entries: Iterable[Entry] = ()
    keep: int = 0
    hold: bool = False
    skip: int = 0
    evict: bool = False
    reason: str | None = None
    wake: int | None = None
    refuse: tuple[tuple[RequestView, str], ...] = ()


def nobody(reason: str, wake: int | None = None) -> Admission:
    """Admit nobody in this step, for `reason`; `wake` is the step at which to ask again."""
    return Admission(reason=reason, wake=wake)


class Victims(NamedTuple):
    """Whom to preempt; the core takes as many as it needs.

    order      running sequences, first to go first.
    how        `recompute` drops the KV and computes it again, `swap` copies it to the host pool
               (falls back to recompute when that pool is full).
    requeue    where a victim waits when the admission policy has no key; a key overrules this.
    self_ends  a requester that becomes its own victim ends the phase (vLLM) instead of merely being
               left out.
    """

    order: Iterable[RequestView]
    how: How = "recompute"
    requeue: Requeue = "front"
    self_ends: bool = False
