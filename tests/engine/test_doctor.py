"""The examination of a machine: every finding stated, and the verdict right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kvyard.engine import backends, doctor
from kvyard.engine.backends import cuda
from kvyard.engine.backends.base import BackendError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


def found(findings: list[doctor.Finding], what: str) -> doctor.Finding:
    return next(finding for finding in findings if finding.what == what)


def test_everything_is_stated() -> None:
    findings = doctor.examine()
    names = [finding.what for finding in findings]
    assert names[:5] == ["kvyard", "python", "torch", "triton", "driver"]
    assert {"CPU", "memory", "--device cuda"} < set(names)
    assert names[-1] == "would run"
    assert torch.__version__ in found(findings, "torch").found
    assert all(finding.found for finding in findings)


def test_the_cpu_can_be_asked_for_anywhere() -> None:
    verdict = doctor.examine("cpu")[-1]
    assert verdict.ok
    assert verdict.found.startswith("on cpu in ")


@without_gpu
def test_without_a_gpu_the_cpu_runs_and_the_reason_is_told() -> None:
    findings = doctor.examine()
    assert found(findings, "GPU").found == "none that torch can use"
    wanted = found(findings, "--device cuda")
    assert not wanted.ok
    assert wanted.hint
    assert findings[-1].ok
    assert "on cpu" in findings[-1].found


@without_gpu
def test_asking_for_a_gpu_in_vain_fails() -> None:
    verdict = doctor.examine("cuda")[-1]
    assert not verdict.ok
    assert verdict.found.startswith("nothing: device 'cuda'")
    assert "--device cpu" in verdict.hint


def test_a_driver_is_named_by_its_module(tmp_path: Path) -> None:
    assert doctor._driver(tmp_path).found == "none for a GPU is loaded"
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    assert doctor._driver(tmp_path).found == "amdgpu"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build\nGCC version: 12\n"
    )
    assert doctor._driver(tmp_path).found == "NVIDIA UNIX x86_64 Kernel Module 580.159.04 Release Build"


def test_a_missing_triton_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "triton" else "1.0")
    triton = found(list(doctor._software()), "triton")
    assert (triton.found, triton.ok, triton.hint) == ("missing", False, "pip install triton")


def test_a_gpu_without_triton_is_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "_cuda_maker", lambda: None)
    assert doctor._verdict("auto").found.startswith("on cpu")
    refused = doctor._verdict("cuda")
    assert not refused.ok
    assert "Triton" in refused.found


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_old_gpus_are_refused_by_name(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        total_memory = 80 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tested GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    if fits:
        assert cuda.describe("cuda") == f"Tested GPU, 80 GiB, capability {capability[0]}.{capability[1]}"
        return
    with pytest.raises(BackendError, match=r"Tested GPU has compute capability 7\.5; the kernels need 8\.0"):
        cuda.describe("cuda")


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["cpu"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["what"] == "would run"
    assert doctor.main(["tpu"]) == 2
    assert "auto|cpu|cuda" in capsys.readouterr().err


@without_gpu
def test_the_command_fails_where_nothing_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["cuda"]) == 1
    assert not json.loads(capsys.readouterr().out)[-1]["ok"]
