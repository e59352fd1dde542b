"""Build all kernels in use ahead of time, without a device: `python -m kvyard_kernels.compile`.

Prints registers, spills, shared memory and matrix instructions, read back from the binaries. Exit status 1 if a
kernel does not compile, asks for more shared memory than the target has, or if decode attention spills.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvyard_kernels.binary import Usage, usage
from kvyard_kernels.configurations import MODELS, Build, builds
from kvyard_kernels.triton.launch import interpreted

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one block may have."""
NEVER_SPILL = ("decode_split", "decode_merge")


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one build on one target."""

    kernel: str
    variant: str
    """What sets this build of the kernel apart from its siblings."""
    users: tuple[str, ...]
    target: str
    usage: Usage | None
    error: str = ""

    @property
    def fault(self) -> str:
        """Why this build fails the check, or nothing."""
        if self.usage is None:
            return self.error
        if self.usage.shared > SHARED_LIMIT[self.target]:
            return f"shared memory {self.usage.shared} above the {SHARED_LIMIT[self.target]} bytes of {self.target}"
        if self.kernel in NEVER_SPILL and self.usage.spills:
            return f"{self.usage.spills} spills in decode attention"
        return ""


def compile_all(wanted: Sequence[Build], targets: Sequence[str], jobs: int) -> list[Report]:
    """Compile every build for every target, `jobs` at a time; in the order asked for."""
    tasks = [(build, target) for build in wanted for target in targets]
    if jobs <= 1:
        return [compile_one(build, target) for build, target in tasks]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, *zip(*tasks, strict=True), chunksize=4)) if tasks else []


def compile_one(build: Build, target: str) -> Report:
    """Compile one kernel for one target and read its usage, or find both in Triton's cache."""
    who = (build.kernel, variant(build), tuple(build.users), target)
    try:
        kernel = getattr(importlib.import_module(build.module), build.kernel)
        constants = dict(build.constants)
        if TARGETS[target].backend == "hip" and constants.get("PRECISION") == "tf32x3":
            constants["PRECISION"] = "ieee"  # what `ops` asks for there
        attributes: dict[Any, Any] = {(number,): [["tt.divisibility", 16]] for number in build.aligned}
        source = ASTSource(kernel, dict(build.signature), constants, attributes)
        compiled = triton.compile(source, target=TARGETS[target], options=dict(build.options))
        return Report(*who, usage=_usage_cached(compiled))
    except Exception as error:  # whatever the compiler raises is this build's result
        return Report(*who, usage=None, error=f"{type(error).__name__}: {error}".splitlines()[0][:300])


def _usage_cached(compiled: Any) -> Usage:  # noqa: ANN401 - triton has no type for it
    """Disassembling costs as much as compiling: what was read from a binary is kept beside Triton's cache."""
    binary = compiled.asm["hsaco" if "hsaco" in compiled.asm else "cubin"]
    readers = Path(__file__).with_name("binary.py").read_bytes()
    path = Path(triton.knobs.cache.dir) / f"kvyard-usage-{hashlib.sha256(readers + binary).hexdigest()[:32]}.json"
    if path.exists():
        return Usage(**json.loads(path.read_text()))
    found = usage(compiled)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(found)))
    draft.replace(path)
    return found


def variant(build: Build) -> str:
    """The constants that tell builds of one kernel apart, shortly."""
    names = ("HEAD_DIM", "BLOCK_SIZE", "PARTIAL", "SIZE_PAD", "RESIDUAL", "NORM", "GELU")
    kinds = [kind for kind in build.signature.values() if kind.startswith("*")]
    parts = [f"{name.lower()}={build.constants[name]}" for name in names if name in build.constants]
    return " ".join([kinds[0][1:], *parts])


def table(reports: Iterable[Report]) -> str:
    """The reports as aligned text, one line each."""
    head = ("kernel", "variant", "target", "regs", "spills", "sgpr", "stack", "shared", "matrix", "")
    rows: list[tuple[str, ...]] = [head]
    for report in reports:
        name = (report.kernel, report.variant, report.target)
        if report.usage is None:
            rows.append((*name, "", "", "", "", "", "", report.fault))
            continue
        u = report.usage
        matrix = ", ".join(f"{count} {kind}" for kind, count in sorted(u.matrix.items())) or "-"
        numbers = (u.registers, u.spills, u.scalar_spills, u.stack, u.shared)
        rows.append((*name, *map(str, numbers), matrix, report.fault))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    options = _parser().parse_args(arguments)
    if interpreted():
        sys.stderr.write("TRITON_INTERPRET is set: nothing can be compiled. Unset it and try again.\n")
        return 2
    started = time.monotonic()
    models = tuple(model for model in MODELS if not options.model or model.name in options.model)
    wanted = [b for b in builds(models) if not options.kernel or b.kernel in options.kernel]
    reports = compile_all(wanted, options.target or list(TARGETS), options.jobs)
    faults = [report for report in reports if report.fault]
    if options.json:
        text = json.dumps([{**asdict(report), "fault": report.fault} for report in reports], indent=1)
    else:
        seconds = time.monotonic() - started
        count = f"{len(reports)} binaries of {len(wanted)} builds in {seconds:.0f} s, {len(faults)} at fault"
        text = f"{table(reports)}\n\n{count}"
    sys.stdout.write(text + "\n")
    for report in faults:
        sys.stderr.write(f"{report.kernel} ({report.variant}) on {report.target}: {report.fault}\n")
    return 1 if faults or not reports else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvyard_kernels.compile", description=__doc__)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this target (repeatable)")
    parser.add_argument("--model", action="append", choices=[m.name for m in MODELS], help="only this model's builds")
    parser.add_argument("--kernel", action="append", help="only this kernel, for example decode_split")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--json", action="store_true", help="JSON in place of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
