"""From a request's fields to the engine's sampling parameters, whose ranges the engine may then trust."""

from __future__ import annotations

from typing import Final, TypeVar

from kvyard.front.http.errors import invalid
from kvyard.front.http.requests import GenerationRequest
from kvyard.front.text.stops import StopStrings
from kvyard.link.messages import Sampling

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: dividing logits by them would overflow float32."""
HOTTEST: Final = 1e6
"""Temperatures above this are taken as it: every token is as likely as any other long before."""
_SEED_MASK: Final = 2**63 - 1


def sampling_of(
    request: GenerationRequest, *, vocab_size: int, seed: int, logprobs: int, prompt_logprobs: int
) -> Sampling:
    """Sampling parameters of sequence 0. Raises ApiError 400 for token ids outside the vocabulary."""
    temperature = min(_or(request.temperature, 1.0), HOTTEST)
    top_p = _or(request.top_p, 1.0)
    # An empty nucleus still holds the most likely token.
    greedy = temperature < GREEDY_BELOW or top_p == 0.0
    top_k = _or(request.top_k, 0)
    return Sampling(
        seed=seed & _SEED_MASK,
        temperature=0.0 if greedy else temperature,
        top_k=0 if top_k < 0 or top_k >= vocab_size else top_k,
        top_p=1.0 if greedy else top_p,
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_bias(request.logit_bias or {}, vocab_size),
        min_tokens=request.min_tokens or 0,
        ignore_eos=request.ignore_eos or False,
        stop_token_ids=_stop_ids(request.stop_token_ids or [], vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def stops_of(request: GenerationRequest) -> StopStrings:
    """The request's stop strings; empty ones stop nothing."""
    stop = request.stop
    return StopStrings([stop] if isinstance(stop, str) else stop or [])


N = TypeVar("N", int, float)


def _or(value: N | None, default: N) -> N:
    return default if value is None else value


def _bias(entries: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        if int(key) >= vocab_size:
            raise invalid(
                f"logit_bias: {key} is no token id; the model has the ids 0 to {vocab_size - 1}.", "logit_bias"
            )
        if int(key) in biases:
            raise invalid(f"logit_bias: the token {int(key)} is named twice.", "logit_bias", "duplicate_field")
        biases[int(key)] = bias
    return tuple(biases.items())


def _stop_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token in ids:
        if token >= vocab_size:
            raise invalid(
                f"stop_token_ids: {token} is no token id; the model has the ids 0 to {vocab_size - 1}.",
                "stop_token_ids",
            )
    return tuple(dict.fromkeys(ids))
