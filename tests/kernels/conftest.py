"""Where the kernels of these tests run: Triton's interpreter on the CPU, or a CUDA device where there is one."""

from __future__ import annotations

import pytest
import torch
import triton


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device that Triton can run on. Which of the two it is was settled when triton was imported."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if triton.knobs.runtime.interpret != (name == "cpu"):
        pytest.skip("this session runs kernels " + ("in the interpreter" if name == "cuda" else "on the GPU"))
    return torch.device(name)
