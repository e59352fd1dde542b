"""Choosing from one row of logits: the best ids, a cut distribution, a draw. Every function sees one row alone.

Rows are float32 and stay so; sums are float64. A vocabulary is passed over in blocks, so that sorting meets
only what can matter: a full sort of 49,152 ids takes 4 ms, all of this about 0.1 ms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvyard.link.messages import Sampling

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 128
_COLDEST = 1e-6
"""Least temperature computed with; below it the best token has all the weight anyway."""
_NUCLEUS_STEPS = (1e-2, 1e-4, 1e-6)
"""Weights, relative to the best, down to which a nucleus is looked for before all ids are sorted."""


def best(values: Row, count: int) -> Ids:
    """Ids of the `count` largest values, descending, equals by ascending id."""
    if count < 1:
        return np.empty(0, dtype=np.int64)
    ids = _at_least(values, count) if count * 4 < len(values) // _BLOCK else np.arange(len(values))
    if count < len(ids):
        border = np.partition(values[ids], len(ids) - count)[len(ids) - count]
        ids = ids[values[ids] >= border]  # more than `count` where the last place is shared
    return descending(values, ids)[:count]


def descending(values: Row, ids: Ids) -> Ids:
    """Ascending ids in descending order of their values, equals by id."""
    return ids[np.argsort(-values[ids], kind="stable")]


def weights(logits: Row, temperature: float) -> Row:
    """`exp((logit - largest) / temperature)`: probabilities but for their sum."""
    with np.errstate(over="ignore"):  # minus infinity is what an overflow stands for here
        scores: Row = logits - logits.max()
    scores *= np.float32(1.0 / max(temperature, _COLDEST))
    np.exp(scores, out=scores)
    return scores


def draw(logits: Row, temperature: float, number: float, cut: Sampling | None) -> int:
    """The id at `number` in (0, 1) of the row's distribution, restricted by `cut` if given.

    Without a cut the ids lie in ascending order, with one in descending order of probability (equals by id);
    the last id with any weight takes what rounding leaves over.
    """
    row = weights(logits, temperature)
    if cut is None:
        return _at(row, number)
    ids = cut_ids(row, cut)
    return int(ids[_at(row[ids], number)])


def cut_ids(row: Row, cut: Sampling) -> Ids:
    """Ids that min-p, top-k and top-p leave of a row of weights, in descending order; at least one.

    Each cut counts in what the one before it left, as in vLLM.
    """
    least = np.float32(cut.min_p) * row.max()
    limit = cut.top_k if 0 < cut.top_k < len(row) else len(row)
    if cut.top_p >= 1:
        return _down_to(best(row, limit), row, least) if limit < len(row) else descending(row, _from(row, least))
    if limit < len(row):
        ids = _down_to(best(row, limit), row, least)
        return _nucleus(row, ids, cut.top_p, float(row[ids].sum(dtype=np.float64)))
    kept = row if least <= 0 else np.where(row >= least, row, np.float32(0))
    total = float(kept.sum(dtype=np.float64))
    for share in _NUCLEUS_STEPS:
        ids = _from(kept, max(least, np.float32(share) * row.max()))
        if float(row[ids].sum(dtype=np.float64)) >= cut.top_p * total:
            return _nucleus(row, descending(row, ids), cut.top_p, total)
    return _nucleus(row, descending(row, _from(kept, least)), cut.top_p, total)


def _nucleus(row: Row, ids: Ids, share: float, total: float) -> Ids:
    """The first of descending ids whose weights reach `share * total`."""
    sums = np.cumsum(row[ids], dtype=np.float64)
    return ids[: 1 + int(np.searchsorted(sums, share * total, side="left"))]


def _down_to(ids: Ids, row: Row, least: np.floating) -> Ids:
    return ids[row[ids] >= least]


def _from(row: Row, least: np.floating) -> Ids:
    return np.flatnonzero(row >= least)


def _at_least(values: Row, count: int) -> Ids:
    """Ids among which the `count` largest are: all that reach the count-th largest of the blocks' maxima."""
    whole = len(values) // _BLOCK * _BLOCK
    maxima = values[:whole].reshape(-1, _BLOCK).max(axis=1)
    return np.flatnonzero(values >= np.partition(maxima, len(maxima) - count)[len(maxima) - count])


def _at(row: Row, number: float) -> int:
    """Index at which the running sum of weights passes `number` times their sum."""
    whole = len(row) // _BLOCK * _BLOCK
    blocks = row[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(blocks, row[whole:].sum(dtype=np.float64)))
    wanted = number * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    begin = block * _BLOCK
    before = ends[block - 1] if block else 0.0
    sums = before + np.cumsum(row[begin : begin + _BLOCK], dtype=np.float64)
    index = begin + int(np.searchsorted(sums, wanted, side="right"))
    return index if index < len(row) and row[index] > 0 else int(_last_before(row, index))


def _last_before(row: Row, index: int) -> int:
    """The last id with any weight before `index`, or the first behind it."""
    positive = np.flatnonzero(row > 0)
    place = int(np.searchsorted(positive, index))
    return int(positive[max(0, place - 1)])
