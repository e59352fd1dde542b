"""The CUDA backend: the model on a GPU, its attention, norms and cache by our Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvyard.core.plan import BlockCopy
from kvyard.engine.backends.base import BackendError, Batch, KvGeometry, ScoreReader
from kvyard.engine.backends.cuda_ops import CudaOps, KvPool
from kvyard.engine.backends.memory import available_bytes, step_bytes
from kvyard.engine.backends.self_check import blocks_for, check_rows
from kvyard.engine.decoder import Decoder
from kvyard.engine.weights import Weights

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 products, which the kernels are built upon."""
STEP_TOKENS = 8192
"""Tokens of a step for which memory is kept back when the pool is sized."""
STEP_LOGITS = 256
"""Rows of logits for which memory is kept back."""


class CudaBackend:
    """A model on one GPU; see `Backend`. On `device` "cpu" the kernels run in Triton's interpreter, for tests."""

    name = "cuda"

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        deterministic: bool,
        block_size: int,
        progress: Callable[[str, float], None],
        device: str = "cuda",
    ) -> None:
        self._device = torch.device(device)
        self.device_name = describe(device)
        config = weights.config
        self._ops = CudaOps(config, weights.tensors["embed"], dtype, deterministic, self._device)
        self._decoder = Decoder(weights, self._ops, progress)
        self._ops.loaded()
        self._host: KvPool | None = None
        self.geometry = KvGeometry(config.layers, config.kv_heads, config.head_dim, block_size, dtype)

    def free_bytes(self) -> int:
        """What the device has left, and what torch holds unused, less the activations of a large step."""
        if self._device.type != "cuda":
            return available_bytes()
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        kept = step_bytes(self._ops.config, self.geometry.dtype.itemsize, STEP_TOKENS, STEP_LOGITS)
        return max(0, free + unused - kept)

    def allocate(self, blocks: int, swap_blocks: int) -> None:
        """Reserve both pools; the host's is pinned, so that copies run at the bus's speed."""
        needed = blocks * self.geometry.block_bytes
        on_gpu = self._device.type == "cuda"
        try:
            self._ops.pool = KvPool(self.geometry, blocks, self._device)
            self._host = KvPool(self.geometry, swap_blocks, torch.device("cpu"), pinned=on_gpu and swap_blocks > 0)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise BackendError(
                f"{blocks} KV blocks ({needed / 2**30:.1f} GiB on {self.device_name}) and {swap_blocks} swap blocks "
                f"({swap_blocks * self.geometry.block_bytes / 2**30:.1f} GiB of pinned host memory) do not fit: "
                f"{self.free_bytes() / 2**30:.1f} GiB are free on the device",
                "ask for fewer with --kv-blocks, or end what else uses the device",
            ) from error

    def forward(self, batch: Batch, read: ScoreReader | None = None) -> Tensor:
        """See `Backend.forward`."""
        with torch.inference_mode():
            moved = replace(batch, logit_rows=batch.logit_rows.to(self._device, non_blocking=True))
            if read is None or batch.scored_rows is None:
                return self._to_host(self._decoder.forward(moved).float())
            moved.scored_rows = batch.scored_rows.to(self._device, non_blocking=True)
            logits = self._decoder.forward(moved, lambda piece: read(self._to_host(piece.float())))
            return self._to_host(logits.float())

    def _to_host(self, logits: Tensor) -> Tensor:
        """Through pinned memory, which torch keeps for the next step: pageable memory would be copied twice."""
        if logits.device.type == "cpu":
            return logits
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Backend.copy_blocks`; a block is one piece of memory over all layers."""
        assert self._ops.pool is not None and self._host is not None, "allocate() comes before copy_blocks()"
        device, host = self._ops.pool.blocks, self._host.blocks
        ends = {"out": (device, host), "in": (host, device), "copy": (device, device)}
        for copy in copies:
            source, target = ends[copy.direction]
            gathered = source[torch.from_numpy(copy.source).to(source.device)].to(target.device)
            target[torch.from_numpy(copy.target).to(target.device)] = gathered

    def self_check(self) -> None:
        """See `Backend.self_check`. Runs in a pool of its own."""
        vocab_size, block_size = self._ops.config.vocab_size, self.geometry.block_size
        kept = self._ops.pool
        self._ops.pool = KvPool(self.geometry, blocks_for(block_size), self._device)
        try:
            check_rows(
                self.forward,
                vocab_size,
                block_size,
                where="device",
                advice="start without --deterministic",
            )
        finally:
            self._ops.pool = kept


def describe(name: str) -> str:
    """The device in words. Raises BackendError where it cannot run the kernels."""
    device = torch.device(name)
    if device.type != "cuda":
        return "Triton's interpreter on the CPU"
    if not torch.cuda.is_available():
        raise BackendError(
            f"no CUDA device works here: torch {torch.__version__} sees {torch.cuda.device_count()}",
            "install a CUDA build of torch and a driver, or start with --device cpu",
        )
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is None and capability < LEAST_CAPABILITY:
        raise BackendError(
            f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (Ampere) or newer",
            "start with --device cpu, or use a newer GPU",
        )
    total = torch.cuda.get_device_properties(device).total_memory
    return f"{name}, {total / 2**30:.0f} GiB, capability {capability[0]}.{capability[1]}"
