"""The CUDA backend end to end: in Triton's interpreter here, on a GPU where there is one, against the CPU backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from kvyard.core.plan import BlockCopy
from kvyard.engine import decoder
from kvyard.engine.backends import cuda_ops, self_check
from kvyard.engine.backends.base import BackendError, Batch
from kvyard.engine.backends.cpu import CpuBackend
from kvyard.engine.backends.cuda import CudaBackend
from kvyard.engine.loading import load, load_weights

from tests.engine.running import Job, run
from tests.engine.tiny import GEMMA, LLAMA, random_tensors, write_folder

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 2},
    "gemma3": GEMMA | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
ONE_LAYER = LLAMA | {"num_hidden_layers": 1}
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="neither the interpreter nor a device"
)


def quiet(what: str, fraction: float) -> None:
    """No progress shown."""


def folder(path: Path, family: str) -> Path:
    return write_folder(path, FAMILIES[family], random_tensors(FAMILIES[family]))


def one_layer(path: Path) -> Path:
    """Enough where each layer does the same."""
    return write_folder(path, ONE_LAYER, random_tensors(ONE_LAYER))


def on_cuda(path: Path, *, deterministic: bool = False, blocks: int = 64, swap: int = 0) -> CudaBackend:
    weights = load_weights(path, torch.float32, quiet)
    backend = CudaBackend(weights, torch.float32, deterministic, 4, quiet, device=DEVICE)
    backend.allocate(blocks, swap)
    return backend


def on_cpu(path: Path) -> CpuBackend:
    backend = CpuBackend(load_weights(path, torch.float32, quiet), torch.float32, False, 4, quiet)
    backend.allocate(64, 0)
    return backend


def jobs(outputs: int = 4) -> list[Job]:
    """Prompts in one piece and in chunks, entering at different steps: mixed batches, then decodes alone."""
    return [
        Job([5, 17, 3, 96, 44, 44, 8, 61, 2, 30, 71], outputs),
        Job([9, 9, 55, 80, 1, 33, 27, 12, 4, 4, 4, 90, 13], outputs, chunk=5),
        Job([7], outputs, enters=1),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cpu_backends_tokens(family: str, tmp_path: Path) -> None:
    path = folder(tmp_path, family)
    expected, found = jobs(), jobs()
    run(on_cpu(path), expected, blocks=64)
    run(on_cuda(path), found, blocks=64)
    for left, right in zip(expected, found, strict=True):
        assert right.tokens == left.tokens
        for a, b in zip(left.logits, right.logits, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_long_decodes_beside_chunks_take_the_split_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path, "llama")
    expected, found = jobs(), jobs()
    run(on_cpu(path), expected, blocks=64)
    monkeypatch.setattr(cuda_ops, "LONG_CONTEXT", 1)
    run(on_cuda(path), found, blocks=64)
    assert [job.tokens for job in found] == [job.tokens for job in expected]


def test_deterministic_logits_do_not_depend_on_company(tmp_path: Path) -> None:
    backend = on_cuda(one_layer(tmp_path), deterministic=True)
    together = jobs(3)
    run(backend, together, blocks=64)
    for job in jobs(3):
        job.enters, job.chunk = 0, 3
        run(backend, [job], blocks=64, seed=1)
        same = next(other for other in together if other.prompt == job.prompt)
        assert job.hashes == same.hashes


def test_scored_rows_are_read_in_passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "SCORED_PIECE", 2)
    backend = on_cuda(folder(tmp_path, "llama"), deterministic=True)
    batch = Batch(
        tokens=torch.tensor([5, 17, 3, 96, 44], dtype=torch.int32),
        positions=torch.arange(5, dtype=torch.int32),
        starts=torch.tensor([0, 5], dtype=torch.int32),
        lengths=torch.tensor([5], dtype=torch.int32),
        tables=torch.tensor([[1, 0]], dtype=torch.int32),
        cache_slots=torch.tensor([4, 5, 6, 7, 0]),
        logit_rows=torch.arange(5),
        decodes=0,
    )
    whole = backend.forward(batch)
    batch.logit_rows, batch.scored_rows = torch.tensor([4]), torch.tensor([0, 1, 2])
    pieces: list[torch.Tensor] = []
    last = backend.forward(batch, lambda logits: pieces.append(logits.clone()))
    assert [len(piece) for piece in pieces] == [2, 1]
    assert torch.equal(torch.cat(pieces), whole[:3])
    assert torch.equal(last, whole[4:])


def test_self_check_passes_and_finds_a_dependence_on_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "TOKENS", 12)
    monkeypatch.setattr(self_check, "ROWS", (1, 2, 5))
    backend = on_cuda(one_layer(tmp_path), deterministic=True)
    backend.self_check()
    honest = backend._ops.pool
    plain = cuda_ops.Product.__call__

    def uneven(self: cuda_ops.Product, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * (1.0 + 1e-6 * len(x))

    monkeypatch.setattr(cuda_ops.RowTiles, "__call__", lambda self, x: uneven(self._product, x))
    with pytest.raises(BackendError, match="depend on the size of the step") as caught:
        backend.self_check()
    assert "deterministic" in caught.value.hint
    assert backend._ops.pool is honest


def test_blocks_go_out_and_come_back(tmp_path: Path) -> None:
    backend = on_cuda(folder(tmp_path, "llama"), blocks=6, swap=3)
    assert backend._ops.pool is not None
    pool = backend._ops.pool.blocks
    pool.copy_(torch.arange(pool.numel(), dtype=torch.float32).view(pool.shape))
    before = pool.clone()
    out = BlockCopy(1, "out", np.array([1, 4]), np.array([2, 0]))
    back = BlockCopy(1, "in", np.array([2, 0]), np.array([3, 5]))
    backend.copy_blocks([out, back, BlockCopy(1, "copy", np.array([0]), np.array([2]))])
    assert torch.equal(pool[3], before[1])
    assert torch.equal(pool[5], before[4])
    assert torch.equal(pool[2], before[0])
    assert torch.equal(pool[[0, 1, 4]], before[[0, 1, 4]])


def test_an_exchange_within_one_copy_reads_before_it_writes(tmp_path: Path) -> None:
    backend = on_cuda(folder(tmp_path, "llama"), blocks=2)
    assert backend._ops.pool is not None
    pool = backend._ops.pool.blocks
    pool[0], pool[1] = 1.0, 2.0
    backend.copy_blocks([BlockCopy(1, "copy", np.array([0, 1]), np.array([1, 0]))])
    assert (pool[0] == 2.0).all()
    assert (pool[1] == 1.0).all()


def test_a_tied_head_is_on_the_device_once(tmp_path: Path) -> None:
    backend = on_cuda(folder(tmp_path, "llama"))
    head = backend._decoder.head
    assert isinstance(head, cuda_ops.Product)
    assert head._weight.data_ptr() == backend._ops.embedding.data_ptr()


def test_a_pool_that_cannot_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    backend = on_cuda(folder(tmp_path, "llama"))
    with pytest.raises(BackendError, match=r"KV blocks \(\d+\.\d GiB") as caught:
        backend.allocate(1 << 40, 0)
    assert "--kv-blocks" in caught.value.hint


def test_geometry_and_name(tmp_path: Path) -> None:
    backend = on_cuda(folder(tmp_path, "qwen3"))
    assert (backend.geometry.layers, backend.geometry.kv_heads, backend.geometry.head_dim) == (2, 2, 16)
    assert backend.name == "cuda"
    assert backend.device_name
    assert backend.free_bytes() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_what_is_missing(tmp_path: Path) -> None:
    path = str(folder(tmp_path, "llama"))
    with pytest.raises(BackendError, match="cuda") as caught:
        load(path, device="cuda", dtype="float32", deterministic=False, block_size=4, progress=quiet)
    assert "--device cpu" in caught.value.hint
    weights = load_weights(Path(path), torch.float32, quiet)
    with pytest.raises(BackendError, match="no CUDA device works here"):
        CudaBackend(weights, torch.float32, False, 4, quiet)
