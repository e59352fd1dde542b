"""The check itself: sections one after the other within a budget of time, then a table and a JSON report."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from kvyard_kernels import gpu_check as kernels
from kvyard_kernels.triton.launch import interpreted

from kvyard.engine.gpu_check import model_checks
from kvyard.engine.gpu_check.model_checks import Speed, Tokens


@dataclass(slots=True)
class Report:
    """Everything the check found."""

    machine: dict[str, str]
    dry: bool
    sections: dict[str, list[Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    tracebacks: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    dry: bool
    model: Path | None
    reference: Path
    out: Path
    budget: float
    only: tuple[str, ...] = ()
    """Sections to run; all if empty."""


def run(options: Options) -> int:
    """Run all sections; the exit status: 0 if all passed, 1 if not, 2 if there is nothing to run on."""
    if not options.dry and not torch.cuda.is_available():
        sys.stderr.write(
            f"no CUDA device works here: torch {torch.__version__} sees {torch.cuda.device_count()}. "
            "--dry runs small sizes in Triton's interpreter.\n"
        )
        return 2
    device = "cpu" if interpreted() else "cuda"
    report = Report(machine(device), options.dry)
    begin = time.monotonic()
    for name, section in sections(options, device).items():
        if time.monotonic() - begin > options.budget:
            report.skipped.append(f"{name}: {options.budget:.0f} s were used up")
            continue
        _run_section(report, name, section)
    report.seconds["total"] = round(time.monotonic() - begin, 1)
    options.out.write_text(json.dumps(asdict(report), indent=1, default=str) + "\n", encoding="utf-8")
    sys.stdout.write(text(report) + f"\nwritten to {options.out}\n")
    return 1 if report.failures or report.skipped else 0


def sections(options: Options, device: str) -> dict[str, Callable[[], Iterable[Any]]]:
    """What is run, in order; what a failure would make pointless to know comes last."""
    target, dry = torch.device(device), options.dry
    found: dict[str, Callable[[], Iterable[Any]]] = {
        "numerics": lambda: kernels.numerics(target, dry=dry),
        "repeats": lambda: kernels.repeats(target, dry=dry),
        "tokens": lambda: model_checks.tiny_tokens(device, dry=dry),
    }
    if options.model is not None:
        model = options.model
        found["default-tokens"] = lambda: [model_checks.default_tokens(model, options.reference, device)]
    found["bandwidth"] = lambda: kernels.bandwidth(target, dry=dry)
    found["speed"] = lambda: model_checks.speeds(options.model, device, dry=dry)
    found["deterministic"] = lambda: model_checks.deterministic(device, dry=dry)
    return {name: section for name, section in found.items() if not options.only or name in options.only}


def machine(device: str) -> dict[str, str]:
    """The versions, and the card by its name."""
    facts = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "card": properties.name,
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "multiprocessors": str(properties.multi_processor_count),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
        }
    else:
        facts["card"] = "none: Triton's interpreter"
    return facts


def _run_section(report: Report, name: str, section: Callable[[], Iterable[Any]]) -> None:
    begin = time.monotonic()
    rows: list[Any] = []
    report.sections[name] = rows
    try:
        for row in section():
            rows.append(row)
            if fault := failure(row):
                report.failures.append(f"{name}: {fault}")
    except Exception as error:  # the other sections still tell something
        report.failures.append(f"{name}: {type(error).__name__}: {error}"[:500])
        report.tracebacks[name] = traceback.format_exc()
    if not rows and name not in report.tracebacks:
        report.failures.append(f"{name}: nothing was measured")
    report.seconds[name] = round(time.monotonic() - begin, 1)


def failure(row: object) -> str:
    """Why a row fails the check, or nothing."""
    if isinstance(row, kernels.Numeric) and not row.passed:
        return f"{row.name} in {row.dtype}: error {row.error:.2e} above {row.limit:.0e}"
    if isinstance(row, kernels.Repeat) and row.differing:
        return f"{row.name}: {row.differing} of {row.launches} differ"
    if isinstance(row, Tokens) and row.wrong:
        return f"{row.name}: {row.wrong} of {row.sequences} sequences left the CPU's tokens"
    if isinstance(row, model_checks.SelfCheck) and row.fault:
        return row.fault
    return ""


def text(report: Report) -> str:
    """The report for a person."""
    lines = ["  ".join(f"{key} {value}" for key, value in report.machine.items())]
    if report.dry:
        lines.append("dry: small sizes; times mean nothing")
    for name, rows in report.sections.items():
        lines.append(f"\n{name} ({report.seconds.get(name, 0.0):.1f} s)")
        lines += [f"  {line(row)}" for row in rows]
    lines.append("")
    lines += [f"skipped  {name}" for name in report.skipped]
    lines += [f"FAILED   {fault}" for fault in report.failures]
    if not report.failures and not report.skipped:
        lines.append(f"all passed in {report.seconds['total']:.0f} s")
    return "\n".join(lines)


def line(row: object) -> str:
    """One row for a person."""
    match row:
        case kernels.Numeric():
            return f"{row.name:32} {row.dtype:9} error {row.error:.1e} of at most {row.limit:.0e}"
        case kernels.Repeat():
            return f"{row.name:32} {row.launches} launches, {row.differing} differ"
        case kernels.Bandwidth():
            return (
                f"{row.name:26} {row.gigabytes:7.2f} GB {row.microseconds:9.0f} us {row.gb_per_s:7.0f} GB/s, "
                f"{row.ratio:4.2f} of a copy's {row.copy_gb_per_s:.0f}"
            )
        case Tokens():
            return f"{row.name:16} {row.compared} tokens equal, {row.close_calls} close calls, {row.wrong} wrong"
        case Speed():
            return (
                f"{row.name} batch {row.batch:2}: prefill {row.prompt_tokens_per_s:8.0f}/s, decode "
                f"{row.decode_tokens_per_s:8.0f}/s, step {row.step_milliseconds:.2f} ms"
            )
        case model_checks.SelfCheck():
            return f"{row.dtype:9} {row.fault or 'a row has the same bits in steps of any size'}"
    return str(row)
