"""The GGUF reader against the gguf package's writer and reader, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.engine.gguf_file import GgufFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Metadata of every kind and tensors of several types and shapes."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 250)
    writer.add_int16("a.i16", -3)
    writer.add_uint64("a.u64", 1 << 40)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e-9)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Größe")
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.words", ["one", "", "three" * 50])
    writer.add_array("a.nested", [[1, 2], [3]])
    generator = np.random.default_rng(0)
    writer.add_tensor("vector", generator.normal(size=7).astype(np.float32))
    writer.add_tensor("half", generator.normal(size=(3, 5)).astype(np.float16))
    matrix = generator.normal(size=(6, 64)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(kind.name, gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("cube", generator.normal(size=(2, 3, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_metadata(path: Path) -> None:
    found = GgufFile(path).metadata
    expected = {
        "general.architecture": "llama", "a.u8": 250, "a.i16": -3, "a.u64": 1 << 40, "a.f32": 0.5, "a.f64": 1e-9,
        "a.bool": True, "a.text": "Größe", "a.numbers": [1, -2, 3],
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected


def test_lists_of_other_things_are_passed_over(path: Path) -> None:
    found = GgufFile(path).metadata
    assert found["a.words"] is None
    assert found["a.nested"] is None


def test_tensors_are_those_of_the_packages_reader(path: Path) -> None:
    found, expected = GgufFile(path).tensors, gguf.GGUFReader(path).tensors
    assert list(found) == [tensor.name for tensor in expected]
    for tensor in expected:
        ours = found[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.data.tobytes() == tensor.data.tobytes()
        assert np.array_equal(
            gguf.dequantize(ours.data, ours.type),
            gguf.dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape),
        )


def test_tensors_are_mapped_read_only(path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        GgufFile(path).tensors["vector"].data[0] = 1


def test_the_default_model(default_model: Path) -> None:
    file = GgufFile(default_model)
    assert len(file.tensors) == 272
    assert file.metadata["llama.block_count"] == 30
    assert file.metadata["tokenizer.ggml.eos_token_id"] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty|cannot"),
        (b"GG", "header"),
        (b"ABCD" + bytes(40), "letters GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(8), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "ends within"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 50), "longer than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"t", 99), "99 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 999, 0), "unknown type"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 8, 0), "cannot have"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 9999, 0, 0), "ends before"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GgufFile(path)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 700), value=st.integers(0, 255))
def test_any_flipped_byte_gives_a_value_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_array("words", ["one", "two"])
    writer.add_array("numbers", [1, 2])
    writer.add_tensor("t", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray((folder / "m.gguf").read_bytes())
    content[at % len(content)] = value
    (folder / "m.gguf").write_bytes(content)
    try:
        GgufFile(folder / "m.gguf")
    except ValueError as error:
        assert str(error)
