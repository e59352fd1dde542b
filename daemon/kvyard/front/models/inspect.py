"""What a model's files say about it, read from their headers alone."""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvyard.front.models.errors import BadModel
from kvyard.front.models.store import ModelRef

MAX_HEADER = 256 << 20
"""Longest safetensors header that is read; real ones are below a few MiB."""
_SHOWN = 200
"""Longest text value that is shown."""


@dataclass(slots=True)
class Details:
    """A model from its headers; None where they do not say."""

    id: str
    path: str
    format: str
    family: str
    bytes: int
    parameters: int
    tensors: int
    tensor_types: dict[str, int]
    """Number of tensors by type."""
    context_length: int | None
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocabulary: int | None
    metadata: dict[str, Any] = field(default_factory=dict)


def inspect(ref: ModelRef) -> Details:
    """Read a model's headers. Raises BadModel."""
    try:
        return _gguf(ref) if ref.format == "gguf" else _hf(ref)
    except (struct.error, LookupError, ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise BadModel(
            f"{ref.path} cannot be read as {ref.format}: {error}", "it may be cut short; fetch it again"
        ) from error


# ---- GGUF ----------------------------------------------------------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Reader:
    """A cursor over a GGUF header; reading past the end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:  # noqa: ANN401 - int, float or bool by the code
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.number("Q")
        self._check(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:  # noqa: ANN401 - any GGUF value
        """A value; an array as `(length, first items)`, because vocabularies are long."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        return self.number(_SCALARS[kind])

    def _array(self) -> str:
        kind, length = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind]) * length
            self._check(size)
            self.at += size
        else:
            for _ in range(length):
                if kind == _STRING:
                    size = self.number("Q")
                    self._check(size)
                    self.at += size
                else:
                    self.value(kind)
        return f"[{length} items]"

    def _check(self, length: int) -> None:
        if self.at + length > len(self.data):
            raise ValueError("the file ends inside its header")


def _gguf(ref: ModelRef) -> Details:
    with ref.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        if reader.data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        reader.at = 4
        version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported")
        metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(pairs)}
        types, parameters, rows = _gguf_tensors(reader, tensors)
    family = str(metadata.get("general.architecture", "?"))

    def get(name: str) -> int | None:
        return metadata.get(f"{family}.{name}")

    return Details(
        id=ref.id,
        path=str(ref.path),
        format="gguf",
        family=family,
        bytes=ref.path.stat().st_size,
        parameters=parameters,
        tensors=tensors,
        tensor_types=types,
        context_length=get("context_length"),
        layers=get("block_count"),
        hidden=get("embedding_length"),
        heads=get("attention.head_count"),
        kv_heads=get("attention.head_count_kv"),
        vocabulary=get("vocab_size") or rows.get("token_embd.weight"),
        metadata={"gguf.version": version, **{name: _short(value) for name, value in metadata.items()}},
    )


def _gguf_tensors(reader: _Reader, tensors: int) -> tuple[dict[str, int], int, dict[str, int]]:
    """Types, number of parameters, and the outermost dimension by name."""
    name_of = _type_names()
    types: Counter[str] = Counter()
    parameters = 0
    rows: dict[str, int] = {}
    for _ in range(tensors):
        name = reader.text()
        shape = [reader.number("Q") for _ in range(reader.number("I"))]
        kind, _offset = reader.number("I"), reader.number("Q")
        types[name_of(kind)] += 1
        elements = 1
        for dimension in shape:
            elements *= dimension
        parameters += elements
        rows[name] = shape[-1] if shape else 1
    return dict(types.most_common()), parameters, rows


def _type_names() -> Callable[[int], str]:
    from gguf.constants import GGMLQuantizationType  # it imports numpy, which nothing else here needs

    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    return lambda kind: names.get(kind, f"type {kind}")


def _short(value: Any) -> Any:  # noqa: ANN401 - any GGUF value
    return value[:_SHOWN] + "..." if isinstance(value, str) and len(value) > _SHOWN else value


# ---- Hugging Face folders ------------------------------------------------------------------------------------


def _hf(ref: ModelRef) -> Details:
    config = json.loads((ref.path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("config.json is no object")
    types: Counter[str] = Counter()
    parameters = tensors = size = 0
    for path in sorted(ref.path.glob("*.safetensors")):
        size += path.stat().st_size
        for tensor in _safetensors_header(path).values():
            types[tensor["dtype"]] += 1
            tensors += 1
            elements = 1
            for dimension in tensor["shape"]:
                elements *= dimension
            parameters += elements
    text = config.get("text_config", config)
    return Details(
        id=ref.id,
        path=str(ref.path),
        format="hf",
        family=str(config.get("model_type", "?")),
        bytes=size,
        parameters=parameters,
        tensors=tensors,
        tensor_types=dict(types.most_common()),
        context_length=text.get("max_position_embeddings"),
        layers=text.get("num_hidden_layers"),
        hidden=text.get("hidden_size"),
        heads=text.get("num_attention_heads"),
        kv_heads=text.get("num_key_value_heads", text.get("num_attention_heads")),
        vocabulary=text.get("vocab_size"),
        metadata={name: _short(value) for name, value in config.items()},
    )


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER, path.stat().st_size):
            raise ValueError(f"{path.name} is cut short or no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header
