"""How many KV blocks, and how long a sequence may be: three limits settled before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from kvyard.engine.backends.base import BackendError

CPU_SHARE = 0.25
"""Share of free memory that the pool takes on a CPU, where everything else lives too."""
CPU_MOST = 4 << 30
"""Bytes that the pool takes on a CPU at most unless it is told otherwise."""
GPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of the pool and tokens of a sequence."""

    blocks: int
    max_model_len: int


def pool_size(
    *,
    asked: int | None,
    max_model_len: int | None,
    model_limit: int,
    block_size: int,
    block_bytes: int,
    free_bytes: int,
    on_cpu: bool,
) -> PoolSize:
    """Settle both. Raises BackendError with the numbers.

    A length that was asked for must fit, or the start is refused; the model's own limit is lowered to what
    the pool can hold.
    """
    if max_model_len is not None and max_model_len > model_limit:
        raise BackendError(
            f"max_model_len {max_model_len} is beyond the model's limit of {model_limit} tokens",
            f"leave it out or ask for at most {model_limit}",
        )
    blocks = asked if asked is not None else _from_memory(free_bytes, block_bytes, on_cpu)
    if asked is not None and asked * block_bytes > free_bytes:
        raise BackendError(
            f"{asked} KV blocks take {asked * block_bytes >> 20} MiB and {free_bytes >> 20} MiB are free",
            f"ask for at most {free_bytes // block_bytes} with --kv-blocks, or leave it out",
        )
    if blocks < 1:
        raise BackendError(
            f"no KV block fits: one takes {block_bytes} bytes and {free_bytes >> 20} MiB are free",
            "free memory, or choose a smaller --block-size",
        )
    # The last output token is never fed back, so a full-length sequence holds one token less.
    wanted = max_model_len if max_model_len is not None else model_limit
    needed = -(-(wanted - 1) // block_size)
    if needed <= blocks:
        return PoolSize(blocks, wanted)
    if max_model_len is not None:
        raise BackendError(
            f"a sequence of max_model_len {max_model_len} needs {needed} KV blocks and the pool has {blocks}",
            f"give the pool {needed} with --kv-blocks, or lower --max-model-len to {blocks * block_size + 1}",
        )
    return PoolSize(blocks, blocks * block_size + 1)


def _from_memory(free_bytes: int, block_bytes: int, on_cpu: bool) -> int:
    usable = min(free_bytes * CPU_SHARE, CPU_MOST) if on_cpu else free_bytes * GPU_SHARE
    return int(usable) // block_bytes
