"""Log-probabilities of positions: of the token that stands there and of the best alternatives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvyard.link.messages import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: npt.NDArray[np.int32], tops: npt.NDArray[np.int64]) -> list[TokenLogprobs]:
    """Of each row of `[k, vocab]` logits, for the token given and its `tops` best ones.

    Rows are computed one after the other, so that none depends on another. The rank counts the tokens that
    are likelier; among equals the lower id comes first, as in greedy choice.
    """
    return [_row(logits[i], int(tokens[i]), int(tops[i])) for i in range(len(tokens))]


def _row(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs[token]
    rank = 1 + int((logprobs > chosen).sum()) + int((logprobs[:token] == chosen).sum())
    return TokenLogprobs(token, float(chosen), rank, _best(logprobs, top))


def _best(logprobs: Tensor, top: int) -> list[tuple[int, float]]:
    """The `top` likeliest, descending, equals by ascending id."""
    if top < 1:
        return []
    top = min(top, len(logprobs))
    least = torch.topk(logprobs, top).values[-1]
    ids = torch.nonzero(logprobs >= least).squeeze(1)  # ascending; more than `top` where the last place is shared
    order = torch.argsort(logprobs[ids], descending=True, stable=True)[:top]
    return [(int(i), float(logprobs[i])) for i in ids[order]]
