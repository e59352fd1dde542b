"""A GGUF file (versions 2 and 3) as mapped tensors and the metadata that an engine needs.

The gguf package's own reader keeps an object per vocabulary entry and takes two seconds for what is skipped
here. Lists of strings (vocabulary, merges) are passed over; the front reads those.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """Row-major: the fastest dimension last."""
    data: npt.NDArray[np.uint8]
    """Mapped bytes, `[..., bytes of a row]`, read-only."""


class GgufFile:
    """Reads the whole header at once; tensors are mapped, not read."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError where the file is no GGUF, of another version, or damaged; OSError where unreadable."""
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"its header cannot be read ({error})") from error

    def _read(self) -> None:
        magic, version, tensors, pairs = self._unpack("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}; versions 2 and 3 can be read")
        for _ in range(pairs):
            key = self._string()
            (code,) = self._unpack("I")
            self.metadata[key] = self._value(code)
        infos = [self._info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in infos:
            self.tensors[name] = self._tensor(name, kind, shape, start + offset)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + form)
        values = layout.unpack_from(self._bytes.data, self._at)
        self._at += layout.size
        return values

    def _string(self) -> str:
        return bytes(self._bytes[self._string_end() : self._at]).decode("utf-8")

    def _string_end(self) -> int:
        """Pass over a string; where its text begins."""
        (length,) = self._unpack("Q")
        begin = self._at
        self._move(length)
        return begin

    def _move(self, length: int) -> None:
        if length > len(self._bytes) - self._at:
            raise ValueError("it ends within its header")
        self._at += length

    def _value(self, code: int) -> Any:  # noqa: ANN401 # the file decides the type
        if code == _STRING:
            return self._string()
        if code == _ARRAY:
            return self._array()
        return self._unpack(_SCALARS[code])[0]

    def _array(self) -> list[Any] | None:
        """Numbers as a list; anything else is passed over and stands as None."""
        code, length = self._unpack("IQ")
        if code in _SCALARS:
            begin, size = self._at, struct.calcsize("<" + _SCALARS[code])
            self._move(length * size)
            numbers: list[Any] = np.frombuffer(self._bytes[begin : self._at], dtype="<" + _SCALARS[code]).tolist()
            return numbers
        if length > len(self._bytes):
            raise ValueError("a list is longer than the file")
        for _ in range(length):
            if code == _STRING:
                self._string_end()
            else:
                self._value(code)
        return None

    def _info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = self._unpack(f"{dimensions}Q")
        kind, offset = self._unpack("IQ")
        return name, kind, tuple(reversed(shape)), offset

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], begin: int) -> GgufTensor:
        try:
            kind_of = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise ValueError(f"tensor {name} has the unknown type {kind}") from error
        elements, size = gguf.GGML_QUANT_SIZES[kind_of]
        if not shape or shape[-1] % elements:
            raise ValueError(f"tensor {name} of shape {shape} cannot have the type {kind_of.name}")
        row = shape[-1] // elements * size
        end = begin + row * int(np.prod(shape[:-1], dtype=np.int64))
        if end > len(self._bytes):
            raise ValueError(f"it ends before tensor {name} does")
        return GgufTensor(name, kind_of, shape, self._bytes[begin:end].reshape(*shape[:-1], row))
