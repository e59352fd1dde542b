"""Models for the check: random ones of every switch that the decoder has, and the default model's shape."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kvyard.engine.model_config import ModelConfig, Rope
from kvyard.engine.weights import Groups, Weights, assemble

LLAMA = ModelConfig(
    family="llama",
    vocab_size=211,
    hidden=96,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    max_context=512,
    norm_eps=1e-5,
    rope=Rope(10_000.0, 16),
)
TINY = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, qkv_bias=True),
    "gemma3": replace(
        LLAMA, family="gemma3", layers=2, qk_norm=True, sandwich_norms=True, activation="gelu", embedding_scale=9.8,
        window=8, windowed=(True, False), local_rope=Rope(1_000.0, 16),
    ),
}  # fmt: skip
SMOLLM2_135M = replace(
    LLAMA, vocab_size=49_152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    max_context=8192, rope=Rope(100_000.0, 64),
)  # fmt: skip


class _Random:
    """A checkpoint of random numbers, drawn name by name from one seed."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def original(self, name: str) -> str:
        return name

    def read(self, name: str) -> Tensor:
        shape = self._shape(name.rpartition("layers.")[2].partition(".")[2] or name)
        if len(shape) == 1:
            return torch.rand(shape, generator=self._generator) + 0.5
        return torch.randn(shape, generator=self._generator) / math.sqrt(shape[1])

    def groups(self, name: str) -> Groups | None:
        """Nothing is quantised."""
        return None

    def _shape(self, part: str) -> tuple[int, ...]:
        c = self._config
        matrices = {
            "embed": (c.vocab_size, c.hidden),
            "head": (c.vocab_size, c.hidden),
            "q": (c.heads * c.head_dim, c.hidden),
            "k": (c.kv_heads * c.head_dim, c.hidden),
            "v": (c.kv_heads * c.head_dim, c.hidden),
            "o": (c.hidden, c.heads * c.head_dim),
            "gate": (c.intermediate, c.hidden),
            "up": (c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
        }
        if part in matrices:
            return matrices[part]
        if part.endswith(".bias"):
            return matrices[part.removesuffix(".bias")][:1]
        return (c.head_dim,) if part in ("q_norm", "k_norm") else (c.hidden,)


def random_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Weights:
    """A model of this shape."""
    tensors = assemble(_Random(config, seed), config, dtype, lambda what, fraction: None)
    return Weights(config, tensors, (2,))
