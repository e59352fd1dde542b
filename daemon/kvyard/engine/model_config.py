"""What distinguishes one model from another, as plain values: families differ here and nowhere else.

The two readers (`weights_gguf`, `weights_hf`) translate their own metadata into a `ModelConfig`; decoder and
backends read nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


class ModelError(Exception):
    """The model's files cannot be served; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one kind of layer."""

    theta: float
    dim: int
    """Rotated elements of each head, from the first on; the rest pass through."""
    factors: tuple[float, ...] | None = None
    """`[dim / 2]`: the frequency of pair i is divided by factor i (linear and Llama 3 scaling)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a decoder-only transformer."""

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_context: int
    norm_eps: float
    rope: Rope
    tied_head: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    qk_norm: bool = False
    """Each head of q and k is normalised before it is turned (Qwen 3, Gemma 3)."""
    sandwich_norms: bool = False
    """Norms also behind attention and feed-forward, before the residual is added (Gemma 3)."""
    activation: Literal["silu", "gelu"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """None is `head_dim ** -0.5`."""
    window: int = 0
    """Keys that a query of a windowed layer sees, its own included; 0 is all."""
    windowed: tuple[bool, ...] = ()
    """Which layers are windowed; empty with `window` > 0 means all."""
    local_rope: Rope | None = None
    """Of the windowed layers, where it differs (Gemma 3)."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly",
                "the model's metadata is damaged; fetch the model again",
            )

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def qkv_rows(self) -> int:
        """Outputs of the joined query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def outputs(self, part: str) -> int:
        """Rows of a layer's matrix: `qkv`, `o`, `gate_up` or `down`."""
        return {"qkv": self.qkv_rows, "gate_up": 2 * self.intermediate}.get(part, self.hidden)

    def layer_window(self, layer: int) -> int:
        """Window of a layer, 0 for none."""
        return self.window if not self.windowed or self.windowed[layer] else 0

    def layer_rope(self, layer: int) -> Rope:
        """Rope of a layer."""
        local = self.local_rope is not None and self.layer_window(layer) > 0
        return self.local_rope if local and self.local_rope is not None else self.rope

    def to_json(self) -> str:
        """For the cache of converted weights."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        values["windowed"] = tuple(values["windowed"])
        for name in ("rope", "local_rope"):
            if values[name] is not None:
                factors = values[name]["factors"]
                values[name] = Rope(**values[name] | {"factors": None if factors is None else tuple(factors)})
        return cls(**values)


def linear_factors(factor: float, dim: int) -> tuple[float, ...]:
    """Position interpolation: all frequencies divided by one factor."""
    return (float(factor),) * (dim // 2)


def llama3_factors(
    theta: float, dim: int, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Llama 3.1's scaling: short waves stay, long ones are divided by `factor`, a ramp lies between.

    A wave is short under `original_context / high` positions and long over `original_context / low`.
    Source: the `rope_type: llama3` entry of the model's config.json and its published formula.
    """
    return tuple(
        _llama3_factor(theta ** (-2 * i / dim), factor, low, high, original_context) for i in range(dim // 2)
    )


def _llama3_factor(frequency: float, factor: float, low: float, high: float, original_context: int) -> float:
    turns = original_context * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def every_nth_global(layers: int, period: int) -> tuple[bool, ...]:
    """Windowed layers where each `period`-th is global, as in Gemma 3: `period - 1` windowed, one not."""
    return tuple((i + 1) % period != 0 for i in range(layers))


def unique_ids(ids: Sequence[int | None]) -> tuple[int, ...]:
    """The ids that are there, each once, in order."""
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
