"""The CPU backend: packed weights, a paged pool in main memory, one attention routine for chunks and decodes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from kvyard_kernels import cpu
from torch import Tensor

from kvyard.core.plan import BlockCopy
from kvyard.engine.backends.base import BackendError, Batch, KvGeometry, ScoreReader
from kvyard.engine.backends.cpu_ops import CpuOps
from kvyard.engine.backends.memory import available_bytes, step_bytes
from kvyard.engine.backends.self_check import blocks_for, check_rows
from kvyard.engine.decoder import Decoder
from kvyard.engine.weights import Weights

STEP_TOKENS = 512
"""Tokens of a step for which memory is kept back when the pool is sized."""
STEP_LOGITS = 256
"""Rows of logits for which memory is kept back."""


class CpuBackend:
    """A model on this machine's CPU; see `Backend`."""

    name = "cpu"

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        deterministic: bool,
        block_size: int,
        progress: Callable[[str, float], None],
    ) -> None:
        config = weights.config
        self.device_name = _cpu_name()
        self._ops = CpuOps(config, weights.tensors["embed"], dtype, deterministic)
        self._decoder = Decoder(weights, self._ops, progress)
        cpu.warm_up()
        self._host: Tensor | None = None
        padded = cpu.CpuPool.padded_width(config.head_dim)
        self.geometry = KvGeometry(config.layers, config.kv_heads, padded, block_size, dtype)

    def free_bytes(self) -> int:
        """What the machine and the cgroups leave to this process, less the activations of a large step."""
        kept = step_bytes(self._ops.config, self.geometry.dtype.itemsize, STEP_TOKENS, STEP_LOGITS)
        return max(0, available_bytes() - kept)

    def allocate(self, blocks: int, swap_blocks: int) -> None:
        """Reserve both pools; pages are taken from the machine when they are first written."""
        needed, free = (blocks + swap_blocks) * self.geometry.block_bytes, self.free_bytes()
        if needed > free:
            raise BackendError(
                f"{blocks} KV blocks and {swap_blocks} swap blocks take {needed / 2**30:.1f} GiB, "
                f"but {free / 2**30:.1f} GiB are free",
                "ask for fewer with --kv-blocks, or free memory",
            )
        try:
            self._ops.pool = self._pool(blocks)
            self._host = torch.empty(swap_blocks, *self._ops.pool.blocks.shape[1:], dtype=self.geometry.dtype)
        except RuntimeError as error:  # a machine that promises no more than it has, or a limit of the process
            raise BackendError(
                f"the system gives no {needed / 2**30:.1f} GiB for {blocks} KV blocks and {swap_blocks} swap blocks, "
                f"although {free / 2**30:.1f} GiB are free",
                "ask for fewer with --kv-blocks, or raise the limit on the process's memory",
            ) from error

    def forward(self, batch: Batch, read: ScoreReader | None = None) -> Tensor:
        """See `Backend.forward`."""
        with torch.inference_mode():
            if read is None:
                return self._decoder.forward(batch).float()
            return self._decoder.forward(batch, lambda logits: read(logits.float())).float()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Backend.copy_blocks`; a block is one piece of memory over all layers."""
        assert self._ops.pool is not None and self._host is not None, "allocate() comes before copy_blocks()"
        device = self._ops.pool.blocks
        ends = {"out": (device, self._host), "in": (self._host, device), "copy": (device, device)}
        for copy in copies:
            source, target = ends[copy.direction]
            target[torch.from_numpy(copy.target)] = source[torch.from_numpy(copy.source)]

    def self_check(self) -> None:
        """See `Backend.self_check`. Runs in a pool of its own."""
        vocab_size, block_size = self._ops.config.vocab_size, self.geometry.block_size
        kept = self._ops.pool
        self._ops.pool = self._pool(blocks_for(block_size))
        try:
            check_rows(
                self.forward,
                vocab_size,
                block_size,
                where="machine",
                advice="start without --deterministic, or with --dtype float32",
            )
        finally:
            self._ops.pool = kept

    def _pool(self, blocks: int) -> cpu.CpuPool:
        config, geometry = self._ops.config, self.geometry
        return cpu.CpuPool(
            blocks, config.layers, config.kv_heads, config.head_dim, geometry.block_size, geometry.dtype
        )


def _cpu_name() -> str:
    """The processor's name as its maker gives it, and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
