"""Small models of every family against a dense float64 decoder, through files, cache, chunks and decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from kvyard.engine.backends.cpu import CpuBackend
from kvyard.engine.loading import load
from kvyard.engine.weights_gguf import load_gguf

from tests.engine.running import Job, run, solo
from tests.engine.tiny import GEMMA, LLAMA, dense_logits, gguf_name, random_tensors, write_folder, write_gguf

_PROMPT = [5, 17, 3, 96, 44, 44, 8, 61, 2, 30, 71, 12, 9, 9, 55, 80, 1, 33, 27]

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-untied": LLAMA | {"tie_word_embeddings": False},
    "llama-linear": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-3": LLAMA
    | {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 8},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "gemma3": GEMMA,
}


def _backend(
    path: Path, *, deterministic: bool = False, block_size: int = 4, dtype: Literal["float32", "bfloat16"] = "float32"
) -> CpuBackend:
    loaded = load(
        str(path),
        device="cpu",
        dtype=dtype,
        deterministic=deterministic,
        block_size=block_size,
        progress=lambda what, fraction: None,
    )
    loaded.backend.allocate(256, 0)
    assert isinstance(loaded.backend, CpuBackend)
    return loaded.backend


@pytest.mark.parametrize("family", _FAMILIES)
def test_every_family_from_a_folder(family: str, tmp_path: Path) -> None:
    settings = _FAMILIES[family]
    tensors = random_tensors(settings, head=not settings["tie_word_embeddings"])
    backend = _backend(write_folder(tmp_path, settings, tensors, shards=3))
    for chunk in (1 << 20, 5):
        job = solo(backend, _PROMPT, 12, chunk=chunk)
        expected = dense_logits(settings, tensors, _PROMPT + job.tokens)
        for i, logits in enumerate(job.logits):
            assert (logits.double() - expected[len(_PROMPT) - 1 + i]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_families_from_gguf(kind: str, tmp_path: Path) -> None:
    settings = _FAMILIES[kind]
    tensors = random_tensors(settings)
    job = solo(_backend(write_gguf(tmp_path / "m.gguf", settings, tensors)), _PROMPT, 6)
    expected = dense_logits(settings, tensors, _PROMPT + job.tokens)
    for i, logits in enumerate(job.logits):
        assert (logits.double() - expected[len(_PROMPT) - 1 + i]).abs().max() < 1e-4


def test_llama_3_factors_in_a_gguf_tensor(tmp_path: Path) -> None:
    settings = _FAMILIES["llama-3"]
    tensors = random_tensors(settings)
    from kvyard.engine.model_config import llama3_factors

    factors = torch.tensor(llama3_factors(500_000.0, 8, 8.0, 1.0, 4.0, 64))
    path = write_gguf(tmp_path / "m.gguf", settings, tensors | {"rope_freqs.weight": factors})
    job = solo(_backend(path), _PROMPT, 3)
    expected = dense_logits(settings, tensors, _PROMPT + job.tokens)
    assert (job.logits[2].double() - expected[len(_PROMPT) + 1]).abs().max() < 1e-4


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_gguf_computes_with_the_values_that_the_file_stands_for(quantisation: str, tmp_path: Path) -> None:
    settings = LLAMA | {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    kind = gguf.GGMLQuantizationType[quantisation]
    tensors = random_tensors(settings)
    job = solo(_backend(write_gguf(tmp_path / "m.gguf", settings, tensors, quantisation=kind)), _PROMPT, 3)
    rounded = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).copy())
        if tensor.ndim == 2
        else tensor
        for name, tensor in tensors.items()
    }
    expected = dense_logits(settings, rounded, _PROMPT + job.tokens)
    assert (job.logits[2].double() - expected[len(_PROMPT) + 1]).abs().max() < 1e-4


def test_both_forms_of_a_matrix_agree_across_the_number_of_rows(tmp_path: Path) -> None:
    """bfloat16 outside deterministic mode: few rows go through the quantised form, many through the dense one."""
    settings = LLAMA | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    path = write_gguf(
        tmp_path / "m.gguf", settings, random_tensors(settings), quantisation=gguf.GGMLQuantizationType.Q4_1
    )
    exact = _backend(path)
    loaded = load(
        str(path), device="cpu", dtype="bfloat16", deterministic=False, block_size=4, progress=lambda what, part: None
    )
    loaded.backend.allocate(256, 0)
    expected = solo(exact, _PROMPT, 1).logits[0]
    for chunk in (3, 16, 19):
        found = solo(loaded.backend, _PROMPT, 1, chunk=chunk).logits[0]
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()
        assert not torch.equal(found, found.bfloat16().float())  # logits are not rounded


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_model_02_a_head_beside_tied_embeddings(scale: float, tmp_path: Path) -> None:
    """MODEL-02: config.json rules: tied ignores a stored head; untied uses it."""
    tensors = random_tensors(LLAMA)
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * scale}
    tied = solo(_backend(write_folder(tmp_path / "tied", LLAMA, stored)), _PROMPT, 1)
    assert (tied.logits[0].double() - dense_logits(LLAMA, stored, _PROMPT)[-1]).abs().max() < 1e-4
    untied = LLAMA | {"tie_word_embeddings": False}
    own = solo(_backend(write_folder(tmp_path / "own", untied, stored)), _PROMPT, 1)
    assert (own.logits[0].double() - dense_logits(untied, stored, _PROMPT)[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("nested", [False, True])
def test_model_04_the_base_frequency_is_the_files(nested: bool, tmp_path: Path) -> None:
    """MODEL-04: at top level or in the rope parameters; position 999 would differ by far with 10,000."""
    plain = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"max_position_embeddings": 1024}
    theta = 75_000.0
    settings = plain | (
        {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}} if nested else {"rope_theta": theta}
    )
    tensors = random_tensors(settings)
    prompt = [(i * 31 + 7) % 97 for i in range(1000)]
    job = solo(_backend(write_folder(tmp_path, settings, tensors)), prompt, 1)
    assert (job.logits[0].double() - dense_logits(settings, tensors, prompt)[-1]).abs().max() < 1e-3
    wrong = dense_logits(LLAMA, tensors, prompt)[-1]
    assert (job.logits[0].double() - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("length", [7, 8, 9, 30])
def test_model_08_a_window_is_the_same_in_prefill_and_decode(length: int, tmp_path: Path) -> None:
    """MODEL-08: one prefill, and a prefill of 5 and decodes, at every position."""
    settings = _FAMILIES["mistral"]
    backend = _backend(write_folder(tmp_path, settings, random_tensors(settings)))
    tokens = [(i * 13 + 5) % 97 for i in range(length)]
    whole = [solo(backend, tokens[: i + 1], 1).logits[0] for i in range(4, length)]
    stepped = Job(tokens[:5], 1)
    run(backend, [stepped])
    for i in range(5, length):
        job = Job(tokens[: i + 1], 1, chunk=1)
        run(backend, [job])
        assert (job.logits[0] - whole[i - 4]).abs().max() < 1e-4
    assert (stepped.logits[0] - whole[0]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mistral"])
def test_deterministic_mode_holds_for_every_family(
    family: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    settings = _FAMILIES[family]
    folder = write_folder(tmp_path, settings, random_tensors(settings))
    backend = _backend(folder, deterministic=True, dtype=dtype)
    backend.self_check()
    alone = solo(backend, _PROMPT, 10)
    for chunk in (1, 4, 7):
        assert solo(backend, _PROMPT, 10, chunk=chunk).hashes == alone.hashes
    others = [Job([n, n + 1, 7 * n % 97], 6 + n, enters=n) for n in range(5)]
    beside = Job(_PROMPT, 10, chunk=6, enters=2)
    run(backend, [*others, beside])
    assert beside.hashes == alone.hashes


def test_positions_beyond_the_first_tables(tmp_path: Path) -> None:
    """Rotary tables grow on the way; what was computed with shorter ones stays right."""
    settings = LLAMA | {"max_position_embeddings": 6000, "num_hidden_layers": 1}
    tensors = random_tensors(settings)
    backend = _backend(write_folder(tmp_path, settings, tensors), block_size=32)
    prompt = [(i * 31 + 7) % 97 for i in range(4120)]
    job = solo(backend, prompt, 2, chunk=1024)
    expected = dense_logits(settings, tensors, prompt + job.tokens[:1])
    assert (job.logits[1].double() - expected[-1]).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_K", "Q5_0"])
def test_other_quantisations_are_read_by_the_package(kind: str, tmp_path: Path) -> None:
    """Types that stay no longer than until they are dequantised; the bytes are random, but for sane scales."""
    settings = LLAMA | {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
    }
    quantisation = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[quantisation]
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    names = {"block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 256}
    for name, value in (names | {"attention.head_count": 4, "attention.head_count_kv": 2}).items():
        writer.add_uint32(f"qwen2.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    expected = {}
    for name, tensor in random_tensors(settings).items():
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor.numpy())
            continue
        blocks = generator.integers(0, 256, (tensor.shape[0], tensor.shape[1] // elements, size), dtype=np.uint8)
        scale = np.array([0.01], np.float16).view(np.uint8)
        for place in (slice(0, 2), slice(2, 4)) if kind in ("Q4_K", "Q5_K") else (slice(0, 2), slice(size - 2, size)):
            blocks[..., place] = scale
        raw = blocks.reshape(tensor.shape[0], -1)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=quantisation)
        expected[name] = gguf.dequantize(raw, quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = load_gguf(tmp_path / "m.gguf", torch.float32, lambda what, fraction: None)
    assert np.array_equal(weights.matrix("layers.0.down").numpy(), expected["model.layers.0.mlp.down_proj.weight"])
    assert np.array_equal(weights.matrix("layers.0.o").numpy(), expected["model.layers.0.self_attn.o_proj.weight"])
