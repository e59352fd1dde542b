"""Every kernel launch that a served model makes, gathered from the entry functions themselves without a device.

The entry functions run on torch's `meta` device while launches are recorded, so that what the compile check builds
is what a GPU would be asked to run: the same constants, the same tile sizes, the same argument types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvyard_kernels.triton import ops
from kvyard_kernels.triton.launch import Launch, recording
from kvyard_kernels.triton.worklists import DecodeSplits, QueryTiles, tile_span

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
DTYPES = (torch.bfloat16, torch.float32)
"""The two types that `kvyard serve --dtype` offers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how its kernels are compiled."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    head_norm: bool = False
    activation: str = "silu"
    window: int = 0
    block_size: int = 16
    dtypes: tuple[torch.dtype, ...] = DTYPES


MODELS = (
    ModelShape("smollm2-135m", 9, 3, 64, 576, 1536, 49152),
    ModelShape("smollm2-360m", 15, 5, 64, 960, 2560, 49152),
    ModelShape("smollm2-1.7b", 32, 32, 64, 2048, 8192, 49152),
    ModelShape("smollm3-3b", 16, 4, 128, 2048, 11008, 128256),
    ModelShape("llama-2-7b", 32, 32, 128, 4096, 11008, 32000),
    ModelShape("llama-3.2-1b", 32, 8, 64, 2048, 8192, 128256),
    ModelShape("llama-3.1-8b", 32, 8, 128, 4096, 14336, 128256),
    ModelShape("llama-3.1-70b", 64, 8, 128, 8192, 28672, 128256),
    ModelShape("mistral-7b", 32, 8, 128, 4096, 14336, 32768, window=4096),
    ModelShape("qwen2.5-0.5b", 14, 2, 64, 896, 4864, 151936),
    ModelShape("qwen2.5-7b", 28, 4, 128, 3584, 18944, 152064),
    ModelShape("qwen3-0.6b", 16, 8, 128, 1024, 3072, 151936, head_norm=True),
    ModelShape("qwen3-8b", 32, 8, 128, 4096, 12288, 151936, head_norm=True),
    ModelShape("gemma-3-1b", 4, 1, 256, 1152, 6912, 262144, head_norm=True, activation="gelu_tanh", window=512),
    ModelShape("gemma-3-4b", 8, 4, 256, 2560, 10240, 262208, head_norm=True, activation="gelu_tanh", window=1024),
    ModelShape("blocks of 32", 9, 3, 64, 576, 1536, 49152, block_size=32, dtypes=DTYPES[:1]),
    ModelShape("blocks of 544", 9, 3, 64, 576, 1536, 49152, block_size=544, dtypes=DTYPES[:1]),
)


@dataclass(frozen=True)
class Build:
    """One kernel with all that decides its binary, but for the target."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    """Arguments known to be multiples of 16."""
    options: dict[str, Any]
    users: list[str] = field(default_factory=list, compare=False)
    """Models and types that need it."""

    @property
    def key(self) -> str:
        """Equal for equal binaries."""
        parts = [self.module, self.kernel, self.signature, self.constants, self.aligned, self.options]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def builds(models: tuple[ModelShape, ...] = MODELS) -> list[Build]:
    """The distinct builds that serving these models needs, each with its users."""
    found: dict[str, Build] = {}
    for model in models:
        for dtype in model.dtypes:
            for launch in launches(model, dtype):
                build = _build(launch)
                found.setdefault(build.key, build).users.append(f"{model.name} {TYPE_NAMES[dtype]}")
    return list(found.values())


def launches(model: ModelShape, dtype: torch.dtype) -> list[Launch]:
    """All launches of a step of this model: decodes (one split, several), chunks, and the row-wise kernels."""
    with recording() as recorded:
        for call in (_attention, _rowwise, _sampling):
            call(model, dtype)
    return recorded


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(model: ModelShape, dtype: torch.dtype) -> None:
    tokens, blocks = 4, 1024
    product = _meta(tokens, (model.heads + 2 * model.kv_heads) * model.head_dim, dtype=dtype)
    q = product[:, : model.heads * model.head_dim].view(tokens, model.heads, model.head_dim)
    k = product[:, -model.kv_heads * model.head_dim :].view(tokens, model.kv_heads, model.head_dim)
    pool = _meta(2, blocks, model.block_size, model.kv_heads, model.head_dim, dtype=dtype)
    cos = _meta(32, model.head_dim // 2, dtype=torch.float32)
    integers = _meta(tokens, dtype=torch.int32)
    weight = _meta(model.head_dim, dtype=torch.float32) if model.head_norm else None
    slots = _meta(tokens, dtype=torch.int64)
    ops.rope_and_cache(q, k, k, pool[0], pool[1], integers, cos, cos, slots, q_weight=weight, k_weight=weight)
    tables = _meta(tokens, 128, dtype=torch.int32)
    common = {"scale": model.head_dim**-0.5, "window": model.window}
    firsts = _meta(tokens + 1, dtype=torch.int32)
    for several in (False, True):
        splits = DecodeSplits(integers, integers, firsts, model.window, several)
        ops.paged_decode(q, pool[0], pool[1], tables, integers, splits, **common)
    tiles = QueryTiles(integers, integers, tile_span(model.heads, pool[0]))
    starts = _meta(tokens + 1, dtype=torch.int32)
    ops.paged_mixed(q, pool[0], pool[1], tables, starts, integers, tiles, **common)


def _rowwise(model: ModelShape, dtype: torch.dtype) -> None:
    x = _meta(4, model.hidden, dtype=dtype)
    residual, weight = _meta(4, model.hidden, dtype=torch.float32), _meta(model.hidden, dtype=torch.float32)
    ops.rms_norm(residual, weight, 1e-5, out=x)
    ops.rms_norm(x, weight, 1e-5, residual=residual)
    fused = _meta(4, 2 * model.intermediate, dtype=dtype)
    gate, up = fused[:, : model.intermediate], fused[:, model.intermediate :]
    ops.gated(gate, up, activation_name=model.activation)


def _sampling(model: ModelShape, dtype: torch.dtype) -> None:
    ops.argmax(_meta(4, model.vocab, dtype=torch.float32))
    numbers = ops.uniforms(_meta(4, dtype=torch.int64), _meta(4, dtype=torch.int64))
    ops.draw(_meta(4, model.vocab, dtype=torch.float64), numbers)


def _build(launch: Launch) -> Build:
    """What Triton would specialise this launch on: types, constants, arguments equal to 1, multiples of 16."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    aligned = []
    plain = {parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize}
    for number, (name, value) in enumerate(_arguments(launch, names)):
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPE_NAMES[value.dtype]
            aligned.append(number)
        elif name in launch.constants or (value == 1 and isinstance(value, int) and name not in plain):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in plain:
                aligned.append(number)
    function = launch.kernel.fn
    return Build(function.__module__, function.__name__, signature, constants, tuple(aligned), dict(launch.options))


def _arguments(launch: Launch, names: list[str]) -> Iterator[tuple[str, Any]]:
    for number, name in enumerate(names):
        yield name, launch.args[number] if number < len(launch.args) else launch.constants[name]
