"""The decoder's operations in plain torch on the CPU: slow, and right by reading. What a GPU's tokens are held to.

It needs nothing but torch, so that it runs on a machine that has no compiler for the CPU kernels.
"""

from __future__ import annotations

import torch
from kvyard_kernels import reference
from torch import Tensor

from kvyard.engine.backends.base import Batch
from kvyard.engine.decoder import Decoder, Layer, Linear
from kvyard.engine.model_config import ModelConfig, Rope
from kvyard.engine.weights import Weights


class PlainModel:
    """A model in float32 on the CPU, by the references of `kvyard_kernels`."""

    def __init__(self, weights: Weights, block_size: int, blocks: int) -> None:
        self._ops = _PlainOps(weights, block_size, blocks)
        self._decoder = Decoder(weights, self._ops, lambda what, fraction: None)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[k, vocab]`, float32."""
        with torch.inference_mode():
            return self._decoder.forward(batch)


class _PlainOps:
    def __init__(self, weights: Weights, block_size: int, blocks: int) -> None:
        self.config = weights.config
        self.embedding = weights.tensors["embed"].float()
        shape = (self.config.layers, 2, blocks, block_size, self.config.kv_heads, self.config.head_dim)
        self.pool = torch.zeros(shape)

    def linear(self, name: str, weights: Weights) -> Linear:
        wide, bias = weights.matrix(name).float(), weights.bias(name)
        return lambda x: torch.nn.functional.linear(x, wide, bias)

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor.float()

    def begin(self, batch: Batch) -> _PlainStep:
        return _PlainStep(self.config, self.embedding, self.pool, batch)


class _PlainStep:
    def __init__(self, config: ModelConfig, embedding: Tensor, pool: Tensor, batch: Batch) -> None:
        self._config, self._embedding, self._pool, self._batch = config, embedding, pool, batch
        self._turns: dict[Rope, tuple[Tensor, Tensor]] = {}

    def embed(self) -> Tensor:
        return self._embedding[self._batch.tokens.long()] * self._config.embedding_scale

    def norm(self, residual: Tensor, weight: Tensor, x: Tensor | None) -> Tensor:
        if x is not None:
            residual += x
        return reference.rms_norm(residual, weight, self._config.norm_eps)

    def attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        config, batch = self._config, self._batch
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        if layer.head_norms is not None:
            q = reference.rms_norm(q, layer.head_norms[0], config.norm_eps)
            k = reference.rms_norm(k, layer.head_norms[1], config.norm_eps)
        turn = self._turn(config.layer_rope(layer.index))
        keys, values = self._pool[layer.index]
        reference.write_cache(reference.rope(k, *turn), v, keys, values, batch.cache_slots)
        out = reference.paged_attention(
            reference.rope(q, *turn), keys, values, batch.tables, batch.starts, batch.lengths, config.scale,
            config.layer_window(layer.index),
        )  # fmt: skip
        return out.flatten(1)

    def gate(self, gate_up: Tensor) -> Tensor:
        return (reference.swiglu if self._config.activation == "silu" else reference.geglu)(gate_up)

    def _turn(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._turns:
            frequencies = reference.inverse_frequencies(rope.dim, rope.theta, rope.factors)
            self._turns[rope] = reference.rope_tables(self._batch.positions, frequencies)
        return self._turns[rope]
