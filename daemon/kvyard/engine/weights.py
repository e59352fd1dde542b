"""Weights by canonical names, joined for speed, checked for completeness; readers only supply the parts.

Canonical names: `embed`, `head`, `norm`, and per layer i `layers.i.` + `q k v o gate up down input_norm
post_norm` (+ `.bias`, `q_norm`, `k_norm`, `attn_out_norm`, `mlp_out_norm` where the family has them). What
the decoder gets has q, k, v joined to `qkv` and gate, up to `gate_up`: fewer, larger products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvyard.engine.model_config import ModelConfig, ModelError

Progress = Callable[[str, float], None]
"""Called with what is done and the fraction of it."""


class TensorSource(Protocol):
    """A checkpoint whose tensors are known by canonical names, in the row order that the decoder uses."""

    def has(self, name: str) -> bool:
        """Is it there?"""
        ...

    def original(self, name: str) -> str:
        """The name in the file, for messages."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor in any floating type."""
        ...

    def groups(self, name: str) -> Groups | None:
        """The matrix in its quantised form, where it has one of those that `Groups` can hold."""
        ...


Form = Literal["dense", "quantised", "both"]
"""Which form of a matrix is kept where the checkpoint has it quantised; others are dense always."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix quantised in groups of 32 inputs, as in the file: a weight is `scale * code + offset`.

    `scales` float16 `[outputs, groups]`. With `offsets` of that shape the codes have 4 bits: uint8 `[outputs,
    groups, 16]`, the low halves being the inputs 0 to 15 of the group. Without, int8 `[outputs, groups, 32]`.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    def dense(self) -> Tensor:
        """float32 `[outputs, inputs]`."""
        if self.offsets is None:
            values = self.codes.float().mul_(self.scales.float()[..., None])
        else:
            codes = torch.cat([self.codes & 15, self.codes >> 4], dim=-1)
            values = codes.float().mul_(self.scales.float()[..., None]).add_(self.offsets.float()[..., None])
        return values.flatten(1)


@dataclass(slots=True)
class Weights:
    """A model as the decoder takes it: matrices in the model's type, norms in float32.

    A quantised matrix `x` stands as `x.codes` and `x.scales`, in the layout of `kvyard_kernels.cpu.Quantised`.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    eos_ids: tuple[int, ...]

    def matrix(self, name: str) -> Tensor:
        """A dense matrix; `head` is the embedding where the two are tied."""
        return self.tensors["embed" if name == "head" and self.config.tied_head else name]

    def has_matrix(self, name: str) -> bool:
        """Is it there in dense form?"""
        return name in self.tensors or (name == "head" and self.config.tied_head)

    def bias(self, name: str) -> Tensor | None:
        """float32 `[out]`."""
        return self.tensors.get(f"{name}.bias")

    def quantised(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Codes and scales, where the matrix is kept so."""
        codes = self.tensors.get(f"{name}.codes")
        return None if codes is None else (codes, self.tensors[f"{name}.scales"])


@dataclass(frozen=True, slots=True)
class _Joined:
    """A tensor of the decoder: the parts that are stacked to make it, and the shape they must give."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    wide: bool
    """Kept in float32 (norms and biases are small, and their rounding would be felt in every step)."""

    @property
    def is_product(self) -> bool:
        return len(self.shape) == 2 and self.name != "embed"


def assemble(
    source: TensorSource, config: ModelConfig, dtype: torch.dtype, progress: Progress, form: Form = "dense"
) -> dict[str, Tensor]:
    """Read, convert and join everything. Raises ModelError naming what is missing or misshapen."""
    wanted = list(_wanted(config))
    missing = [source.original(part) for item in wanted for part in item.parts if not source.has(part)]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ModelError(f"the model lacks {len(missing)} tensors: {shown}", "fetch the model again")
    tensors: dict[str, Tensor] = {}
    for done, item in enumerate(wanted):
        quantised = _quantised(source, item) if form != "dense" and item.is_product else {}
        if not quantised or form == "both":
            tensors[item.name] = _join(source, item, torch.float32 if item.wide else dtype)
        tensors |= quantised
        progress("converting weights", (done + 1) / len(wanted))
    if config.tied_head and form != "dense":
        tensors |= _quantised(source, _Joined("head", ("embed",), (config.vocab_size, config.hidden), False))
    return tensors


def _quantised(source: TensorSource, item: _Joined) -> dict[str, Tensor]:
    """Codes and scales of a matrix whose parts are all quantised in one way; else nothing."""
    parts = [groups for groups in map(source.groups, item.parts) if groups is not None]
    if len(parts) < len(item.parts) or len({part.offsets is None for part in parts}) > 1:
        return {}
    from kvyard_kernels.cpu import pack_quantised  # brings numba, which a dense model need not wait for

    offsets = [part.offsets for part in parts if part.offsets is not None]
    packed = pack_quantised(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )
    return {f"{item.name}.codes": packed.codes, f"{item.name}.scales": packed.scales}


def _join(source: TensorSource, item: _Joined, dtype: torch.dtype) -> Tensor:
    parts = [source.read(part).to(dtype) for part in item.parts]
    joined = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
    if tuple(joined.shape) != item.shape:
        names = ", ".join(source.original(part) for part in item.parts)
        raise ModelError(
            f"{names}: shape {tuple(joined.shape)}, expected {item.shape} from the model's metadata",
            "the file is damaged or its metadata belongs to another model",
        )
    return joined


def _wanted(config: ModelConfig) -> Iterator[_Joined]:
    """Every tensor of the decoder, in the order of use."""
    yield _Joined("embed", ("embed",), (config.vocab_size, config.hidden), False)
    for i in range(config.layers):
        yield from _layer(config, f"layers.{i}.")
    yield _Joined("norm", ("norm",), (config.hidden,), True)
    if not config.tied_head:
        yield _Joined("head", ("head",), (config.vocab_size, config.hidden), False)


def _layer(config: ModelConfig, prefix: str) -> Iterator[_Joined]:
    c = config

    def item(name: str, shape: tuple[int, ...], parts: Sequence[str] = (), wide: bool = False) -> _Joined:
        return _Joined(prefix + name, tuple(prefix + part for part in parts or (name,)), shape, wide)

    yield item("input_norm", (c.hidden,), wide=True)
    yield item("qkv", (c.qkv_rows, c.hidden), ("q", "k", "v"))
    if c.qkv_bias:
        yield item("qkv.bias", (c.qkv_rows,), ("q.bias", "k.bias", "v.bias"), wide=True)
    if c.qk_norm:
        yield item("q_norm", (c.head_dim,), wide=True)
        yield item("k_norm", (c.head_dim,), wide=True)
    yield item("o", (c.hidden, c.heads * c.head_dim))
    if c.output_bias:
        yield item("o.bias", (c.hidden,), wide=True)
    if c.sandwich_norms:
        yield item("attn_out_norm", (c.hidden,), wide=True)
        yield item("mlp_out_norm", (c.hidden,), wide=True)
    yield item("post_norm", (c.hidden,), wide=True)
    yield item("gate_up", (2 * c.intermediate, c.hidden), ("gate", "up"))
    yield item("down", (c.hidden, c.intermediate))
