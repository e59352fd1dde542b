"""What a compiled kernel says about itself: registers, spills, shared memory and matrix instructions.

NVIDIA: read from the cubin by the `cuobjdump` that Triton carries. AMD: read from the code object's metadata note;
its instructions are counted in the assembly text from which it was made, Triton carrying no disassembler for it.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import triton

NVIDIA_MATRIX = re.compile(r"\b([HIDQ]MMA|[HIQ]GMMA|UTC\w*MMA)\b")
AMD_MATRIX = re.compile(r"\b(v_s?mfma)\w*")
MATRIX_NAMES = {"HMMA": "mma", "IMMA": "mma", "DMMA": "mma", "QMMA": "mma", "v_mfma": "mfma", "v_smfma": "mfma"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one kernel on one target."""

    registers: int
    """32-bit registers of a thread (AMD: vector registers)."""
    spills: int
    """Spilled registers (AMD) or spill instructions (NVIDIA): traffic to memory either way."""
    scalar_spills: int
    """AMD: scalar registers kept in lanes of vector registers; no memory traffic."""
    stack: int
    """Bytes of local memory of a thread."""
    shared: int
    """Bytes of shared memory of a block."""
    matrix: dict[str, int]
    """Matrix instructions by kind: mma, wgmma, tcgen05, mfma."""


def usage(compiled: Any) -> Usage:  # noqa: ANN401 - triton has no type for it
    """Read a `triton.compile` result."""
    if "hsaco" in compiled.asm:
        return _amd(compiled.asm["hsaco"], compiled.asm["amdgcn"], int(compiled.metadata.shared))
    return _nvidia(compiled.asm["cubin"], compiled.asm["ptx"], int(compiled.metadata.shared))


def _nvidia(cubin: bytes, ptx: str, shared: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _cuobjdump("-res-usage", file.name)
        numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", resources)}
        if "REG" not in numbers:
            raise ValueError(f"cuobjdump tells no register count: {resources.strip()[:200]}")
        stack = numbers.get("STACK", 0)
        # Disassembling takes most of the time: a kernel without stack or products has nothing to be found there.
        code = _cuobjdump("-sass", file.name) if stack or "mma" in ptx else ""
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    matrix = Counter(_matrix_kind(name) for name in NVIDIA_MATRIX.findall(code))
    return Usage(numbers["REG"], spills, 0, stack, shared, dict(matrix))


def _matrix_kind(name: str) -> str:
    if name.startswith("UTC"):
        return "tcgen05"
    return "wgmma" if name.endswith("GMMA") else MATRIX_NAMES[name]


def _cuobjdump(*args: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, *args], capture_output=True, text=True, check=True, timeout=120).stdout


def _amd(code_object: bytes, assembly: str, shared: int) -> Usage:
    kernel = amd_metadata(code_object)["amdhsa.kernels"][0]
    matrix = Counter(MATRIX_NAMES[name] for name in AMD_MATRIX.findall(assembly))
    return Usage(
        registers=kernel[".vgpr_count"],
        spills=kernel[".vgpr_spill_count"],
        scalar_spills=kernel[".sgpr_spill_count"],
        stack=kernel[".private_segment_fixed_size"],
        shared=max(shared, kernel[".group_segment_fixed_size"]),
        matrix=dict(matrix),
    )


def amd_metadata(code_object: bytes) -> dict[str, Any]:
    """The metadata map of an AMD code object: msgpack in the ELF note `AMDGPU` of type 32.

    Source: LLVM's "User Guide for AMDGPU Backend", code object V3 and above.
    """
    for name, kind, content in _elf_notes(code_object):
        if name == b"AMDGPU" and kind == 32:
            return dict(msgspec.msgpack.decode(content))
    raise ValueError("the code object has no AMDGPU metadata note")


def _elf_notes(image: bytes) -> list[tuple[bytes, int, bytes]]:
    """Notes of a 64-bit little-endian ELF image, as (name, type, content)."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF image")
    table = struct.unpack_from("<Q", image, 0x28)[0]
    size, count = struct.unpack_from("<HH", image, 0x3A)
    notes = []
    for number in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", image, table + number * size + 4)
        if kind != 7:  # SHT_NOTE
            continue
        at, end = offset, offset + length
        while at < end:
            name_size, content_size, note = struct.unpack_from("<III", image, at)
            name = at + 12
            content = name + (name_size + 3) // 4 * 4
            notes.append(
                (image[name : name + name_size].rstrip(b"\0"), note, image[content : content + content_size])
            )
            at = content + (content_size + 3) // 4 * 4
    return notes
