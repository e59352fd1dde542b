"""The decoder's operations on a CUDA device, by the Triton kernels and cuBLAS.

Under Triton's interpreter the same code runs on CPU tensors, which is how it is tested without a device.
"""

from __future__ import annotations

import torch
from kvyard_kernels import reference
from kvyard_kernels.triton import ops as kernels
from kvyard_kernels.triton.worklists import DecodeSplits, decode_splits, query_tiles, tile_span
from torch import Tensor

from kvyard.engine.backends.base import Batch, KvGeometry
from kvyard.engine.decoder import Layer
from kvyard.engine.model_config import ModelConfig, Rope
from kvyard.engine.weights import Weights

ROW_TILE = 64
"""Rows of every product in deterministic mode: one shape, so one cuBLAS algorithm, whatever the step's size."""
LONG_CONTEXT = 1024
"""Positions from which decodes beside chunks get a launch of their own, split over the context."""


class Product:
    """A weight matrix on the device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[t, in]` -> `[t, out]`."""
        return torch.nn.functional.linear(x, self._weight, self._bias)


class RowTiles:
    """A product formed `ROW_TILE` rows at a time, the last tile padded, so that a row's bits are its own."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        """`[t, in]` -> `[t, out]`."""
        rows = len(x)
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % ROW_TILE))
        tiles = [self._product(padded[first : first + ROW_TILE]) for first in range(0, rows, ROW_TILE)]
        return torch.cat(tiles)[:rows]


class KvPool:
    """KV of one model, `[blocks, layers, 2, kv_heads, block_size, head_dim]`: a block is one piece of memory over
    all layers, so that swapping it is one copy; within it, a head's keys lie together."""

    def __init__(self, geometry: KvGeometry, blocks: int, device: torch.device, *, pinned: bool = False) -> None:
        shape = (blocks, geometry.layers, 2, geometry.kv_heads, geometry.block_size, geometry.head_dim)
        self.blocks = torch.empty(shape, dtype=geometry.dtype, device=device, pin_memory=pinned)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as the kernels take them, `[blocks, block_size, kv_heads, head_dim]`."""
        both = self.blocks[:, index].transpose(2, 3)
        return both[:, 0], both[:, 1]


class CudaOps:
    """Weights on the device, rotary tables and the pool that steps work on."""

    def __init__(
        self, config: ModelConfig, embedding: Tensor, dtype: torch.dtype, deterministic: bool, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.deterministic = deterministic
        self.pool: KvPool | None = None
        self._moved: dict[int, Tensor] = {}
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        self.embedding = self._move(embedding)

    def linear(self, name: str, weights: Weights) -> Product | RowTiles:
        """Move to the device; in deterministic mode behind `RowTiles`."""
        bias = weights.bias(name)
        product = Product(
            self._move(weights.matrix(name)), None if bias is None else bias.to(self.device, self.dtype)
        )
        return RowTiles(product) if self.deterministic else product

    def constant(self, tensor: Tensor) -> Tensor:
        """Move to the device."""
        return tensor.to(self.device)

    def loaded(self) -> None:
        """Forget which host tensors were moved: the host's copies can go."""
        self._moved.clear()

    def tables(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position of the model, float32 `[max_context, dim / 2]`, made once."""
        if rope not in self._tables:
            frequencies = reference.inverse_frequencies(rope.dim, rope.theta, rope.factors)
            cos, sin = reference.rope_tables(torch.arange(self.config.max_context), frequencies)
            self._tables[rope] = cos.to(self.device), sin.to(self.device)
        return self._tables[rope]

    def begin(self, batch: Batch) -> CudaStep:
        """Make ready for a step."""
        assert self.pool is not None, "allocate() comes before forward()"
        return CudaStep(self, self.pool, batch)

    def _move(self, tensor: Tensor) -> Tensor:
        """On the device, once even where embedding and head are one tensor."""
        address = tensor.data_ptr()
        if address not in self._moved:
            self._moved[address] = tensor.to(self.device)
        return self._moved[address]


class CudaStep:
    """One step: its integers are moved and its queries cut into tiles once, for all layers."""

    def __init__(self, ops: CudaOps, pool: KvPool, batch: Batch) -> None:
        self._ops, self._config, self._pool = ops, ops.config, pool
        device = ops.device
        self._tokens = batch.tokens.to(device, non_blocking=True)
        self._positions = batch.positions.to(device, non_blocking=True)
        self._starts = batch.starts.to(device, non_blocking=True)
        self._lengths = batch.lengths.to(device, non_blocking=True)
        self._tables = batch.tables.to(device, non_blocking=True)
        self._slots = batch.cache_slots.to(device, non_blocking=True)
        self._split = self._split_decodes(batch)
        self._host_lengths = batch.lengths[: self._split]
        self._splits: dict[int, DecodeSplits] = {}
        starts = batch.starts[self._split :]
        span = tile_span(self._config.heads, pool.layer(0)[0])
        self._tiles = query_tiles(starts, span, device) if len(starts) > 1 else None

    def _split_decodes(self, batch: Batch) -> int:
        """How many rows, from the first, go to the decode kernel; the others share one launch for chunks.

        In deterministic mode none: one routine with one order over the keys serves chunks and decodes.
        """
        if self._ops.deterministic or not batch.decodes:
            return 0
        alone = batch.decodes == len(batch.lengths)
        return batch.decodes if alone or int(batch.lengths[: batch.decodes].max()) >= LONG_CONTEXT else 0

    def embed(self) -> Tensor:
        """Rows of the embedding as float32."""
        rows = torch.nn.functional.embedding(self._tokens, self._ops.embedding).float()
        return rows if self._config.embedding_scale == 1.0 else rows * self._config.embedding_scale

    def norm(self, residual: Tensor, weight: Tensor, x: Tensor | None) -> Tensor:
        """See `Step.norm`."""
        out = torch.empty_like(residual, dtype=self._ops.dtype)
        if x is None:
            return kernels.rms_norm(residual, weight, self._config.norm_eps, out=out)
        return kernels.rms_norm(x, weight, self._config.norm_eps, residual=residual, out=out)

    def attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        """See `Step.attend`."""
        config = self._config
        k_cache, v_cache = self._pool.layer(layer.index)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        cos, sin = self._ops.tables(config.layer_rope(layer.index))
        q_weight, k_weight = layer.head_norms or (None, None)
        kernels.rope_and_cache(
            q, k, v, k_cache, v_cache, self._positions, cos, sin, self._slots,
            q_weight=q_weight, k_weight=k_weight, eps=config.norm_eps,
        )  # fmt: skip
        return self._attention(q, k_cache, v_cache, config.layer_window(layer.index)).flatten(1)

    def _attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int) -> Tensor:
        out = q.new_empty(q.shape)
        split, scale = self._split, self._config.scale
        if split:
            kernels.paged_decode(
                q[:split], k_cache, v_cache, self._tables[:split], self._lengths[:split], self._splits_for(window),
                scale=scale, window=window, out=out[:split],
            )  # fmt: skip
        if self._tiles is not None:
            kernels.paged_mixed(
                q, k_cache, v_cache, self._tables[split:], self._starts[split:], self._lengths[split:], self._tiles,
                scale=scale, window=window, out=out,
            )  # fmt: skip
        return out

    def _splits_for(self, window: int) -> DecodeSplits:
        """The decodes' splits, made once for each window that the model's layers have."""
        if window not in self._splits:
            self._splits[window] = decode_splits(self._host_lengths, window, self._ops.device)
        return self._splits[window]

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Step.gate`."""
        gate, up = gate_up.tensor_split(2, dim=1)
        return kernels.gated(gate, up, activation_name="gelu_tanh" if self._config.activation == "gelu" else "silu")
