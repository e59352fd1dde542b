"""Tile sizes of every kernel, in one place: the launchers and the ahead-of-time compile check read the same.

A tile size never depends on the batch, so that a row's result does not either.
"""

from __future__ import annotations

from dataclasses import dataclass

SPLIT = 256
"""Context positions of one split of decode attention. A constant, so that splits lie at fixed positions."""
MERGE_TILE = 16
"""Splits that the merge reads at once."""
VOCAB_CHUNK = 4096
"""Logits that one program of the argmax reads."""
CANDIDATE_TILE = 1024
"""Chunk winners that the second stage of the argmax reads at once."""
UNIFORM_TILE = 32
"""Rows whose random numbers one program makes."""
GATED_TILE = 1024
"""Elements of one program of the gated activation."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tile sizes of one attention kernel for one head shape."""

    rows: int
    """Rows of the query tile: the group's heads for decode, tokens x heads for chunks."""
    keys: int
    """Context positions of one tile; divides `SPLIT`."""
    dims: int
    """The head dimension padded to a power of two."""
    warps: int
    stages: int


def decode_config(head_dim: int, group: int, itemsize: int) -> AttentionConfig:
    """Decode attention: `group` query heads share one KV head whose elements have `itemsize` bytes.

    A tile of keys is 16 KiB, so that keys and values of three stages fit into shared memory; half of that in
    float32, whose products in three parts need more registers.
    """
    dims = power_of_two(max(head_dim, 16))
    keys = max(16, min(128, (16384 if itemsize < 4 else 8192) // (dims * itemsize)))
    rows = max(16, power_of_two(group))
    return AttentionConfig(rows, keys, dims, warps=4, stages=2 if itemsize == 4 else 3)


def mixed_config(head_dim: int, group: int, itemsize: int) -> AttentionConfig:
    """Attention over chunks: the tile's rows are tokens x the `group` query heads of one KV head."""
    dims = power_of_two(max(head_dim, 16))
    keys = max(16, min(64, (16384 if itemsize < 4 else 8192) // (dims * itemsize)))
    wide = itemsize == 4 and dims >= 128
    rows = max(32 if itemsize == 4 or dims >= 256 else 64, power_of_two(group))
    return AttentionConfig(rows, keys, dims, warps=8 if wide else 4, stages=2)


def chunk_tokens(config: AttentionConfig, group: int) -> int:
    """Tokens of a chunk that one query tile of the mixed kernel holds."""
    return config.rows // group


def norm_warps(padded: int) -> int:
    """Warps of one row's RMSNorm: 16 elements a thread at most."""
    return max(1, min(16, padded // 512))
