"""The ahead-of-time compile check: real compilers, real binaries, no device."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import triton
from kvyard_kernels import binary
from kvyard_kernels import compile as check
from kvyard_kernels.binary import Usage

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python without the interpreter mode that this session's kernels were imported in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1500)


def reports(*arguments: str) -> list[dict[str, Any]]:
    done = python("-m", "kvyard_kernels.compile", "--json", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def matrix_kinds(found: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(report["target"], kind) for report in found for kind in report["usage"]["matrix"]}


@pytest.fixture(scope="module")
def default_model_builds() -> list[dict[str, Any]]:
    """Attention of the default model, compiled for all targets."""
    kernels = ("decode_split", "decode_merge", "mixed_attention")
    return reports("--model", "smollm2-135m", *(word for kernel in kernels for word in ("--kernel", kernel)))


@pytest.mark.timeout(600)
def test_decode_attention_of_the_default_model_on_all_targets(default_model_builds: list[dict[str, Any]]) -> None:
    found = [report for report in default_model_builds if report["kernel"] != "mixed_attention"]
    assert [report["target"] for report in found if report["kernel"] == "decode_merge"] == 2 * TARGETS
    assert len([report for report in found if report["kernel"] == "decode_split"]) == 2 * 2 * 4
    for report in found:
        assert report["usage"]["spills"] == 0, report
        assert report["usage"]["registers"] > 0
        assert report["users"], report
    products = [report for report in found if report["kernel"] == "decode_split"]
    assert all(report["usage"]["shared"] > 0 for report in products)
    assert matrix_kinds(products) == {("sm_80", "mma"), ("sm_90", "mma"), ("sm_100", "mma"), ("gfx942", "mfma")}


@pytest.mark.timeout(600)
def test_decode_attention_of_every_head_shape_keeps_its_registers() -> None:
    found = reports("--target", "sm_90", "--kernel", "decode_split", "--kernel", "decode_merge")
    shapes = {report["variant"].split()[1] for report in found}
    assert shapes == {"head_dim=64", "head_dim=128", "head_dim=256"}
    assert [report for report in found if report["usage"]["spills"]] == []


@pytest.mark.timeout(600)
def test_chunks_use_each_architectures_own_products(default_model_builds: list[dict[str, Any]]) -> None:
    found = [report for report in default_model_builds if report["kernel"] == "mixed_attention"]
    wide = [report for report in found if report["variant"].startswith("bf16")]
    expected = {("sm_80", "mma"), ("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("gfx942", "mfma")}
    assert matrix_kinds(wide) == expected


PROGRAM = """
import dataclasses, json
from kvyard_kernels.compile import compile_one
from kvyard_kernels.configurations import MODELS, builds

gemma = tuple(model for model in MODELS if model.name == "gemma-3-1b")
decode = next(b for b in builds(gemma) if b.kernel == "decode_split" and "fp32" in b.users[0])
wide = dataclasses.replace(decode, constants=decode.constants | {"TILE": 32, "PRECISION": "tf32x3"})
broken = dataclasses.replace(decode, constants=decode.constants | {"TILE": 31})
faults = [compile_one(build, "sm_90").fault for build in (wide, broken)]
configurations = [
    {"kernel": b.kernel, "signature": b.signature, "constants": b.constants, "aligned": b.aligned, "users": b.users}
    for b in builds()
]
print(json.dumps([faults, configurations]))
"""


@pytest.fixture(scope="module")
def told() -> tuple[list[str], list[dict[str, Any]]]:
    """The faults of two bad builds, and all builds, as the command would compile them."""
    done = python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    faults, configurations = json.loads(done.stdout)
    return faults, configurations


@pytest.fixture(scope="module")
def configurations(told: tuple[list[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All builds."""
    return told[1]


@pytest.mark.timeout(600)
def test_a_spilling_build_and_a_broken_one_are_faults(told: tuple[list[str], list[dict[str, Any]]]) -> None:
    spilling, broken = told[0]
    assert "spills in decode attention" in spilling
    assert "CompilationError" in broken


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_in_use_compiles() -> None:
    found = reports()
    assert len({(report["kernel"], report["variant"], report["target"]) for report in found}) > 100
    assert not [report for report in found if report["fault"]]
    spilled = {report["kernel"] for report in found if report["usage"]["spills"]}
    assert spilled <= {"mixed_attention"}


def test_every_kernel_is_among_the_builds(configurations: list[dict[str, Any]]) -> None:
    assert {build["kernel"] for build in configurations} == {
        "decode_split", "decode_merge", "mixed_attention", "rope_and_cache", "rms_norm", "gated",
        "argmax_chunks", "argmax_merge", "weight_chunks", "draw", "uniforms",
    }  # fmt: skip


def test_head_shapes_and_types_in_use_are_among_them(configurations: list[dict[str, Any]]) -> None:
    decode = [build for build in configurations if build["kernel"] == "decode_split"]
    shapes = {(b["constants"]["HEAD_DIM"], b["signature"]["q"], b["constants"]["PARTIAL"]) for b in decode}
    assert shapes == {(d, t, p) for d in (64, 128, 256) for t in ("*bf16", "*fp32") for p in (False, True)}
    assert {b["constants"]["BLOCK_SIZE"] for b in decode} == {16, 32, 544}


def test_what_differs_between_batches_compiles_nothing_anew(configurations: list[dict[str, Any]]) -> None:
    """Table width, number of splits and chunks, window: plain integers, neither constants nor aligned."""
    for build in configurations:
        names = list(build["signature"])
        for name in ("table_row", "lse_row", "chunks", "size", "window", "group", "heads"):
            if name in names and build["kernel"] != "gated":
                assert build["signature"][name] == "i32", (build["kernel"], name)
                assert names.index(name) not in build["aligned"], (build["kernel"], name)


def test_pointers_and_head_strides_are_aligned(configurations: list[dict[str, Any]]) -> None:
    """Else loads would not be 16 bytes wide."""
    for build in configurations:
        names = list(build["signature"])
        wanted = [n for n, kind in build["signature"].items() if kind.startswith("*")]
        if build["kernel"] == "decode_split":
            wanted += ["k_slot", "k_head", "v_slot", "v_head", "q_head"]
        missing = [
            n for n in wanted if names.index(n) not in build["aligned"] and build["signature"][n] != "constexpr"
        ]
        assert not missing, (build["kernel"], missing)


def test_builds_are_distinct_and_name_their_users(configurations: list[dict[str, Any]]) -> None:
    keys = [json.dumps({k: v for k, v in build.items() if k != "users"}, sort_keys=True) for build in configurations]
    assert len(set(keys)) == len(keys)
    assert all(build["users"] for build in configurations)


def test_the_interpreter_mode_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "interpreted", lambda: True)
    assert check.main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def usage(**changes: Any) -> Usage:  # noqa: ANN401 # fields by name
    return replace(Usage(64, 0, 0, 0, 1024, {"mma": 3}), **changes)


@pytest.mark.parametrize(
    ("kernel", "target", "found", "fault"),
    [
        ("decode_split", "sm_90", usage(), ""),
        ("decode_split", "sm_90", usage(spills=2), "2 spills in decode attention"),
        ("decode_merge", "gfx942", usage(spills=1), "1 spills in decode attention"),
        ("decode_split", "gfx942", usage(scalar_spills=90), ""),
        ("mixed_attention", "sm_80", usage(spills=2), ""),
        ("mixed_attention", "gfx942", usage(shared=65537), "shared memory 65537 above the 65536 bytes of gfx942"),
        ("mixed_attention", "sm_90", usage(shared=200_000), ""),
        ("rms_norm", "sm_80", None, "it broke"),
    ],
)
def test_faults(kernel: str, target: str, found: Usage | None, fault: str) -> None:
    assert check.Report(kernel, "", (), target, found, error="it broke").fault == fault


def test_the_table_shows_numbers_and_faults() -> None:
    lines = check.table(
        [
            check.Report("decode_split", "bf16", ("a",), "sm_90", usage(spills=4, matrix={"wgmma": 2, "mma": 1})),
            check.Report("rms_norm", "fp32", ("a",), "gfx942", None, error="it broke"),
        ]
    ).splitlines()
    assert lines[0].split() == ["kernel", "variant", "target", "regs", "spills", "sgpr", "stack", "shared", "matrix"]
    assert "1 mma, 2 wgmma" in lines[1]
    assert lines[1].endswith("4 spills in decode attention")
    assert lines[2].endswith("it broke")


def elf(notes: list[tuple[bytes, int, bytes]]) -> bytes:
    """A 64-bit ELF image whose only section holds these notes."""
    content = b""
    for name, kind, body in notes:
        name += b"\0"
        content += struct.pack("<III", len(name), len(body), kind)
        content += name + b"\0" * (-len(name) % 4) + body + b"\0" * (-len(body) % 4)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, 64 + len(content))
    struct.pack_into("<HH", header, 0x3A, 64, 2)
    empty = bytes(64)
    section = struct.pack("<IIQQQQIIQQ", 1, 7, 0, 0, 64, len(content), 0, 0, 4, 0)
    return bytes(header) + content + empty + section


def test_amd_metadata_is_read_from_its_note() -> None:
    kernels = {"amdhsa.kernels": [{".vgpr_count": 187}]}
    image = elf([(b"GNU", 3, b"abc"), (b"AMDGPU", 32, msgspec.msgpack.encode(kernels))])
    assert binary.amd_metadata(image) == kernels


@pytest.mark.parametrize(
    ("image", "message"),
    [(b"MZ" + bytes(100), "not a 64-bit"), (elf([(b"GNU", 3, b"abc")]), "no AMDGPU metadata note")],
)
def test_an_image_without_it_is_refused(image: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        binary.amd_metadata(image)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "mma"),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "wgmma"),
        ("UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR4]", "tcgen05"),
        ("IMMA.16832.S8.S8 R4, R8, R12, R4", "mma"),
        ("FFMA R1, R2, R3, R4", None),
    ],
)
def test_matrix_instructions_by_name(line: str, kind: str | None) -> None:
    found = [binary._matrix_kind(name) for name in binary.NVIDIA_MATRIX.findall(line)]
    assert found == ([kind] if kind else [])


def test_usage_is_kept_beside_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        asm = {"cubin": b"binary"}

    calls = []

    def read(compiled: object) -> Usage:
        calls.append(compiled)
        return usage(spills=7)

    monkeypatch.setattr(check, "usage", read)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    assert [check._usage_cached(Compiled()).spills for _ in range(3)] == [7, 7, 7]
    assert len(calls) == 1
