"""The CPU backend beyond its results: pools, refusals, and a self-check that can fail."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
import torch
from kvyard.engine.backends import backend_maker, choose_device
from kvyard.engine.backends.base import BackendError
from kvyard.engine.backends.cpu import STEP_LOGITS, STEP_TOKENS, CpuBackend
from kvyard.engine.backends.memory import step_bytes
from kvyard.engine.loading import Loaded, choose_dtype, load
from torch import Tensor

from tests.engine.running import Job, run
from tests.engine.tiny import LLAMA, random_tensors, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model."""
    return write_folder(tmp_path, LLAMA, random_tensors(LLAMA))


def _load(folder: Path, **changes: object) -> Loaded:
    arguments: dict[str, object] = {
        "device": "cpu", "dtype": "float32", "deterministic": True, "block_size": 8, "progress": lambda *_: None,
    }  # fmt: skip
    return load(str(folder), **arguments | changes)  # type: ignore[arg-type] # names and types match


def test_geometry(folder: Path) -> None:
    geometry = _load(folder, dtype="bfloat16").backend.geometry
    assert (geometry.layers, geometry.kv_heads, geometry.block_size) == (3, 2, 8)
    assert geometry.dtype == torch.bfloat16
    assert geometry.block_bytes == 2 * 3 * 8 * 2 * 16 * 2  # a head of 8 is stored as 16


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers(folder: Path) -> None:
    backend = _load(folder).backend
    blocks = backend.free_bytes() // backend.geometry.block_bytes + 1_000_000
    with pytest.raises(BackendError, match="GiB are free") as raised:
        backend.allocate(blocks, 5)
    assert "--kv-blocks" in raised.value.hint


def test_what_the_system_does_not_give_is_refused_in_words(folder: Path) -> None:
    backend = _load(folder).backend
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        with pytest.raises(BackendError, match=r"the system gives no 0\.5 GiB for"):
            backend.allocate((512 << 20) // backend.geometry.block_bytes, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_MEMORY_06_the_activations_of_a_step_are_no_room_for_the_pool(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _load(folder)
    kept = step_bytes(loaded.config, 4, STEP_TOKENS, STEP_LOGITS)
    assert kept >= STEP_LOGITS * loaded.config.vocab_size * 8
    for there, free in ((kept + 1000, 1000), (kept - 1000, 0)):
        monkeypatch.setattr("kvyard.engine.backends.cpu.available_bytes", lambda there=there: there)
        assert loaded.backend.free_bytes() == free


def test_the_pool_takes_memory_only_when_it_is_used(folder: Path) -> None:
    backend = _load(folder).backend
    before = backend.free_bytes()
    backend.allocate((512 << 20) // backend.geometry.block_bytes, 0)
    assert before - backend.free_bytes() < 256 << 20


def test_the_self_check_passes_and_leaves_the_pool_alone(folder: Path) -> None:
    backend = _load(folder).backend
    assert isinstance(backend, CpuBackend)
    backend.allocate(8, 2)
    pool = backend._ops.pool
    assert pool is not None
    pool.blocks.fill_(3.0)
    backend.self_check()
    assert backend._ops.pool is pool
    assert bool((pool.blocks == 3.0).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
def test_the_self_check_fails_where_a_row_depends_on_the_number_of_rows(folder: Path, rows: int) -> None:
    backend = _load(folder).backend
    assert isinstance(backend, CpuBackend)
    honest = backend._decoder.layers[1].down

    def product(x: Tensor) -> Tensor:
        out = honest(x)
        return torch.nextafter(out, out + 1) if len(x) == rows else out

    backend._decoder.layers[1].down = product
    backend.allocate(8, 0)
    with pytest.raises(BackendError, match=f"step of {rows} tokens differ") as raised:
        backend.self_check()
    assert "--deterministic" in raised.value.hint


def test_a_step_without_logits(folder: Path) -> None:
    """A chunk that does not reach the end of its prompt yields nothing, and the sequence goes on from it."""
    backend = _load(folder).backend
    backend.allocate(16, 0)
    job = Job(list(range(20)), 2, chunk=7)
    run(backend, [job], blocks=16)
    assert len(job.logits) == 2
    assert job.logits[0].dtype == torch.float32


def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert choose_device("auto") == "cpu"
    with pytest.raises(BackendError, match=r"no CUDA support|sees 0 devices") as raised:
        choose_device("cuda")
    assert "--device cpu" in raised.value.hint
    assert backend_maker("cpu") is CpuBackend


def test_the_automatic_type_is_one_that_the_processor_computes_in() -> None:
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert choose_dtype("cpu") == ("bfloat16" if fast else "float32")


def test_loading_says_what_it_runs_with(folder: Path) -> None:
    loaded = _load(folder, dtype="auto", deterministic=False)
    assert loaded.dtype_name == choose_dtype("cpu")
    assert loaded.backend.name == "cpu"
    assert "threads" in loaded.backend.device_name
    assert loaded.eos_ids == (2,)
