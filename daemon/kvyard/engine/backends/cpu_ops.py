"""The decoder's operations on the CPU."""

from __future__ import annotations

import torch
from kvyard_kernels import cpu, reference
from kvyard_kernels.cpu_chunks import Chunk, chunk_attention, chunks_of
from torch import Tensor

from kvyard.engine.backends.base import Batch
from kvyard.engine.backends.cpu_linear import ByRows, Product, RowTiles, agreeing_rows, pack
from kvyard.engine.decoder import Layer
from kvyard.engine.model_config import ModelConfig, Rope
from kvyard.engine.weights import Weights

_FIRST_POSITIONS = 4096


class CpuOps:
    """Packed products, rotary tables and the pool that steps work on."""

    def __init__(self, config: ModelConfig, embedding: Tensor, dtype: torch.dtype, deterministic: bool) -> None:
        self.config = config
        self.dtype = dtype
        self.embedding = embedding
        self.pool: cpu.CpuPool | None = None
        self.deterministic = deterministic
        self._row_sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def linear(self, name: str, weights: Weights) -> Product:
        """The quantised matrix alone, or for few rows beside the dense one, or the dense one alone.

        Logits come from the quantised head in float32 whatever the model's type: rounded to bfloat16, the
        best of them would often be equal.
        """
        quantised = self._quantised(name, weights)
        if quantised is None:
            return self._dense(name, weights)
        if name == "head" or not weights.has_matrix(name):
            return quantised
        return ByRows(quantised, self._dense(name, weights))

    def _quantised(self, name: str, weights: Weights) -> Product | None:
        parts = weights.quantised(name)
        if parts is None:
            return None
        outputs = self.config.vocab_size if name == "head" else self.config.outputs(name.rpartition(".")[2])
        matrix, bias = cpu.Quantised(*parts, outputs), weights.bias(name)
        dtype = torch.float32 if name == "head" else self.dtype
        return lambda x: cpu.quantised_product(x, matrix, bias, dtype)

    def _dense(self, name: str, weights: Weights) -> Product:
        """Packed; in deterministic mode behind `RowTiles`, whose sizes are found once per shape."""
        weight = weights.matrix(name)
        product = pack(weight, weights.bias(name))
        if not self.deterministic:
            return product
        outputs, inputs = weight.shape
        if (outputs, inputs) not in self._row_sizes:
            self._row_sizes[outputs, inputs] = agreeing_rows(outputs, inputs, self.dtype)
        return RowTiles(product, self._row_sizes[outputs, inputs])

    def constant(self, tensor: Tensor) -> Tensor:
        """Nothing to move."""
        return tensor

    def tables(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the positions below `length` at least, float32 `[positions, dim / 2]`.

        They grow with the positions met: whole, a model of 128 K positions would take 0.5 s and 300 MB to start.
        """
        known = self._tables.get(rope)
        if known is None or len(known[0]) < length:
            positions = torch.arange(max(_FIRST_POSITIONS, 2 * length))
            frequencies = reference.inverse_frequencies(rope.dim, rope.theta, rope.factors)
            known = self._tables[rope] = reference.rope_tables(positions, frequencies)
        return known

    def begin(self, batch: Batch) -> CpuStep:
        """Make ready for a step."""
        assert self.pool is not None, "allocate() comes before forward()"
        return CpuStep(self, self.pool, batch)


class CpuStep:
    """One step: tables gathered and queries cut into tiles once, for all layers."""

    def __init__(self, ops: CpuOps, pool: cpu.CpuPool, batch: Batch) -> None:
        self._ops, self._config, self._pool, self._batch = ops, ops.config, pool, batch
        group = ops.config.heads // ops.config.kv_heads
        self._tiles = self._rest = cpu.attention_tiles(batch.starts, batch.lengths, group)
        self._chunks: list[Chunk] = []
        if not ops.deterministic:
            self._chunks = chunks_of(batch.starts, batch.lengths, batch.tables, pool.block_size, pool.dtype)
        if self._chunks:
            taken = [chunk.sequence for chunk in self._chunks]
            self._rest = cpu.attention_tiles(batch.starts, batch.lengths, group, taken)
        self._rotations: dict[Rope, tuple[Tensor, Tensor]] = {}

    def embed(self) -> Tensor:
        """Rows of the embedding as float32."""
        rows = self._ops.embedding[self._batch.tokens.long()].float()
        return rows if self._config.embedding_scale == 1.0 else rows * self._config.embedding_scale

    def norm(self, residual: Tensor, weight: Tensor, x: Tensor | None) -> Tensor:
        """See `Step.norm`."""
        return cpu.rms_norm(residual, weight, self._config.norm_eps, x, self._ops.dtype)

    def attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        """See `Step.attend`."""
        config, batch = self._config, self._batch
        cos, sin = self._rotation(config.layer_rope(layer.index))
        q = cpu.rope_and_cache(
            qkv, config.heads, cos, sin, self._pool, layer.index, batch.cache_slots, layer.head_norms, config.norm_eps
        )
        window = config.layer_window(layer.index)
        # A window is the routine's own; products over all keys would compute mostly what is masked.
        chunks = [] if window else self._chunks
        out = cpu.paged_attention(
            q, self._pool, layer.index, batch.tables, batch.starts, batch.lengths,
            self._rest if chunks else self._tiles, config.scale, window, self._ops.dtype,
        )  # fmt: skip
        for chunk in chunks:
            chunk_attention(q, self._pool, layer.index, chunk, config.scale, out)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Step.gate`."""
        return cpu.gated(gate_up, self._config.activation == "gelu")

    def _rotation(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """The tables' rows at this step's positions."""
        if rope not in self._rotations:
            cos, sin = self._ops.tables(rope, self._tiles.longest)
            positions = self._batch.positions.long()
            self._rotations[rope] = cos[positions], sin[positions]
        return self._rotations[rope]
