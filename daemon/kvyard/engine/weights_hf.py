"""Hugging Face folders: config.json to `ModelConfig`, safetensors (also sharded) by canonical names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvyard.engine.model_config import (
    ModelConfig,
    ModelError,
    Rope,
    every_nth_global,
    linear_factors,
    llama3_factors,
    unique_ids,
)
from kvyard.engine.weights import Form, Groups, Progress, Weights, assemble

_GLOBAL = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_GEMMA_LAYER = _LAYER | {
    "attn_out_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}


def load_hf(folder: Path, dtype: torch.dtype, progress: Progress, form: Form = "dense") -> Weights:
    """Read a whole folder. Raises ModelError for anything that cannot be served."""
    settings = _json(folder / "config.json")
    source = _HfSource(folder, settings.get("model_type") == "gemma3_text")
    config = read_config(settings, source)
    return Weights(config, assemble(source, config, dtype, progress, form), _end_ids(folder, settings))


def read_config(settings: dict[str, Any], source: _HfSource) -> ModelConfig:
    """`ModelConfig` from config.json and the presence of tensors."""
    family = _FAMILIES.get(str(settings.get("model_type")))
    if family is None:
        raise ModelError(
            f"models of the type '{settings.get('model_type')}' are not supported",
            f"supported types: {', '.join(sorted(_FAMILIES))}",
        )
    try:
        return _config(family, settings, source)
    except KeyError as error:
        raise ModelError(f"config.json has no {error}", "fetch the model again") from error


def _config(family: str, settings: dict[str, Any], source: _HfSource) -> ModelConfig:
    heads, hidden, layers = settings["num_attention_heads"], settings["hidden_size"], settings["num_hidden_layers"]
    head_dim = settings.get("head_dim") or hidden // heads
    gemma = family == "gemma3"
    tied = bool(settings.get("tie_word_embeddings", gemma)) or not source.has("head")
    base = settings.get("query_pre_attn_scalar")
    return ModelConfig(
        family=family,
        vocab_size=settings["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=settings["intermediate_size"],
        max_context=settings["max_position_embeddings"],
        norm_eps=settings["rms_norm_eps"],
        rope=_rope(settings, head_dim),
        tied_head=tied,
        qkv_bias=source.has("layers.0.q.bias"),
        output_bias=source.has("layers.0.o.bias"),
        qk_norm=source.has("layers.0.q_norm"),
        sandwich_norms=gemma,
        activation="gelu" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=base**-0.5 if base else None,
        window=_window(settings),
        windowed=_windowed(settings, layers),
        local_rope=_local_rope(settings, head_dim) if gemma else None,
    )


def _rope(settings: dict[str, Any], head_dim: int) -> Rope:
    """The base frequency stands at the top level or, in newer files, among the rope parameters."""
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if "full_attention" in scaling:
        scaling = scaling["full_attention"]
    theta = float(scaling.get("rope_theta") or settings.get("rope_theta") or 10_000.0)
    partial = scaling.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    dim = int(head_dim * float(partial))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, linear_factors(scaling["factor"], dim))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, original = (scaling[name] for name in names)
        return Rope(theta, dim, llama3_factors(theta, dim, factor, low, high, original))
    raise ModelError(f"rope scaling '{kind}' is not supported", "take a model without it, or with linear or llama3")


def _local_rope(settings: dict[str, Any], head_dim: int) -> Rope:
    """Gemma 3's windowed layers turn with a base frequency of their own."""
    nested = (settings.get("rope_parameters") or {}).get("sliding_attention") or {}
    return Rope(float(nested.get("rope_theta") or settings.get("rope_local_base_freq") or 10_000.0), head_dim)


def _window(settings: dict[str, Any]) -> int:
    if settings.get("use_sliding_window") is False:
        return 0
    return int(settings.get("sliding_window") or 0)


def _windowed(settings: dict[str, Any], layers: int) -> tuple[bool, ...]:
    if kinds := settings.get("layer_types"):
        return tuple(kind == "sliding_attention" for kind in kinds)
    if period := settings.get("sliding_window_pattern"):
        return every_nth_global(layers, int(period))
    if settings.get("use_sliding_window"):  # Qwen 2: the first layers see everything
        return tuple(i >= settings.get("max_window_layers", layers) for i in range(layers))
    return ()


def _end_ids(folder: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    """All of them: generation_config.json may list more than config.json."""
    generation = folder / "generation_config.json"
    listed = [(_json(generation) if generation.exists() else {}).get("eos_token_id"), settings.get("eos_token_id")]
    return unique_ids([i for item in listed for i in (item if isinstance(item, list) else [item])])


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing", "a Hugging Face folder has a config.json and *.safetensors") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object", "fetch the model again")
    return content


class _HfSource:
    """Tensors of one folder under canonical names; files are mapped, not read, until a tensor is asked for."""

    def __init__(self, folder: Path, gemma: bool) -> None:
        self._parts = _GEMMA_LAYER if gemma else _LAYER
        self._gemma = gemma
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call] # safetensors ships no types
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is no readable safetensors file: {error}", "fetch the model again"
                ) from error
        if not self._files:
            raise ModelError(f"{folder} has no *.safetensors file", "other weight formats are not read; convert it")

    def original(self, name: str) -> str:
        """`layers.3.q.bias` -> `model.layers.3.self_attn.q_proj.bias`."""
        stem, kind = (name[: -len(".bias")], "bias") if name.endswith(".bias") else (name, "weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".")
            return f"model.layers.{layer}.{self._parts.get(part, part)}.{kind}"
        return f"{_GLOBAL[stem]}.{kind}"

    def has(self, name: str) -> bool:
        return self.original(name) in self._files

    def read(self, name: str) -> Tensor:
        original = self.original(name)
        tensor: Tensor = self._files[original].get_tensor(original)
        return tensor.float() + 1.0 if self._gemma and name.endswith("norm") else tensor

    def groups(self, name: str) -> Groups | None:
        """Folders hold plain numbers."""
        return None
