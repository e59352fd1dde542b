"""Model configurations: derived values, scaling factors, and the way through the cache."""

from __future__ import annotations

import math

import pytest
from kvyard.engine.model_config import (
    ModelConfig,
    ModelError,
    Rope,
    every_nth_global,
    linear_factors,
    llama3_factors,
    unique_ids,
)


def _config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "family": "llama", "vocab_size": 100, "hidden": 32, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "intermediate": 64, "max_context": 128, "norm_eps": 1e-5, "rope": Rope(10_000.0, 8),
    }  # fmt: skip
    return ModelConfig(**values | changes)  # type: ignore[arg-type] # names and types match


def test_scale_is_the_root_of_the_head_width_unless_given() -> None:
    assert _config().scale == pytest.approx(8**-0.5)
    assert _config(attention_scale=0.25).scale == 0.25


def test_rows_of_the_joined_projection() -> None:
    assert _config().qkv_rows == 4 * 8 + 2 * 2 * 8


def test_windows_and_their_ropes() -> None:
    local = Rope(1_000.0, 8)
    config = _config(window=16, windowed=every_nth_global(6, 3), local_rope=local)
    assert [config.layer_window(i) for i in range(6)] == [16, 16, 0, 16, 16, 0]
    assert [config.layer_rope(i) is local for i in range(6)] == [True, True, False, True, True, False]
    assert [_config(window=4).layer_window(i) for i in range(3)] == [4, 4, 4]
    assert _config(window=4).layer_rope(0) == Rope(10_000.0, 8)


@pytest.mark.parametrize(
    "config",
    [
        _config(),
        _config(rope=Rope(5e5, 8, (1.0, 2.0, 4.0, 8.0)), tied_head=False, qk_norm=True),
        _config(
            window=8, windowed=(True, False) * 3, local_rope=Rope(1e3, 8), activation="gelu", attention_scale=0.1
        ),
    ],
)
def test_json_and_back(config: ModelConfig) -> None:
    assert ModelConfig.from_json(config.to_json()) == config


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ModelError, match="4 query heads cannot share 3"):
        _config(kv_heads=3)


def test_linear_factors() -> None:
    assert linear_factors(4, 8) == (4.0,) * 4


def test_llama_3_factors_keep_short_waves_and_stretch_long_ones() -> None:
    """MODEL: against the published formula in wavelengths."""
    factors = llama3_factors(500_000.0, 128, 8.0, 1.0, 4.0, 8192)
    assert len(factors) == 64
    for i, factor in enumerate(factors):
        wavelength = 2 * math.pi * 500_000.0 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            assert factor == 1.0
        elif wavelength > 8192:
            assert factor == 8.0
        else:
            smooth = (8192 / wavelength - 1) / 3
            assert 1 / factor == pytest.approx((1 - smooth) / 8 + smooth)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert list(factors) == sorted(factors)


def test_ids_once_in_order() -> None:
    assert unique_ids([2, None, 5, 2]) == (2, 5)
