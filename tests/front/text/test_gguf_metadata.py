"""Reading a GGUF's metadata without its tensors."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from kvyard.front.text.errors import ModelTextError
from kvyard.front.text.gguf_metadata import read_metadata

from tests.front.text.gguf_files import write


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    fields = {
        "a.flag": True,
        "a.count": 7,
        "a.rate": 0.5,
        "a.name": "Zürich",
        "a.ids": [1, 2, 3],
        "a.words": ["x", "ÿ", ""],
    }
    read = read_metadata(write(tmp_path / "m.gguf", fields))
    assert {key: read[key] for key in fields} == fields
    assert read["general.architecture"] == "llama"


def test_the_default_model_is_read_quickly(default_model: Path) -> None:
    start = time.perf_counter()
    read = read_metadata(default_model)
    assert time.perf_counter() - start < 4.0
    assert len(read["tokenizer.ggml.tokens"]) == read["llama.vocab_size"] == 49_152
    assert read["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no GGUF"),
        (b"not a model, but long enough to look at", "no GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**60), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**60), "damaged"),
    ],
)
def test_what_is_no_sound_file_is_named_as_such(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelTextError, match=words) as caught:
        read_metadata(file)
    assert "broken.gguf" in str(caught.value)


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "nested.gguf"
    level = struct.pack("<IQ", 9, 1)
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9)
    file.write_bytes(head + level * 100_000)
    with pytest.raises(ModelTextError, match="damaged"):
        read_metadata(file)


def test_a_truncated_file_is_damaged_wherever_it_ends(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", {"a.words": ["one", "two"], "a.count": 3}).read_bytes()
    for size in range(24, len(whole) - 40, 7):
        file = tmp_path / "cut.gguf"
        file.write_bytes(whole[:size])
        with pytest.raises(ModelTextError, match="damaged"):
            read_metadata(file)
