"""Log-probabilities of positions: of the token that stands there and of the best alternatives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvyard.engine.choice import Row, best
from kvyard.link.messages import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: npt.NDArray[np.int32], tops: npt.NDArray[np.int64]) -> list[TokenLogprobs]:
    """Of each row of float32 `[k, vocab]` logits, for the token given and its `tops` best ones.

    Rows are computed one after the other, so that none depends on another. The rank counts the tokens that
    are likelier; among equals the lower id comes first, as in greedy choice.
    """
    rows = logits.numpy()
    return [_row(rows[i], int(tokens[i]), int(tops[i])) for i in range(len(tokens))]


def _row(logits: Row, token: int, top: int) -> TokenLogprobs:
    largest = logits.max()
    total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    chosen = logits[token]
    rank = 1 + int(np.count_nonzero(logits > chosen)) + int(np.count_nonzero(logits[:token] == chosen))
    ids = best(logits, top)
    alternatives = [(int(i), float(logits[i]) - total) for i in ids]
    return TokenLogprobs(token, float(chosen) - total, rank, alternatives)
