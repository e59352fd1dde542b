"""Small GGUF files and tokenizer folders, written for one test each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

ALPHABET = [chr(code) for code in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]]
"""The 256 characters that spell bytes in byte-level vocabularies."""

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def write(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file with the given metadata and no tensors. Lists of int, float and str are arrays."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(pre: str = "gpt-2", more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: <s>, </s>, <|end|>, the bytes, and a few merges."""
    merges = ["H e", "l l", "He ll", "Hell o", "Ġ w", "1 2", "12 3"]
    tokens = ["<s>", "</s>", "<|end|>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


def sentencepiece() -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: markers, the bytes, and pieces with falling scores."""
    pieces = [
        "▁",
        "l",
        "e",
        "a",
        "d",
        "i",
        "n",
        "g",
        "x",
        "in",
        "ing",
        "le",
        "ea",
        "ad",
        "▁l",
        "▁le",
        "▁lead",
        "▁leading",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
