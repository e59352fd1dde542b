"""The model's part of the check: tokens against the CPU, and tokens per second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvyard.engine.backends.base import BackendError
from kvyard.engine.backends.cuda import CudaBackend
from kvyard.engine.gpu_check.generate import Pace, Stream, blocks_needed, generate
from kvyard.engine.gpu_check.models import SMOLLM2_135M, TINY, random_weights
from kvyard.engine.gpu_check.plain import PlainModel
from kvyard.engine.loading import load_weights
from kvyard.engine.weights import Weights

CLOSE = 1e-3
"""Top-2 gap of logits under which two right float32 computations may choose differently."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Greedy tokens of one model, in float32, against those of the CPU."""

    name: str
    sequences: int
    compared: int
    """Tokens up to the first close call of each sequence."""
    close_calls: int
    """Sequences that parted where the two best logits lay under `CLOSE` apart; allowed."""
    wrong: int
    """Sequences that parted elsewhere."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Greedy generation at one batch size, the host's work included."""

    name: str
    batch: int
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    step_milliseconds: float
    """Of a decode step."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Whether deterministic mode would start on this device."""

    dtype: str
    fault: str


def quiet(what: str, fraction: float) -> None:
    """No progress shown."""


def cuda_backend(weights: Weights, dtype: torch.dtype, device: str, *, deterministic: bool = False) -> CudaBackend:
    """A backend with no pool yet."""
    return CudaBackend(weights, dtype, deterministic, 16, quiet, device=device)


def tiny_tokens(device: str, *, dry: bool) -> Iterator[Tokens]:
    """Random models of each family, prompts in chunks of different sizes, against plain torch on the CPU."""
    outputs = 3 if dry else 24
    for name, config in TINY.items():
        weights = random_weights(config, torch.float32)
        backend = cuda_backend(weights, torch.float32, device)
        expected, found = _prompts(outputs, config.vocab_size), _prompts(outputs, config.vocab_size)
        blocks = blocks_needed(expected, 16)
        generate(PlainModel(weights, 16, blocks).forward, expected, 16)
        backend.allocate(blocks, 0)
        generate(backend.forward, found, 16)
        yield compare(f"tiny {name}", found, [s.tokens for s in expected])


def _prompts(outputs: int, vocab: int) -> list[Stream]:
    random = torch.Generator().manual_seed(1)
    lengths = ((1, 1 << 20), (19, 1 << 20), (40, 7))
    return [Stream(torch.randint(3, vocab, (n,), generator=random).tolist(), outputs, chunk) for n, chunk in lengths]


def compare(name: str, found: list[Stream], expected: list[list[int]]) -> Tokens:
    """A difference counts unless the device itself saw two logits closer than `CLOSE` there."""
    compared, close, wrong = 0, 0, 0
    for sequence, wanted in zip(found, expected, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(sequence.tokens, wanted, strict=True)) if a != b), None)
        compared += len(wanted) if parted is None else parted
        if parted is not None and sequence.gaps[parted] < CLOSE:
            close += 1
        elif parted is not None:
            wrong += 1
    return Tokens(name, len(found), compared, close, wrong)


def default_tokens(model: Path, reference: Path, device: str) -> Tokens:
    """The default model in float32 against the stored tokens of a CPU run (Transformers, float32)."""
    items = json.loads(reference.read_text(encoding="utf-8"))["items"]
    backend = cuda_backend(load_weights(model, torch.float32, quiet), torch.float32, device)
    found = [Stream(item["ids"], len(item["greedy"]), (64, 17, 256)[i % 3]) for i, item in enumerate(items)]
    backend.allocate(blocks_needed(found, 16), 0)
    generate(backend.forward, found, 16)
    return compare("smollm2-135m", found, [item["greedy"] for item in items])


def deterministic(device: str, *, dry: bool) -> Iterator[SelfCheck]:
    """Deterministic mode's self-check, on the default model's shape."""
    config = TINY["llama"] if dry else SMOLLM2_135M
    for dtype in (torch.float32,) if dry else (torch.float32, torch.bfloat16):
        backend = cuda_backend(random_weights(config, dtype), dtype, device, deterministic=True)
        fault = ""
        try:
            backend.self_check()
        except BackendError as error:
            fault = str(error)
        yield SelfCheck(str(dtype).removeprefix("torch."), fault)


def speeds(model: Path | None, device: str, *, dry: bool) -> Iterator[Speed]:
    """bfloat16, prompts of 256 tokens, 128 outputs. Random weights of the same shape where the model is not there."""
    dtype = torch.float32 if dry else torch.bfloat16
    if dry:
        weights, name = random_weights(TINY["llama"], dtype), "tiny llama"
    elif model is not None:
        weights, name = load_weights(model, dtype, quiet), "smollm2-135m"
    else:
        weights, name = random_weights(SMOLLM2_135M, dtype), "random weights shaped like smollm2-135m"
    backend = cuda_backend(weights, dtype, device)
    prompt, outputs, batches = (9, 3, (1, 2)) if dry else (256, 128, (1, 8, 32))
    backend.allocate(max(batches) * -(-(prompt + outputs) // 16), 0)
    _pace(backend, 1, prompt, 4)  # compiles
    for batch in batches:
        _pace(backend, batch, prompt, 4)  # cuBLAS picks its algorithms at the first call of a shape
        pace = _pace(backend, batch, prompt, outputs)
        steps = pace.decode_tokens / batch
        yield Speed(
            name,
            batch,
            batch * prompt / pace.prompt_seconds,
            pace.decode_tokens / pace.decode_seconds,
            1e3 * pace.decode_seconds / steps,
        )


def _pace(backend: CudaBackend, batch: int, prompt: int, outputs: int) -> Pace:
    vocab = 200
    sequences = [Stream([(7 * i + 11 * row) % vocab for i in range(prompt)], outputs) for row in range(batch)]
    return generate(backend.forward, sequences, 16)
