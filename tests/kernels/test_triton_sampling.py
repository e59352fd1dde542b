"""Greedy choice and drawing from weights against plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kvyard.engine.choice import draw
from kvyard.engine.random import uniform
from kvyard.link.messages import Sampling
from kvyard_kernels.triton import config, ops, sampler

SIZES = [1, 7, 4096, 4097, 49152]


def logits(device: torch.device, rows: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((rows, size), generator=torch.Generator().manual_seed(size)).to(dtype).to(device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax(device: torch.device, size: int, dtype: torch.dtype) -> None:
    x = logits(device, 3, size, dtype)
    # The lowest of equal ids: torch promises no order among ties, so it is looked up.
    expected = [int((row == row.max()).nonzero()[0]) for row in x.float()]
    assert ops.argmax(x).tolist() == expected


@pytest.mark.parametrize("ids", [(0, 1), (5, 4095), (4095, 4096), (17, 9000), (4096, 8192, 12287)])
def test_ties_take_the_lowest_id(device: torch.device, ids: tuple[int, ...]) -> None:
    x = torch.zeros(2, 12288, device=device)
    x[:, list(ids)] = 3.0
    assert ops.argmax(x).tolist() == [ids[0], ids[0]]


def test_nan_is_never_chosen(device: torch.device) -> None:
    x = torch.full((3, 5000), -math.inf, device=device)
    x[0, 4999], x[0, 3] = -5.0, math.nan
    x[1, :] = math.nan
    assert ops.argmax(x).tolist() == [4999, 0, 0]


def test_more_chunks_than_one_tile_of_winners(device: torch.device) -> None:
    size = config.VOCAB_CHUNK * 3 + 1
    x = torch.zeros(1, size, device=device)
    x[0, -1] = 1.0
    assert ops.argmax(x).tolist() == [size - 1]


def test_rows_of_a_padded_matrix(device: torch.device) -> None:
    """A head padded to a multiple of 64 columns: what lies behind the vocabulary is not looked at."""
    wide = logits(device, 4, 1024)
    wide[:, 1000:] = 1e9
    expected = wide[:, :1000].argmax(1)
    assert torch.equal(ops.argmax(wide[:, :1000]), expected)


def inverse(weights: torch.Tensor, u: float) -> int:
    """The draw in float64."""
    reached = weights.double().cumsum(0)
    return int((reached > u * reached[-1]).nonzero()[0])


@pytest.mark.parametrize("size", SIZES)
def test_draw_is_the_inverse_distribution(device: torch.device, size: int) -> None:
    u = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.999])
    weights = logits(device, len(u), size).softmax(-1)
    got = ops.draw(weights, u.to(device)).tolist()
    for row, choice in enumerate(got):
        reached = weights[row].double().cpu().cumsum(0)
        share = reached[choice] / reached[-1]
        before = share - weights[row, choice].double().cpu() / reached[-1]
        # Within the rounding of a float32 sum, u falls into the chosen id's interval.
        assert before - 1e-5 <= float(u[row]) <= share + 1e-5


def test_draw_of_exact_weights(device: torch.device) -> None:
    """Small whole numbers add without rounding, so that the choice is exact at the edges too."""
    weights = torch.zeros(6, 9000, device=device)
    weights[:, 3], weights[:, 4100], weights[:, 8999] = 1.0, 2.0, 1.0
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999], device=device)
    assert ops.draw(weights, u).tolist() == [3, 3, 4100, 4100, 8999, 8999]
    assert [inverse(weights[i].cpu(), float(u[i])) for i in range(6)] == [3, 3, 4100, 4100, 8999, 8999]


def test_weight_zero_is_never_drawn(device: torch.device) -> None:
    weights = torch.zeros(64, 5000, device=device)
    weights[:, [7, 4999]] = 1e-30
    u = torch.linspace(0, 1 - 2**-24, 64).to(device)
    assert set(ops.draw(weights, u).tolist()) == {7, 4999}


def test_a_draw_at_the_upper_edge_stays_inside(device: torch.device) -> None:
    """u just below 1 times a total that rounding lifted above every partial sum."""
    weights = torch.full((4, 4097), 0.1, device=device)
    u = torch.full((4,), 1 - 2**-24, device=device)
    assert all(4000 < choice < 4097 for choice in ops.draw(weights, u).tolist())


def test_draws_follow_the_weights(device: torch.device) -> None:
    weights = torch.tensor([0.5, 0.0, 0.125, 0.375]).expand(200, -1).contiguous().to(device)
    u = ((torch.arange(200) + 0.5) / 200).to(device)
    counts = torch.bincount(ops.draw(weights, u).cpu(), minlength=4).tolist()
    assert counts == [100, 0, 25, 75]


def test_no_rows_and_wrong_shapes(device: torch.device) -> None:
    assert ops.argmax(torch.zeros(0, 9, device=device)).tolist() == []
    assert ops.draw(torch.zeros(0, 9, device=device), torch.zeros(0, device=device)).tolist() == []
    with pytest.raises(ValueError, match=r"logits must be \[rows, vocab\]"):
        ops.argmax(torch.zeros(9))
    with pytest.raises(ValueError, match="both must be float32 or float64"):
        ops.draw(torch.zeros(1, 9, dtype=torch.float16), torch.zeros(1))
    with pytest.raises(ValueError, match=r"numbers must be \[1\]"):
        ops.draw(torch.zeros(1, 9), torch.zeros(2))


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_uniforms_are_the_engines_numbers(device: torch.device, seed: int) -> None:
    """Bit for bit: a token may be drawn on either side."""
    outputs = np.array([0, 1, 2, 40, 4095, 2**31], dtype=np.int64)
    seeds = np.full(len(outputs), seed, dtype=np.uint64)
    expected = uniform(seeds, outputs)
    found = ops.uniforms(torch.from_numpy(seeds.view(np.int64)).to(device), torch.from_numpy(outputs).to(device))
    assert found.tolist() == expected.tolist()


def test_uniforms_of_many_rows_are_spread_and_differ(device: torch.device) -> None:
    seeds = torch.arange(100, device=device)
    found = ops.uniforms(seeds, torch.zeros_like(seeds)).cpu()
    assert len(set(found.tolist())) == 100
    assert 0 < float(found.min()) < 0.1
    assert 0.9 < float(found.max()) < 1
    assert 0.4 < float(found.mean()) < 0.6
    assert ops.uniforms(seeds[:0], seeds[:0]).shape == (0,)


CUTS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10**9},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_sampled_tokens_are_the_engines(device: torch.device, temperature: float) -> None:
    """Rows of every kind in one call, greedy ones between; each as the engine's sampler draws it alone."""
    rows = 4 * len(CUTS)
    x = logits(device, rows, 600)
    x[:, 100:110] = x[:, 90:91]  # equals
    heat = torch.tensor([temperature, temperature, temperature, 0.0], dtype=torch.float64).repeat(len(CUTS))
    wanted = [CUTS[row // 4] for row in range(rows)]
    seeds = torch.arange(rows) * 977
    outputs = torch.arange(rows) % 7
    parameters = sampler.Parameters(
        heat,
        seeds,
        outputs,
        torch.tensor([int(cut.get("top_k", 0)) for cut in wanted]),
        torch.tensor([float(cut.get("top_p", 1.0)) for cut in wanted], dtype=torch.float64),
        torch.tensor([float(cut.get("min_p", 0.0)) for cut in wanted], dtype=torch.float64),
    )
    found = sampler.sample(x, parameters).tolist()
    numbers = uniform(seeds.numpy().view(np.uint64), outputs.numpy())
    for row in range(rows):
        line = x[row].cpu().numpy()
        if heat[row] == 0:
            assert found[row] == int(line.argmax())
            continue
        wish = Sampling(0, temperature, **wanted[row])  # type: ignore[arg-type] # by name
        cuts = 0 < wish.top_k < 600 or wish.top_p < 1 or wish.min_p > 0
        assert found[row] == draw(line, temperature, float(numbers[row]), wish if cuts else None), wish


def test_a_row_is_drawn_alike_in_any_company(device: torch.device) -> None:
    x = logits(device, 5, 5000)
    plain = torch.ones(5, dtype=torch.float64)

    def parameters(rows: slice) -> sampler.Parameters:
        zeros = torch.zeros(5, dtype=torch.int64)[rows]
        return sampler.Parameters(
            plain[rows], torch.arange(5)[rows], zeros, zeros, plain[rows], torch.zeros(5, dtype=torch.float64)[rows]
        )

    together = sampler.sample(x, parameters(slice(None))).tolist()
    alone = [sampler.sample(x[i : i + 1], parameters(slice(i, i + 1))).item() for i in range(5)]
    assert alone == together
    assert len(set(together)) > 1
