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
from kvyard.engine.backends.memory import available_bytes
from kvyard.engine.decoder import Decoder
from kvyard.engine.weights import Weights

_CHECKED_ROWS = (1, 2, 3, 5, 8, 17)
_CHECK_TOKENS = 64


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
        """Memory that the machine and the cgroups leave to this process."""
        return available_bytes()

    def allocate(self, blocks: int, swap_blocks: int) -> None:
        """Reserve both pools; pages are taken from the machine when they are first written."""
        needed, free = (blocks + swap_blocks) * self.geometry.block_bytes, self.free_bytes()
        if needed > free:
            raise BackendError(
                f"{blocks} KV blocks and {swap_blocks} swap blocks take {needed / 2**30:.1f} GiB, "
                f"but {free / 2**30:.1f} GiB are free",
                "ask for fewer with --kv-blocks, or free memory",
            )
        self._ops.pool = self._pool(blocks)
        self._host = torch.empty(swap_blocks, *self._ops.pool.blocks.shape[1:], dtype=self.geometry.dtype)

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
        """One sequence of 64 tokens in one step, and again in steps of 1, 2, 3, 5, 8, 17 and the rest.

        Every position's logits must have the same bits. Runs in a pool of its own.
        """
        kept, self._ops.pool = self._ops.pool, self._pool(-(-_CHECK_TOKENS // self.geometry.block_size))
        try:
            whole = self._stretch(0, _CHECK_TOKENS)
            begin = 0
            for rows in (*_CHECKED_ROWS, _CHECK_TOKENS - sum(_CHECKED_ROWS)):
                self._compare(whole[begin : begin + rows], self._stretch(begin, begin + rows))
                begin += rows
        finally:
            self._ops.pool = kept

    def _compare(self, expected: Tensor, found: Tensor) -> None:
        if torch.equal(expected, found):
            return
        differing = int((expected != found).any(dim=1).sum())
        raise BackendError(
            f"on this machine a row's logits depend on the size of the step: {differing} of {len(found)} rows of a "
            f"step of {len(found)} tokens differ from a step of {_CHECK_TOKENS}, by up to "
            f"{float((expected - found).abs().max()):.1e}",
            "start without --deterministic, or with --dtype float32",
        )

    def _stretch(self, begin: int, end: int) -> Tensor:
        """Logits of the tokens `begin..end` of the check's sequence, whose earlier ones are in the pool."""
        positions = torch.arange(begin, end, dtype=torch.int32)
        blocks = -(-_CHECK_TOKENS // self.geometry.block_size)
        return self.forward(
            Batch(
                tokens=(positions * 7919 + 11) % self._ops.config.vocab_size,
                positions=positions,
                starts=torch.tensor([0, end - begin], dtype=torch.int32),
                lengths=torch.tensor([end], dtype=torch.int32),
                tables=torch.arange(blocks, dtype=torch.int32)[None],
                cache_slots=positions.long(),
                logit_rows=torch.arange(end - begin),
                decodes=int(end - begin == 1),
            )
        )

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
