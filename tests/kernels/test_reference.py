"""The references against independent formulas in float64: everything else is compared with them."""

from __future__ import annotations

import math

import pytest
import torch
from kvyard_kernels import reference
from torch import Tensor


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = _random(7, 96), _random(96, seed=1)
    wide = x.double()
    expected = wide / torch.sqrt((wide**2).sum(-1, keepdim=True) / 96 + 1e-5) * weight.double()
    assert (reference.rms_norm(x, weight, 1e-5).double() - expected).abs().max() < 1e-5


def test_add_rms_norm_returns_the_norm_and_the_new_stream() -> None:
    x, residual, weight = _random(3, 64), _random(3, 64, seed=1), _random(64, seed=2)
    normed, stream = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(stream, x + residual)
    assert torch.equal(normed, reference.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_type_of_the_input(dtype: torch.dtype) -> None:
    x = _random(2, 32).to(dtype)
    assert reference.rms_norm(x, torch.ones(32), 1e-5).dtype == dtype
    assert reference.swiglu(x).dtype == dtype
    assert reference.geglu(x).dtype == dtype


def test_gates_against_float64() -> None:
    gate_up = _random(5, 40) * 4
    gate, up = gate_up.double().chunk(2, -1)
    silu = gate / (1 + torch.exp(-gate)) * up
    tanh = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    assert (reference.swiglu(gate_up).double() - silu).abs().max() < 1e-5
    assert (reference.geglu(gate_up).double() - tanh).abs().max() < 1e-5


def test_rope_turns_pairs_as_complex_numbers() -> None:
    x = _random(9, 2, 32)
    positions = torch.tensor([0, 1, 2, 7, 100, 255, 257, 4095, 8191])
    cos, sin = reference.rope_tables(positions, reference.inverse_frequencies(32, 10_000.0))
    turned = reference.rope(x, cos, sin).double()
    for t, position in enumerate(positions.tolist()):
        for i in range(16):
            angle = position * 10_000.0 ** (-2 * i / 32)
            pair = torch.complex(x[t, :, i].double(), x[t, :, i + 16].double()) * complex(
                math.cos(angle), math.sin(angle)
            )
            assert (turned[t, :, i] - pair.real).abs().max() < 2e-6
            assert (turned[t, :, i + 16] - pair.imag).abs().max() < 2e-6


def test_partial_rope_leaves_the_rest_alone() -> None:
    x = _random(4, 1, 32)
    cos, sin = reference.rope_tables(torch.arange(4), reference.inverse_frequencies(16, 10_000.0))
    turned = reference.rope(x, cos, sin)
    assert torch.equal(turned[..., 16:], x[..., 16:])
    assert not torch.equal(turned[1:, :, :16], x[1:, :, :16])


def test_rope_keeps_products_that_depend_on_the_distance_alone() -> None:
    q, k = _random(1, 1, 64), _random(1, 1, 64, seed=1)
    frequencies = reference.inverse_frequencies(64, 100_000.0)

    def product(query_at: int, key_at: int) -> float:
        turned = [
            reference.rope(x, *reference.rope_tables(torch.tensor([at]), frequencies))
            for x, at in ((q, query_at), (k, key_at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(17, 5) == pytest.approx(product(812, 800), abs=1e-4)
    assert product(17, 5) != pytest.approx(product(17, 6), abs=1e-3)


@pytest.mark.parametrize("position", [0, 255, 257, 4095, 8191])
def test_model_09_angles_do_not_drift_with_the_position(position: int) -> None:
    """MODEL-09: cosine and sine stay within 1e-5 of float64 up to the last position."""
    cos, sin = reference.rope_tables(torch.tensor([position]), reference.inverse_frequencies(64, 100_000.0))
    angles = [position * 100_000.0 ** (-2 * i / 64) for i in range(32)]
    assert (cos[0].double() - torch.tensor([math.cos(a) for a in angles], dtype=torch.float64)).abs().max() < 1e-5
    assert (sin[0].double() - torch.tensor([math.sin(a) for a in angles], dtype=torch.float64)).abs().max() < 1e-5


def test_factors_divide_the_frequencies() -> None:
    plain = reference.inverse_frequencies(8, 10_000.0)
    assert torch.equal(reference.inverse_frequencies(8, 10_000.0, (1, 2, 4, 8)), plain / torch.tensor([1.0, 2, 4, 8]))


def test_attention_is_softmax_over_the_keys_up_to_the_query() -> None:
    q, keys, values = _random(6, 4, 16), _random(20, 4, 16, seed=1), _random(20, 4, 16, seed=2)
    found = reference.attention(q, keys, values, torch.arange(14, 20), 0.25)
    mask = torch.arange(20)[None, :] <= torch.arange(14, 20)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, scale=0.25
    ).transpose(0, 1)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (8, 2), (9, 3), (28, 4), (32, 8), (8, 1)])
def test_model_06_query_heads_read_the_key_value_head_of_their_group(heads: int, kv_heads: int) -> None:
    """MODEL-06: head i reads i // group; with values that name their head the answer is that name."""
    keys = _random(5, kv_heads, 8)
    values = torch.arange(kv_heads, dtype=torch.float32)[None, :, None].expand(5, kv_heads, 8)
    out = reference.attention(_random(1, heads, 8, seed=1), keys, values, torch.tensor([4]), 1.0)
    assert torch.allclose(out[0, :, 0], torch.arange(heads) // (heads // kv_heads) * 1.0)


def test_model_07_a_window_counts_the_query_itself() -> None:
    """MODEL-07: window 8 at position 19 sees the keys 12..19, each with its own one-hot value."""
    values = torch.eye(20)[:, None, :]
    out = reference.attention(
        torch.zeros(1, 1, 20), torch.zeros(20, 1, 20), values, torch.tensor([19]), 1.0, window=8
    )
    assert torch.nonzero(out[0, 0]).squeeze(1).tolist() == list(range(12, 20))
    assert torch.allclose(out[0, 0, 12:], torch.full((8,), 1 / 8))


def test_paged_attention_reads_each_sequence_through_its_table() -> None:
    key_cache, value_cache = torch.full((12, 4, 2, 8), torch.nan), torch.full((12, 4, 2, 8), torch.nan)
    tables = torch.tensor([[7, 2, 99], [3, 11, 5]], dtype=torch.int32)
    lengths, starts = torch.tensor([6, 11], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    contexts = [(_random(n, 2, 8, seed=n), _random(n, 2, 8, seed=n + 1)) for n in lengths.tolist()]
    for i, (keys, values) in enumerate(contexts):
        at = torch.arange(len(keys))
        reference.write_cache(keys, values, key_cache, value_cache, tables[i].long()[at // 4] * 4 + at % 4)
    q = _random(4, 4, 8)
    out = reference.paged_attention(q, key_cache, value_cache, tables, starts, lengths, 0.5)
    assert torch.equal(out[:1], reference.attention(q[:1], *contexts[0], torch.tensor([5]), 0.5))
    assert torch.equal(out[1:], reference.attention(q[1:], *contexts[1], torch.arange(8, 11), 0.5))
