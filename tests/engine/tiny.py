"""Small random models in both file formats, and a dense float64 decoder to compare them with.

The dense decoder is written from the published formulas, not from the engine's code: no cache, no joined
matrices, everything repeated for every token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""Settings as in config.json; `head_dim` 8."""

GEMMA: dict[str, Any] = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 20,
    "rope_local_base_freq": 1_000.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def head_dim(settings: Mapping[str, Any]) -> int:
    """Width of a head."""
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def random_tensors(settings: Mapping[str, Any], seed: int = 0, *, head: bool = False) -> dict[str, Tensor]:
    """A checkpoint under Hugging Face's names: biases and head norms where the family has them."""
    generator = torch.Generator().manual_seed(seed)
    h, width = settings["hidden_size"], head_dim(settings)
    q, kv, inner = (
        settings["num_attention_heads"] * width,
        settings["num_key_value_heads"] * width,
        settings["intermediate_size"],
    )
    kind = settings["model_type"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def vector(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + (0.0 if kind == "gemma3_text" else 0.5)

    tensors = {"model.embed_tokens.weight": matrix(settings["vocab_size"], h) * 3, "model.norm.weight": vector(h)}
    if head:
        tensors["lm_head.weight"] = matrix(settings["vocab_size"], h)
    for i in range(settings["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }  # fmt: skip
        layer = {f"{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        layer |= {f"{name}.weight": vector(h) for name in ("input_layernorm", "post_attention_layernorm")}
        if kind == "gemma3_text":
            layer |= {
                f"{name}.weight": vector(h) for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
            }
        if kind in ("qwen3", "gemma3_text"):
            layer |= {"self_attn.q_norm.weight": vector(width), "self_attn.k_norm.weight": vector(width)}
        if kind == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": vector(rows) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def write_folder(folder: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    names = sorted(tensors)
    for i in range(shards):
        part = {name: tensors[name].contiguous() for name in names[i::shards]}
        save_file(part, folder / f"model-{i + 1:05}-of-{shards:05}.safetensors")
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def write_gguf(
    path: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, int] | None = None,
) -> Path:
    """The same model as GGUF; for the llama family with rotary pairs side by side, as llama.cpp writes them."""
    kind = settings["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_theta"])
    if settings.get("head_dim"):
        writer.add_key_length(settings["head_dim"])
    writer.add_eos_token_id(settings["eos_token_id"])
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        array = _pairs(settings, name, tensor).contiguous().numpy()
        kind_of = quantisation if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(array, kind_of), raw_shape=None, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` -> `blk.1.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES.get(stem, stem)}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def _pairs(settings: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Rows (i, i + d / 2) of each head moved to (2i, 2i + 1)."""
    if settings["model_type"] != "llama" or not ("q_proj" in name or "k_proj" in name):
        return tensor
    width = head_dim(settings)
    order = torch.arange(width).view(2, width // 2).T.reshape(-1)
    return torch.cat([head[order] for head in tensor.split(width)])  # type: ignore[no-untyped-call] # torch leaves it out


# ---- the dense decoder


def dense_logits(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """float64 logits `[t, vocab]` of every position of one sequence."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    gemma, eps = settings["model_type"] == "gemma3_text", settings["rms_norm_eps"]

    def norm(x: Tensor, name: str) -> Tensor:
        weight: Tensor = t[name] + (1.0 if gemma else 0.0)
        normed: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return normed * weight

    x = t["model.embed_tokens.weight"][tokens]
    if gemma:
        x = x * settings["hidden_size"] ** 0.5
    for i in range(settings["num_hidden_layers"]):
        p = f"model.layers.{i}."
        attended = _attention(settings, t, p, i, norm(x, p + "input_layernorm.weight"), norm)
        if gemma:
            x = x + norm(attended, p + "post_attention_layernorm.weight")
            hidden = norm(x, p + "pre_feedforward_layernorm.weight")
        else:
            x = x + attended
            hidden = norm(x, p + "post_attention_layernorm.weight")
        gate, up = hidden @ t[p + "mlp.gate_proj.weight"].T, hidden @ t[p + "mlp.up_proj.weight"].T
        active = torch.nn.functional.gelu(gate, approximate="tanh") if gemma else gate * torch.sigmoid(gate)
        out = (active * up) @ t[p + "mlp.down_proj.weight"].T
        x = x + (norm(out, p + "post_feedforward_layernorm.weight") if gemma else out)
    tied = settings["tie_word_embeddings"] or "lm_head.weight" not in t
    head = t["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


def _attention(
    settings: Mapping[str, Any],
    t: Mapping[str, Tensor],
    p: str,
    layer: int,
    x: Tensor,
    norm: Any,  # noqa: ANN401 # a closure
) -> Tensor:
    heads, kv_heads, width = settings["num_attention_heads"], settings["num_key_value_heads"], head_dim(settings)
    gemma = settings["model_type"] == "gemma3_text"

    def project(name: str, count: int) -> Tensor:
        out = x @ t[f"{p}self_attn.{name}_proj.weight"].T + t.get(f"{p}self_attn.{name}_proj.bias", 0.0)
        out = out.view(len(x), count, width)
        return norm(out, f"{p}self_attn.{name}_norm.weight") if f"{p}self_attn.{name}_norm.weight" in t else out

    local = gemma and settings["layer_types"][layer] == "sliding_attention"
    theta = settings["rope_local_base_freq"] if local else _theta(settings)
    q, k = (_turn(project(name, count), settings, theta) for name, count in (("q", heads), ("k", kv_heads)))
    v = project("v", kv_heads)
    window = settings.get("sliding_window") if local or settings["model_type"] == "mistral" else None
    scale = settings["query_pre_attn_scalar"] ** -0.5 if gemma else width**-0.5
    outs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, shared].T * scale
        at = torch.arange(len(x))
        hidden = at[None] > at[:, None]
        if window:
            hidden = hidden | (at[None] <= at[:, None] - window)
        outs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, shared])
    return torch.cat(outs, dim=1) @ t[p + "self_attn.o_proj.weight"].T


def _theta(settings: Mapping[str, Any]) -> float:
    return float((settings.get("rope_parameters") or {}).get("rope_theta") or settings["rope_theta"])


def _turn(x: Tensor, settings: Mapping[str, Any], theta: float) -> Tensor:
    """Rotation of pairs (i, i + d / 2), with the scaling that the settings ask for."""
    width = x.shape[-1]
    out = x.clone()
    for i in range(width // 2):
        frequency = _scaled(settings, theta ** (-2 * i / width))
        angles = torch.arange(len(x), dtype=torch.float64) * frequency
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + width // 2] * sin
        out[..., i + width // 2] = x[..., i + width // 2] * cos + x[..., i] * sin
    return out


def _scaled(settings: Mapping[str, Any], frequency: float) -> float:
    scaling = settings.get("rope_scaling")
    if not scaling:
        return frequency
    if scaling["rope_type"] == "linear":
        return float(frequency / scaling["factor"])
    low, high, original = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return float(frequency / scaling["factor"])
    smooth = (original / wavelength - low) / (high - low)
    return float((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
