"""The default model against the stored references: tokens and first log-probabilities, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvyard.engine.backends.base import Backend, Batch
from kvyard.engine.loading import load

from tests.engine.running import Job, run

_ITEMS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "greedy" / "greedy_smollm2.json").read_text(encoding="utf-8")
)["items"]
_CLOSE = 1e-3
"""Top-2 gap under which two correct float32 computations may choose differently."""


@pytest.fixture(scope="module")
def backend(default_model: Path) -> Backend:
    """The default model in float32."""
    loaded = load(
        str(default_model),
        device="cpu",
        dtype="float32",
        deterministic=False,
        block_size=16,
        progress=lambda what, fraction: None,
    )
    loaded.backend.allocate(512, 0)
    assert loaded.eos_ids == (2,)
    return loaded.backend


@pytest.fixture(scope="module")
def jobs(backend: Backend) -> list[Job]:
    """All items at once, in chunks of different sizes: batches and chunks are part of what is proven."""
    jobs = [Job(item["ids"], len(item["greedy"]), chunk=(64, 17, 256)[i % 3]) for i, item in enumerate(_ITEMS)]
    run(backend, jobs, blocks=512)
    return jobs


@pytest.mark.parametrize("index", range(len(_ITEMS)))
def test_tokens_are_the_references(index: int, jobs: list[Job]) -> None:
    expected: list[int] = _ITEMS[index]["greedy"]
    for step, (found, wanted) in enumerate(zip(jobs[index].tokens, expected, strict=True)):
        if found == wanted:
            continue
        best = torch.topk(jobs[index].logits[step], 2).values
        gap = float(best[0] - best[1])
        assert gap < _CLOSE, f"item {index}, step {step}: {found} for {wanted} with a gap of {gap:.5f}"
        print(f"item {index} leaves the reference at step {step}: the two best logits lie {gap:.1e} apart")
        return  # from here on the two continue different texts


@pytest.mark.parametrize("index", range(len(_ITEMS)))
def test_first_log_probabilities_are_the_references(index: int, jobs: list[Job]) -> None:
    logprobs = torch.log_softmax(jobs[index].logits[0].double(), dim=-1)
    for token, expected in _ITEMS[index]["first_top5"]:
        assert abs(float(logprobs[token]) - expected) < 1e-3


def test_all_items_are_there() -> None:
    assert len(_ITEMS) == 31
    assert sum(len(item["greedy"]) for item in _ITEMS) == 31 * 48


def test_bfloat16_agrees_with_the_references(default_model: Path) -> None:
    """A reference text in one step, every position's best token; few rows (quantised) and many (dense) alike."""
    loaded = load(
        str(default_model),
        device="cpu",
        dtype="bfloat16",
        deterministic=False,
        block_size=16,
        progress=lambda what, fraction: None,
    )
    loaded.backend.allocate(64, 0)
    agreed = total = 0
    for item in (*_ITEMS[:-4:2], _ITEMS[-4]):
        tokens = item["ids"] + item["greedy"]
        logits = _all_logits(loaded.backend, tokens)
        found = logits.argmax(dim=-1)[len(item["ids"]) - 1 : -1].tolist()
        agreed += sum(a == b for a, b in zip(found, item["greedy"], strict=True))
        total += len(found)
    print(f"bfloat16 agrees with float32 on the best token at {agreed / total:.2%} of {total} positions")
    assert agreed / total > 0.95


def _all_logits(backend: Backend, tokens: list[int]) -> torch.Tensor:
    count = len(tokens)
    positions = torch.arange(count, dtype=torch.int32)
    return backend.forward(
        Batch(
            tokens=torch.tensor(tokens, dtype=torch.int32),
            positions=positions,
            starts=torch.tensor([0, count], dtype=torch.int32),
            lengths=torch.tensor([count], dtype=torch.int32),
            tables=torch.arange(64, dtype=torch.int32)[None],
            cache_slots=positions.long(),
            logit_rows=torch.arange(count),
            decodes=0,
        )
    )
