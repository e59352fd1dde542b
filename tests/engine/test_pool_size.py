"""The pool's size and a sequence's length: settled with numbers before anything is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.engine.backends.base import BackendError
from kvyard.engine.pool_size import CPU_MOST, CPU_SHARE, PoolSize, pool_size

GIB = 1 << 30


def sized(**changes: object) -> PoolSize:
    values: dict[str, object] = {
        "asked": None,
        "max_model_len": None,
        "model_limit": 2048,
        "block_size": 16,
        "block_bytes": 1 << 20,
        "free_bytes": 8 * GIB,
        "on_cpu": True,
    }
    return pool_size(**{**values, **changes})  # type: ignore[arg-type]


def test_a_cpu_pool_takes_a_share_of_free_memory_up_to_a_bound() -> None:
    assert sized().blocks == int(8 * GIB * CPU_SHARE) >> 20
    assert sized(free_bytes=1000 * GIB).blocks == CPU_MOST >> 20
    assert sized().max_model_len == 2048


def test_a_gpu_pool_takes_nearly_all() -> None:
    assert sized(on_cpu=False, free_bytes=100 * GIB).blocks == int(90 * GIB) >> 20


def test_MEMORY_05_a_pool_too_small_for_the_models_length_lowers_it() -> None:
    assert sized(asked=10) == PoolSize(10, 161)


def test_MEMORY_05_a_length_that_was_asked_for_must_fit() -> None:
    with pytest.raises(BackendError, match="needs 128 KV blocks and the pool has 10") as refusal:
        sized(asked=10, max_model_len=2048)
    assert "--kv-blocks" in refusal.value.hint
    assert "161" in refusal.value.hint


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(BackendError, match="beyond the model's limit of 2048"):
        sized(max_model_len=2049)


def test_MEMORY_06_more_than_is_free_is_refused_with_the_numbers() -> None:
    with pytest.raises(BackendError, match="9000 KV blocks take 9000 MiB and 8192 MiB are free"):
        sized(asked=9000)


def test_MEMORY_02_no_memory_at_all_is_a_sentence() -> None:
    with pytest.raises(BackendError, match="no KV block fits"):
        sized(free_bytes=0)


@given(st.integers(1, 500) | st.none(), st.integers(2, 4096) | st.none(), st.integers(1, 64), st.integers(0, 4 * GIB))
def test_a_full_length_sequence_always_fits(asked: int | None, length: int | None, block: int, free: int) -> None:
    try:
        size = sized(asked=asked, max_model_len=length, block_size=block, free_bytes=free, model_limit=4096)
    except BackendError as error:
        assert error.hint
        return
    assert -(-(size.max_model_len - 1) // block) <= size.blocks
    assert size.blocks << 20 <= free
    assert length is None or size.max_model_len == length
