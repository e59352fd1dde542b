"""What this machine has and what would run on it: `python -m kvyard.engine.doctor [auto|cpu|cuda]` prints JSON.

A process of its own for `kvyard doctor`, which must not import torch, and which a broken driver must not take along.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination."""

    what: str
    found: str
    ok: bool = True
    """False: this stands in the way of something, and `hint` says what to do."""
    hint: str = ""


def examine(device: DeviceName = "auto", root: Path = Path("/")) -> list[Finding]:
    """All findings; the last one says what would run. `root` is for tests."""
    return [*_software(), _driver(root), *_gpus(), *_cpu(), *_missing_for_cuda(), _verdict(device)]


def _software() -> Iterator[Finding]:
    import torch

    yield Finding("kvyard", _version("kvyard") or "a source tree")
    yield Finding("python", platform.python_version())
    if torch.version.hip is not None:
        build = f"HIP {torch.version.hip}"
    else:
        build = "no GPU support" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    yield Finding("torch", f"{torch.__version__} ({build})")
    triton = _version("triton")
    yield Finding("triton", triton or "missing", triton is not None, "" if triton else "pip install triton")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(root: Path) -> Finding:
    """The kernel module's own word; it is there also where torch cannot use it."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        amd = (root / "sys/module/amdgpu").exists()
        return Finding("driver", "amdgpu" if amd else "none for a GPU is loaded")
    return Finding("driver", " ".join(first.removeprefix("NVRM version:").split()))


def _gpus() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding("GPU", "none that torch can use")
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield Finding(
            f"GPU {number}",
            f"{properties.name}, capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        )


def _cpu() -> Iterator[Finding]:
    import torch

    from kvyard.engine.backends.memory import available_bytes

    wide = "with bfloat16 products" if torch.cpu._is_avx512_bf16_supported() else "no bfloat16 products"
    yield Finding("CPU", f"{platform.machine()}, {torch.get_num_threads()} threads, {wide}")
    yield Finding("memory", f"{available_bytes() / 2**30:.1f} GiB available to this process")


def _missing_for_cuda() -> Iterator[Finding]:
    """What stands in the way of `--device cuda`, if anything does."""
    from kvyard.engine.backends import backend_maker, choose_device
    from kvyard.engine.backends.base import BackendError

    try:
        choose_device("cuda")
        backend_maker("cuda")
        from kvyard.engine.backends.cuda import describe

        yield Finding("--device cuda", describe("cuda"))
    except BackendError as error:
        yield Finding("--device cuda", str(error), False, error.hint)


def _verdict(device: DeviceName) -> Finding:
    from kvyard.engine.backends import backend_maker, choose_device
    from kvyard.engine.backends.base import BackendError
    from kvyard.engine.loading import choose_dtype

    try:
        chosen = choose_device(device)
        backend_maker(chosen)
    except BackendError as error:
        return Finding("would run", "nothing: " + str(error), False, error.hint)
    kernels = "Triton kernels" if chosen == "cuda" else "the CPU kernels"
    return Finding("would run", f"on {chosen} in {choose_dtype(chosen)}, by {kernels}")


def main(arguments: list[str]) -> int:
    """Print the findings as JSON; 1 if nothing would run."""
    device = arguments[0] if arguments else "auto"
    if device not in ("auto", "cpu", "cuda"):
        sys.stderr.write("usage: python -m kvyard.engine.doctor [auto|cpu|cuda]\n")
        return 2
    findings = examine(cast(DeviceName, device))
    sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    return 0 if findings[-1].ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
