"""Tokens from logits on the device: temperature, min-p, top-k and top-p by torch, the draw by our kernels.

The rules are those of the engine's own sampler, so that a token does not depend on where it was drawn: float64
weights; min-p, top-k and top-p in this order; without a cut ids in their own order, with one in descending order of
weight, equals by id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvyard_kernels.triton import ops


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of each row, on the host, so that nothing has to be fetched to choose the way."""

    temperature: Tensor
    """`[rows]` float64; 0 is greedy."""
    seeds: Tensor
    """`[rows]` int64, the sequences' own seeds."""
    outputs: Tensor
    """`[rows]` int64, index of the output token."""
    top_k: Tensor
    """`[rows]` int64; 0 or less is off."""
    top_p: Tensor
    """`[rows]` float64; 1 is off."""
    min_p: Tensor
    """`[rows]` float64; 0 is off."""


def sample(logits: Tensor, parameters: Parameters) -> Tensor:
    """Ids `[rows]` int64 on the device, from logits `[rows, vocab]`."""
    tokens = ops.argmax(logits)
    p, vocab = parameters, logits.shape[1]
    random = p.temperature > 0
    cut = ((p.top_k > 0) & (p.top_k < vocab)) | (p.top_p < 1) | (p.min_p > 0)
    for chosen, draw in ((random & ~cut, _plain), (random & cut, _cut)):
        rows = chosen.nonzero().flatten()
        if not len(rows):
            continue
        device = logits.device
        numbers = ops.uniforms(p.seeds[rows].to(device), p.outputs[rows].to(device))
        there = rows.to(device)
        tokens[there] = draw(_weights(logits[there], p.temperature[rows].to(device)), numbers, p, rows)
    return tokens


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """`exp((logit - highest) / temperature)`, float64; the highest has weight 1."""
    scores = logits.double()
    scores -= scores.amax(-1, keepdim=True)
    return (scores / temperature.double()[:, None]).exp()


def _plain(weights: Tensor, numbers: Tensor, p: Parameters, rows: Tensor) -> Tensor:
    return ops.draw(weights, numbers)


def _cut(weights: Tensor, numbers: Tensor, p: Parameters, rows: Tensor) -> Tensor:
    device, vocab = weights.device, weights.shape[1]
    kept, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    most = torch.where(p.top_k[rows] > 0, p.top_k[rows], vocab).to(device)[:, None]
    least = p.min_p[rows].to(device)[:, None] * kept[:, :1]
    kept = kept.masked_fill((rank >= most) | (kept < least), 0.0)
    reached = kept.cumsum(-1)
    share = p.top_p[rows].to(device)[:, None]
    beyond = (reached - kept >= share * reached[:, -1:]) & (share < 1)
    kept = kept.masked_fill(beyond & (rank > 0), 0.0)
    return torch.gather(order, 1, ops.draw(kept, numbers)[:, None])[:, 0]
