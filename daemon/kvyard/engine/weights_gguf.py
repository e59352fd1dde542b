"""GGUF files: metadata to `ModelConfig`, tensors by canonical names, in the decoder's row order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kvyard.engine.gguf_file import GgufFile
from kvyard.engine.model_config import (
    ModelConfig,
    ModelError,
    Rope,
    every_nth_global,
    linear_factors,
    unique_ids,
)
from kvyard.engine.weights import Form, Groups, Progress, Weights, assemble

_GLOBAL = {"embed": "token_embd", "head": "output", "norm": "output_norm"}
_LAYER = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_out_norm": "post_attention_norm",
    "mlp_out_norm": "post_ffw_norm",
}
_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_BLOCK_BYTES = {
    gguf.GGMLQuantizationType.Q4_0: 18,
    gguf.GGMLQuantizationType.Q4_1: 20,
    gguf.GGMLQuantizationType.Q8_0: 34,
}
_REQUIRED = object()
_HINT = "take a GGUF of the Llama, Qwen 2, Qwen 3 or Gemma 3 family, or a Hugging Face folder"


def load_gguf(path: Path, dtype: torch.dtype, progress: Progress, form: Form = "dense") -> Weights:
    """Read a whole GGUF file. Raises ModelError for anything that cannot be served."""
    try:
        source = _GgufSource(GgufFile(path))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is no readable GGUF file: {error}", "fetch the model again") from error
    config = read_config(source)
    return Weights(config, assemble(source, config, dtype, progress, form), _end_ids(source))


def read_config(source: _GgufSource) -> ModelConfig:
    """`ModelConfig` from the file's metadata and the presence of tensors."""
    arch = str(source.meta("general.architecture"))
    if arch not in _FAMILIES:
        raise ModelError(f"models of the family '{arch}' are not supported", _HINT)

    def value(key: str, default: Any = _REQUIRED) -> Any:  # noqa: ANN401 # metadata: numbers, texts, lists
        return source.meta(f"{arch}.{key}", default)

    heads, hidden = int(value("attention.head_count")), int(value("embedding_length"))
    head_dim = int(value("attention.key_length", hidden // heads))
    layers = int(value("block_count"))
    rotary = int(value("rope.dimension_count", head_dim))
    gemma = arch == "gemma3"
    return ModelConfig(
        family=arch,
        vocab_size=source.shape("embed")[0],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(value("feed_forward_length")),
        max_context=int(value("context_length")),
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope=Rope(float(value("rope.freq_base", 10_000.0)), rotary, _rope_factors(source, value, rotary)),
        tied_head=not source.has("head"),
        qkv_bias=source.has("layers.0.q.bias"),
        output_bias=source.has("layers.0.o.bias"),
        qk_norm=source.has("layers.0.q_norm"),
        sandwich_norms=source.has("layers.0.attn_out_norm"),
        activation="gelu" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        window=int(value("attention.sliding_window", 0)),
        windowed=every_nth_global(layers, 6) if gemma else (),
        local_rope=Rope(10_000.0, rotary) if gemma else None,
    )


def _rope_factors(source: _GgufSource, value: Callable[..., Any], rotary: int) -> tuple[float, ...] | None:
    """Scaling is either given per pair (a tensor, Llama 3) or by name."""
    if source.has("rope_freqs"):
        return tuple(float(x) for x in source.read("rope_freqs"))
    kind = value("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return linear_factors(float(value("rope.scaling.factor")), rotary)
    raise ModelError(
        f"rope scaling '{kind}' is not supported", "take a model without it, or with linear or Llama 3's"
    )


def _end_ids(source: _GgufSource) -> tuple[int, ...]:
    """End of text and end of turn; every one of them ends a sequence."""
    return unique_ids([source.meta(key, None) for key in _END_KEYS])


class _GgufSource:
    """Tensors of one file under canonical names."""

    def __init__(self, file: GgufFile) -> None:
        self._metadata, self._tensors = file.metadata, file.tensors

    def meta(self, key: str, default: Any = _REQUIRED) -> Any:  # noqa: ANN401 # metadata: numbers, texts, lists
        """A metadata value; without a default its absence is an error."""
        value = self._metadata.get(key, default)
        if value is _REQUIRED:
            raise ModelError(f"the GGUF file has no '{key}'", "fetch the model again")
        return value

    def original(self, name: str) -> str:
        """`layers.3.q.bias` -> `blk.3.attn_q.bias`."""
        stem, kind = (name[: -len(".bias")], "bias") if name.endswith(".bias") else (name, "weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".")
            return f"blk.{layer}.{_LAYER[part]}.{kind}"
        return f"{_GLOBAL.get(stem, stem)}.{kind}"

    def has(self, name: str) -> bool:
        return self.original(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape."""
        if not self.has(name):
            raise ModelError(f"the model lacks 1 tensors: {self.original(name)}", "fetch the model again")
        return self._tensors[self.original(name)].shape

    def read(self, name: str) -> Tensor:
        """Dequantised float32, rows of q and k put back into the order of halves."""
        if (groups := self.groups(name)) is not None:
            return groups.dense()
        tensor = self._tensors[self.original(name)]
        try:
            values = gguf.dequantize(tensor.data, tensor.type)
        except NotImplementedError as error:
            raise ModelError(
                f"tensors of the type {tensor.type.name} are not supported ({tensor.name})", _HINT
            ) from error
        array = np.array(values, dtype=np.float32)  # a copy: the file is mapped read-only
        return self._in_halves(name, torch.from_numpy(array).reshape(self.shape(name)))

    def groups(self, name: str) -> Groups | None:
        """Q4_0, Q4_1 and Q8_0 as they are: blocks of a float16 scale, an offset (Q4_1) and the codes."""
        tensor = self._tensors[self.original(name)]
        if tensor.type not in _BLOCK_BYTES or len(tensor.shape) != 2:
            return None
        outputs, inputs = self.shape(name)
        raw = np.array(tensor.data).reshape(outputs, inputs // 32, _BLOCK_BYTES[tensor.type])
        blocks = self._in_halves(name, torch.from_numpy(raw))
        scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        if tensor.type == gguf.GGMLQuantizationType.Q8_0:
            return Groups(blocks[..., 2:].contiguous().view(torch.int8), scales, None)
        if tensor.type == gguf.GGMLQuantizationType.Q4_0:  # codes count from 8
            return Groups(blocks[..., 2:], scales, -8 * scales)
        return Groups(blocks[..., 4:], scales, blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1))

    def _in_halves(self, name: str, tensor: Tensor) -> Tensor:
        """Llama files hold rotary pairs side by side (2i, 2i + 1); the decoder wants them (i, i + d / 2)."""
        part = name.removesuffix(".bias").rpartition(".")[2]
        if part not in ("q", "k") or self.meta("general.architecture") != "llama":
            return tensor
        heads = int(self.meta("llama.attention.head_count"))
        if part == "k":
            heads = int(self.meta("llama.attention.head_count_kv", heads))
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
