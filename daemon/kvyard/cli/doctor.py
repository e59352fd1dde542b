"""`kvyard doctor`: what this machine has, and what would run on it. The engine's side answers in its own process."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvyard.cli.errors import CliError
from kvyard.cli.options import JsonOption
from kvyard.cli.output import clean, say, say_json

_PATIENCE = 60.0
"""Seconds for torch to start and for a driver to answer; one that does not is a finding of its own."""


class DeviceChoice(StrEnum):
    """Devices that can be asked for."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    device: Annotated[DeviceChoice, typer.Option("--device", help="The device that is wanted.")] = DeviceChoice.AUTO,
    json: JsonOption = False,
) -> None:
    """List driver, torch, triton, devices and memory, and say what would run here; fails where nothing would."""
    findings = _ask(device.value)
    if json:
        say_json(findings)
    else:
        width = max(len(finding["what"]) for finding in findings)
        for finding in findings:
            say(f"{'  ' if finding['ok'] else '! '}{finding['what']:{width}}  {clean(finding['found'])}")
            if finding["hint"]:
                say(f"  {'':{width}}  {clean(finding['hint'])}")
    if not findings[-1]["ok"]:
        raise typer.Exit(1)


def _ask(device: str) -> list[dict[str, Any]]:
    line = [sys.executable, "-m", "kvyard.engine.doctor", device]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise CliError(
            f"the engine's libraries gave no answer in {_PATIENCE:.0f} s; a driver that hangs does this",
            "look at `dmesg` and, for NVIDIA, whether `nvidia-smi` answers",
        ) from error
    try:
        findings: list[dict[str, Any]] = json_module.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CliError(
            f"the engine's libraries cannot be loaded: {last}", "reinstall kvyard and torch in this environment"
        ) from None
    return findings
