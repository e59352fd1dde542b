"""Headers of GGUF files and Hugging Face folders, whole and damaged."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.front.models import BadModel, ModelRef
from kvyard.front.models.inspect import inspect

from tests.front.models.index import hf_folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF file by the reference writer."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("pi", 3.14)
    writer.add_bool("yes", True)
    writer.add_string("long", "x" * 1000)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), dtype=np.float32))
    writer.add_tensor("blk.0.w", np.zeros((4, 32), dtype=np.float16))
    blocks = gguf.quantize(np.ones((4, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_of_the_reference_writer(written: Path) -> None:
    details = inspect(ModelRef("small", written, "gguf"))
    assert (details.family, details.context_length, details.layers, details.hidden) == ("llama", 256, 2, 32)
    assert (details.heads, details.kv_heads, details.vocabulary) == (4, 2, 10)
    assert details.parameters == 320 + 128 + 128 and details.tensors == 3
    assert details.tensor_types == {"F32": 1, "F16": 1, "Q8_0": 1}
    assert details.bytes == written.stat().st_size
    assert details.metadata["tokenizer.ggml.tokens"] == "[3 items]"
    assert details.metadata["yes"] is True and details.metadata["pi"] == pytest.approx(3.14)
    assert len(details.metadata["long"]) < 300


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.6])
def test_a_file_that_is_cut_short(written: Path, tmp_path: Path, share: float) -> None:
    whole = written.read_bytes()
    header = whole.index(b"blk.1.w")
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: max(5, int(header * share))])
    with pytest.raises(BadModel) as caught:
        inspect(ModelRef("cut", path, "gguf"))
    assert str(path) in caught.value.message and caught.value.hint


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_crash_or_allocate_without_end(
    data: st.DataObject, written: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(written.read_bytes()[:1500])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(4, len(raw) - 8))
        raw[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path = tmp_path_factory.mktemp("damaged") / "d.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        details = inspect(ModelRef("d", path, "gguf"))
        assert details.bytes == len(raw)
    except BadModel as error:
        assert error.message and error.hint
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
        b"GGUF",
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
    ],
)
def test_hostile_heads(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "h.gguf"
    path.write_bytes(raw)
    with pytest.raises(BadModel):
        inspect(ModelRef("h", path, "gguf"))


class TestFolders:
    """Hugging Face folders."""

    def test_a_whole_one(self, tmp_path: Path) -> None:
        folder = hf_folder(tmp_path / "m", num_key_value_heads=2)
        details = inspect(ModelRef("m", folder, "hf"))
        assert (details.family, details.hidden, details.layers, details.heads, details.kv_heads) == (
            "llama",
            8,
            2,
            4,
            2,
        )
        assert details.parameters == 35 and details.tensor_types == {"F32": 1, "BF16": 1}
        assert details.context_length == 128 and details.vocabulary == 10

    def test_without_grouped_heads_each_head_has_its_own(self, tmp_path: Path) -> None:
        assert inspect(ModelRef("m", hf_folder(tmp_path / "m"), "hf")).kv_heads == 4

    def test_a_nested_text_model(self, tmp_path: Path) -> None:
        folder = hf_folder(tmp_path / "m", text_config={"hidden_size": 99, "num_attention_heads": 3})
        assert inspect(ModelRef("m", folder, "hf")).hidden == 99

    @pytest.mark.parametrize("config", ["", "[]", "{", "null"])
    def test_a_damaged_configuration(self, tmp_path: Path, config: str) -> None:
        folder = hf_folder(tmp_path / "m")
        (folder / "config.json").write_text(config)
        with pytest.raises(BadModel):
            inspect(ModelRef("m", folder, "hf"))

    @pytest.mark.parametrize(
        "raw", [b"", b"\x01", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"{", struct.pack("<Q", 2) + b"[]"]
    )
    def test_damaged_tensors(self, tmp_path: Path, raw: bytes) -> None:
        folder = hf_folder(tmp_path / "m")
        (folder / "model.safetensors").write_bytes(raw)
        with pytest.raises(BadModel):
            inspect(ModelRef("m", folder, "hf"))


def test_the_default_model(default_model: Path) -> None:
    details = inspect(ModelRef("smollm2-135m", default_model, "gguf"))
    assert (details.family, details.layers, details.hidden, details.heads, details.kv_heads) == (
        "llama",
        30,
        576,
        9,
        3,
    )
    assert (details.vocabulary, details.context_length) == (49152, 8192)
    assert details.tensor_types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
