"""The one place where kernels are launched, so that the compile check can see each launch without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch would have compiled and run."""

    kernel: Any
    """The `@triton.jit` function."""
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    """Positional arguments: tensors, integers, floats."""
    constants: Mapping[str, Any]
    """`tl.constexpr` parameters."""
    options: Mapping[str, Any]


_recorded: list[Launch] | None = None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET was 1 when triton was imported)."""
    return bool(triton.knobs.runtime.interpret)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches in place of running them: the tensors may be on torch's `meta` device."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def launch(
    kernel: Any,  # noqa: ANN401 - triton has no type for it
    grid: tuple[int, ...],
    *args: Any,  # noqa: ANN401 - tensors and numbers, as the kernel wants them
    warps: int,
    stages: int = 2,
    **constants: Any,  # noqa: ANN401 - numbers, flags and names
) -> None:
    """Launch, or record if that is asked for."""
    # Stated because Triton's default is about to change: fused multiply-adds are the rounding we test.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, constants, options))
        return
    kernel[grid](*args, **constants, **options)
