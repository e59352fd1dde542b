"""`kvyard doctor` as a command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kvyard.cli import doctor
from kvyard.cli.app import run
from kvyard.cli.errors import CliError


def test_it_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for name in ("torch", "triton", "driver", "memory", "would run"):
        assert name in shown
    assert "on cpu in" in shown


def test_json_has_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "cpu", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings[-1]["ok"]
    assert {"what", "found", "ok", "hint"} == set(findings[0])


def test_what_is_amiss_is_marked_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    amiss = {"what": "would run", "found": "nothing: no device", "ok": False, "hint": "start with --device cpu"}
    monkeypatch.setattr(doctor, "_ask", lambda device: [amiss])
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "! would run  nothing: no device",
        "             start with --device cpu",
    ]


def test_a_library_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "Traceback ...\nImportError: libcudart.so.13: cannot open")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: broken)
    with pytest.raises(CliError, match="cannot be loaded: ImportError: libcudart"):
        doctor._ask("auto")


def test_a_driver_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE", 0.05)
    monkeypatch.setattr(sys, "executable", "/bin/sleep")
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda line, **options: real(["/bin/sleep", "5"], **options))
    with pytest.raises(CliError, match="gave no answer"):
        doctor._ask("auto")
