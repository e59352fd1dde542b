"""`python -m kvyard.engine.gpu_check`: see `--help`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SECTIONS = ("numerics", "repeats", "tokens", "default-tokens", "bandwidth", "speed", "deterministic")
_REFERENCE = Path("tests/data/greedy/greedy_smollm2.json")


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    options = _parser().parse_args(arguments)
    import torch

    if options.dry and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which is why imports come late here
    from kvyard.engine.gpu_check.check import Options, run

    return run(
        Options(options.dry, options.model, options.reference, options.out, options.budget, tuple(options.only))
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvyard.engine.gpu_check",
        description="Kernels, tokens and speed on the GPU of this machine. Needs torch, triton, numpy, safetensors "
        "and the source tree on PYTHONPATH (daemon:kernels); nothing is installed and nothing fetched. With --model "
        "the package gguf is needed too, with pyyaml and tqdm: fetch them elsewhere with `pip download --no-deps`, "
        "install them here with `pip install --no-index --no-deps --target DIRECTORY`, and put that on PYTHONPATH.",
    )
    parser.add_argument("--dry", action="store_true", help="small sizes; in Triton's interpreter where no GPU is")
    parser.add_argument("--model", type=Path, help="the default model's GGUF file; else random weights of its shape")
    parser.add_argument("--reference", type=Path, default=_REFERENCE, help="the default model's tokens on a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the report")
    parser.add_argument("--only", action="append", default=[], choices=SECTIONS, help="this section (repeatable)")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds after which no section is begun")
    return parser


if __name__ == "__main__":
    sys.exit(main())
