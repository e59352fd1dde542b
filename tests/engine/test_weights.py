"""Reading checkpoints: names, shapes, end ids, and what is refused with which words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from kvyard.engine.loading import load_weights
from kvyard.engine.model_config import ModelError
from kvyard.engine.weights import Weights
from kvyard.engine.weights_gguf import load_gguf
from kvyard.engine.weights_hf import load_hf

from tests.engine.tiny import GEMMA, LLAMA, random_tensors, write_folder, write_gguf


def _silent(what: str, fraction: float) -> None:
    """No progress wanted."""


def _hf(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_hf(folder, dtype, _silent)


def test_both_formats_give_the_same_weights(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    one = _hf(write_folder(tmp_path / "folder", LLAMA, tensors, shards=2))
    other = load_gguf(write_gguf(tmp_path / "m.gguf", LLAMA, tensors), torch.float32, _silent)
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert replace(one.config, norm_eps=0) == replace(other.config, norm_eps=0)
    assert one.config.norm_eps == pytest.approx(other.config.norm_eps)  # GGUF keeps it as float32
    assert one.eos_ids == other.eos_ids == (2,)


def test_projections_are_joined_in_order(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    weights = _hf(write_folder(tmp_path, LLAMA, tensors))
    layer = "model.layers.1.self_attn."
    joined = torch.cat([tensors[f"{layer}{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(weights.tensors["layers.1.qkv"], joined)
    assert weights.tensors["layers.1.gate_up"].shape == (160, 48)


def test_matrices_take_the_type_and_norms_stay_wide(tmp_path: Path) -> None:
    weights = _hf(write_folder(tmp_path, LLAMA, random_tensors(LLAMA)), torch.bfloat16)
    assert weights.tensors["layers.0.qkv"].dtype == torch.bfloat16
    assert weights.tensors["embed"].dtype == torch.bfloat16
    assert weights.tensors["layers.0.input_norm"].dtype == torch.float32
    assert weights.tensors["norm"].dtype == torch.float32


def test_half_precision_files(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in random_tensors(LLAMA).items()}
    weights = _hf(write_folder(tmp_path, LLAMA, tensors))
    assert torch.equal(weights.tensors["layers.2.down"], tensors["model.layers.2.mlp.down_proj.weight"].float())


def test_gemma_norms_count_from_one(tmp_path: Path) -> None:
    tensors = random_tensors(GEMMA)
    weights = _hf(write_folder(tmp_path, GEMMA, tensors))
    assert torch.equal(weights.tensors["norm"], tensors["model.norm.weight"] + 1)
    assert torch.equal(weights.tensors["layers.0.q_norm"], tensors["model.layers.0.self_attn.q_norm.weight"] + 1)
    assert weights.config.windowed == (True, False, True)


def test_progress_reaches_one(tmp_path: Path) -> None:
    seen: list[float] = []
    load_hf(write_folder(tmp_path, LLAMA, random_tensors(LLAMA)), torch.float32, lambda what, part: seen.append(part))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_every_end_id_is_found(tmp_path: Path) -> None:
    """SAMPLING-16: generation_config.json lists more than config.json."""
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}), encoding="utf-8")
    assert _hf(folder).eos_ids == (7, 2, 9)


def test_end_of_turn_of_a_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), extra={"tokenizer.ggml.eot_token_id": 11})
    assert load_gguf(path, torch.float32, _silent).eos_ids == (2, 11)


_WIDE = LLAMA | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)], ids=["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_matrices_are_kept_as_they_are(kind: str, bits: int, tmp_path: Path) -> None:
    from kvyard_kernels.cpu import Quantised, quantised_product

    path = write_gguf(tmp_path / "m.gguf", _WIDE, random_tensors(_WIDE), quantisation=gguf.GGMLQuantizationType[kind])
    both = load_gguf(path, torch.float32, _silent, "both")
    for name, outputs in (("layers.1.qkv", 128), ("layers.0.gate_up", 192), ("layers.2.down", 64), ("head", 97)):
        parts = both.quantised(name)
        assert parts is not None
        matrix = Quantised(*parts, outputs)
        assert matrix.bits == bits
        values = quantised_product(torch.eye(matrix.inputs), matrix, None, torch.float32).T
        assert (values - both.matrix(name)).abs().max() < 1e-6
    alone = load_gguf(path, torch.float32, _silent, "quantised")
    assert set(alone.tensors) < set(both.tensors)
    assert "layers.1.qkv" not in alone.tensors
    assert alone.has_matrix("head")  # the embedding, whose rows are looked up


def test_what_is_not_quantised_in_one_way_stays_dense(tmp_path: Path) -> None:
    dense = load_gguf(
        write_gguf(tmp_path / "m.gguf", _WIDE, random_tensors(_WIDE)), torch.float32, _silent, "quantised"
    )
    assert dense.quantised("layers.0.qkv") is None
    assert dense.has_matrix("layers.0.qkv")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"lacks 2 tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm"):
        _hf(write_folder(tmp_path / "folder", LLAMA, tensors))
    with pytest.raises(ModelError, match=r"lacks 2 tensors: blk\.1\.ffn_up\.weight, output_norm\.weight"):
        load_gguf(write_gguf(tmp_path / "m.gguf", LLAMA, tensors), torch.float32, _silent)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    tensors = {name: t for name, t in random_tensors(LLAMA).items() if "mlp" not in name and "o_proj" not in name}
    with pytest.raises(ModelError, match=r"lacks 12 tensors: .* and 4 more"):
        _hf(write_folder(tmp_path, LLAMA, tensors))


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(48, 79)
    with pytest.raises(ModelError, match=r"down_proj\.weight: shape \(48, 79\), expected \(48, 80\)"):
        _hf(write_folder(tmp_path, LLAMA, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "'bert' are not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        _hf(write_folder(tmp_path, LLAMA | changes, random_tensors(LLAMA)))
    assert raised.value.hint


def test_a_setting_that_is_missing_is_named(tmp_path: Path) -> None:
    settings = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    with pytest.raises(ModelError, match=r"config\.json has no 'rms_norm_eps'"):
        _hf(write_folder(tmp_path, settings, random_tensors(LLAMA)))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        _hf(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        _hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        _hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the sort")
    with pytest.raises(ModelError, match="no readable safetensors"):
        _hf(tmp_path)


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="does not exist"):
        load_weights(path, torch.float32, _silent)
    path.write_bytes(b"not a model at all, only text")
    with pytest.raises(ModelError, match="no readable GGUF"):
        load_gguf(path, torch.float32, _silent)
    whole = write_gguf(tmp_path / "whole.gguf", LLAMA, random_tensors(LLAMA)).read_bytes()
    for share, words in ((0.5, "ends before tensor"), (0.001, "header")):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ModelError, match=words):
            load_gguf(path, torch.float32, _silent)


def test_a_gguf_of_another_family(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="family 'mamba' are not supported"):
        load_gguf(tmp_path / "m.gguf", torch.float32, _silent)
