"""Key/value metadata of a GGUF file (version 2 and 3), without its tensors.

The `gguf` package's reader keeps several numpy views per array element, hundreds of megabytes for a
vocabulary; the front only needs the plain values, once.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final

from kvyard.front.text.errors import ModelTextError

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[dict[int, struct.Struct]] = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_ARRAY_HEAD: Final = struct.Struct("<IQ")


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise struct.error("a length reaches past the end of the file")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def string(self) -> str:
        (size,) = self.unpack(_U64)
        # Some vocabularies hold pieces that are no valid UTF-8; they can never be matched, only counted.
        return self.take(size).decode("utf-8", "replace")

    def value(self, code: int) -> Any:  # noqa: ANN401 -- the file decides the type
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self.array()
        return self.unpack(_SCALARS[code])[0]

    def array(self) -> list[Any]:
        code, length = self.unpack(_ARRAY_HEAD)
        if code in _SCALARS:
            form = _SCALARS[code]
            return [item for (item,) in form.iter_unpack(self.take(form.size * length))]
        if length * 8 > len(self._data):
            raise struct.error("an array is longer than the file")
        return [self.value(code) for _ in range(length)]


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of `path` by key: scalars, strings and lists of them.

    Raises ModelTextError when the file is no GGUF, of another version, or damaged.
    """
    with path.open("rb") as file:
        head = file.read(24)
        if len(head) < 24 or head[:4] != _MAGIC:
            raise ModelTextError(f"{path.name} is no GGUF file: it does not start with the letters GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            cursor.take(4)
            (version,) = cursor.unpack(_U32)
            if version not in (2, 3):
                raise ModelTextError(f"{path.name} is GGUF version {version}; versions 2 and 3 can be read.")
            try:
                return _pairs(cursor)
            except (struct.error, KeyError, RecursionError) as error:
                raise ModelTextError(f"{path.name} is damaged: its metadata cannot be read ({error}).") from error


def _pairs(cursor: _Cursor) -> dict[str, Any]:
    _tensors, count = cursor.unpack(struct.Struct("<QQ"))
    pairs: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        (code,) = cursor.unpack(_U32)
        pairs[key] = cursor.value(code)
    return pairs
