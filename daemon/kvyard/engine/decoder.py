"""The decoder: every supported family in one forward pass, over the few operations that a device offers.

Pre-norm transformer: `residual += attention(norm(residual))`, `residual += feed_forward(norm(residual))`.
Each sum is folded into the norm that follows it, so a layer is four products, two norms, one attention and
one gate. The residual stream is float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvyard.engine.backends.base import SCORED_PIECE, Batch, ScoreReader
from kvyard.engine.model_config import ModelConfig
from kvyard.engine.weights import Weights

Linear = Callable[[Tensor], Tensor]
"""A product with one weight matrix, in the format that the device likes best: `[t, in]` -> `[t, out]`."""


@dataclass(slots=True)
class Layer:
    """One layer's weights as the device packed them."""

    index: int
    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    output: Linear
    attention_out_norm: Tensor | None
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: Tensor | None


class Step(Protocol):
    """The operations of one step; whatever depends on the batch alone was computed when it was made."""

    def embed(self) -> Tensor:
        """The residual stream at the start, float32 `[t, hidden]`."""
        ...

    def norm(self, residual: Tensor, weight: Tensor, x: Tensor | None) -> Tensor:
        """Add `x` (if any) to `residual` in place, and return its RMS norm in the model's type."""
        ...

    def attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Rotate, write K and V to the pool, attend over the context: `[t, qkv]` -> `[t, heads * head_dim]`."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """`activation(gate) * up`."""
        ...


class Ops(Protocol):
    """What a device must offer to run a decoder."""

    def linear(self, name: str, weights: Weights) -> Linear:
        """Pack the matrix `name` with its bias, from the form that the device likes best; called once at load."""
        ...

    def constant(self, tensor: Tensor) -> Tensor:
        """A small tensor, moved to the device."""
        ...

    def begin(self, batch: Batch) -> Step:
        """Make ready for a step."""
        ...


class Decoder:
    """A model on a device. `weights` may be dropped afterwards; what the device keeps is in its own format."""

    def __init__(self, weights: Weights, ops: Ops, progress: Callable[[str, float], None]) -> None:
        self.config: ModelConfig = weights.config
        self._ops = ops
        self.layers: list[Layer] = []
        for index in range(self.config.layers):
            self.layers.append(self._layer(index, weights))
            progress("packing weights", (index + 1) / self.config.layers)
        self._norm = ops.constant(weights.tensors["norm"])
        self.head = ops.linear("head", weights)

    def _layer(self, index: int, weights: Weights) -> Layer:
        def constant(name: str) -> Tensor:
            return self._ops.constant(weights.tensors[f"layers.{index}.{name}"])

        def linear(name: str) -> Linear:
            return self._ops.linear(f"layers.{index}.{name}", weights)

        return Layer(
            index=index,
            input_norm=constant("input_norm"),
            qkv=linear("qkv"),
            head_norms=(constant("q_norm"), constant("k_norm")) if self.config.qk_norm else None,
            output=linear("o"),
            attention_out_norm=constant("attn_out_norm") if self.config.sandwich_norms else None,
            post_norm=constant("post_norm"),
            gate_up=linear("gate_up"),
            down=linear("down"),
            mlp_out_norm=constant("mlp_out_norm") if self.config.sandwich_norms else None,
        )

    def forward(self, batch: Batch, read: ScoreReader | None = None) -> Tensor:
        """One step: K and V of all tokens are written; logits `[k, vocab]` in the model's type.

        `read` gets those of `batch.scored_rows` piece by piece, in the model's type and where they were computed.
        """
        step = self._ops.begin(batch)
        wanted = batch.logit_rows
        if batch.scored_rows is not None:
            wanted = torch.cat([wanted, batch.scored_rows])
        residual = step.embed()
        x: Tensor | None = None
        for layer in self.layers:
            attended = step.attend(layer, layer.qkv(step.norm(residual, layer.input_norm, x)))
            if layer.index == self.config.layers - 1:  # from here on only the rows whose logits are wanted
                attended, residual = attended[wanted], residual[wanted]
                if not len(residual):
                    return torch.empty(0, self.config.vocab_size)
            x = self._sandwiched(step, layer.output(attended), layer.attention_out_norm)
            hidden = step.norm(residual, layer.post_norm, x)
            x = self._sandwiched(step, layer.down(step.gate(layer.gate_up(hidden))), layer.mlp_out_norm)
        final, sampled = step.norm(residual, self._norm, x), len(batch.logit_rows)
        if read is not None:
            for at in range(sampled, len(final), SCORED_PIECE):
                read(self.head(final[at : at + SCORED_PIECE]))
            if not sampled:
                return torch.empty(0, self.config.vocab_size)
            final = final[:sampled]
        return self.head(final)

    def _sandwiched(self, step: Step, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else step.norm(x.float(), weight, None)
