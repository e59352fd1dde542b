"""The check for a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvyard.engine.backends.cpu import CpuBackend
from kvyard.engine.gpu_check import __main__ as command
from kvyard.engine.gpu_check import check
from kvyard.engine.gpu_check.generate import Stream, blocks_needed, generate
from kvyard.engine.gpu_check.model_checks import SelfCheck, Speed, Tokens, compare, quiet
from kvyard.engine.gpu_check.models import SMOLLM2_135M, TINY, random_weights
from kvyard.engine.gpu_check.plain import PlainModel
from kvyard_kernels.gpu_check import Bandwidth, Numeric, Repeat

ROOT = Path(__file__).parents[2]

BARE = """
import sys

class Absent:
    '''Packages that the machine with the GPU lacks.'''

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from kvyard.engine.gpu_check.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
ABSENT = {
    "msgspec",
    "gguf",
    "numba",
    "llvmlite",
    "structlog",
    "pydantic",
    "starlette",
    "uvicorn",
    "textual",
    "jinja2",
}


def run_dry(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command in a Python that has only what the target machine has."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'daemon'}:{ROOT / 'kernels'}"}
    environment.pop("TRITON_INTERPRET", None)
    line = [sys.executable, "-c", BARE.format(absent=ABSENT), "--dry", "--out", str(out), *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=500, cwd=ROOT)
    return done, json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


def test_it_runs_on_a_bare_machine(tmp_path: Path) -> None:
    done, report = run_dry(tmp_path / "r.json", "--only", "bandwidth")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert list(report["sections"]) == ["bandwidth"]
    assert "all passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_dry_tokens_and_bandwidth_on_a_bare_machine(tmp_path: Path) -> None:
    done, report = run_dry(tmp_path / "r.json", "--only", "tokens", "--only", "bandwidth")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert list(report["sections"]) == ["tokens", "bandwidth"]
    assert [row["wrong"] for row in report["sections"]["tokens"]] == [0, 0, 0]
    assert all(row["compared"] == 9 for row in report["sections"]["tokens"])
    assert "all passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_dry_run(tmp_path: Path) -> None:
    done, report = run_dry(tmp_path / "r.json")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {*report["sections"]} == {*command.SECTIONS} - {"default-tokens"}
    assert not report["failures"]
    assert {row["dtype"] for row in report["sections"]["numerics"]} == {"float32", "bfloat16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path / "r.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def streams(outputs: int = 4) -> list[Stream]:
    return [Stream([5, 9, 11, 40, 7], outputs), Stream([3] * 21, outputs, chunk=8)]


@pytest.mark.parametrize("family", TINY)
def test_the_plain_model_gives_the_cpu_backends_tokens(family: str) -> None:
    """Two independent implementations: what the GPU is held to is right here."""
    weights = random_weights(TINY[family], torch.float32)
    plain, packed = streams(), streams()
    blocks = blocks_needed(plain, 16)
    generate(PlainModel(weights, 16, blocks).forward, plain, 16)
    backend = CpuBackend(weights, torch.float32, False, 16, quiet)
    backend.allocate(blocks, 0)
    generate(backend.forward, packed, 16)
    assert [s.tokens for s in plain] == [s.tokens for s in packed]
    assert all(len(s.gaps) == s.outputs for s in plain)


def test_generation_accounts_for_its_time() -> None:
    weights = random_weights(TINY["llama"], torch.float32)
    found = streams(6)
    pace = generate(PlainModel(weights, 16, blocks_needed(found, 16)).forward, found, 16)
    assert pace.prompt_seconds > 0
    assert pace.decode_seconds > 0
    # The second prompt takes three steps, in the last of which it yields its first token; the other one has
    # three by then, two of them in steps with a prompt.
    assert pace.decode_tokens == (6 - 3) + (6 - 1)


def test_the_default_models_shape_has_its_size() -> None:
    c = SMOLLM2_135M
    layer = c.hidden * (c.qkv_rows + c.heads * c.head_dim + 3 * c.intermediate) + 2 * c.hidden
    assert c.vocab_size * c.hidden + c.layers * layer + c.hidden == 134_515_008


def finished(tokens: list[int], gaps: list[float]) -> Stream:
    return Stream([1], len(tokens), tokens=tokens, gaps=gaps)


@pytest.mark.parametrize(
    ("tokens", "gaps", "expected"),
    [
        ([4, 5, 6], [1.0, 1.0, 1.0], Tokens("m", 1, 3, 0, 0)),
        ([4, 9, 6], [1.0, 5e-4, 1.0], Tokens("m", 1, 1, 1, 0)),
        ([4, 9, 6], [1.0, 2e-3, 1.0], Tokens("m", 1, 1, 0, 1)),
        ([9, 5, 6], [0.0, 1.0, 1.0], Tokens("m", 1, 0, 1, 0)),
    ],
)
def test_a_difference_counts_unless_the_call_was_close(
    tokens: list[int], gaps: list[float], expected: Tokens
) -> None:
    assert compare("m", [finished(tokens, gaps)], [[4, 5, 6]]) == expected


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (Numeric("decode", "float32", 1e-6, 1e-5), ""),
        (Numeric("decode", "float32", 2e-5, 1e-5), "error 2.00e-05 above 1e-05"),
        (Numeric("decode", "float32", float("nan"), 1e-5), "error nan"),
        (Repeat("decode", 100, 0), ""),
        (Repeat("decode", 100, 3), "3 of 100 differ"),
        (Tokens("m", 4, 90, 1, 0), ""),
        (Tokens("m", 4, 90, 1, 2), "2 of 4 sequences left"),
        (SelfCheck("bfloat16", ""), ""),
        (SelfCheck("bfloat16", "rows differ"), "rows differ"),
        (Bandwidth("b", 1.0, 1.0, 1.0, 2.0), ""),
        (Speed("m", 1, 1.0, 1.0, 1.0), ""),
    ],
)
def test_failures(row: object, fault: str) -> None:
    assert (fault in check.failure(row)) if fault else not check.failure(row)
    assert check.line(row)


def options(out: Path, **changes: Any) -> check.Options:  # noqa: ANN401 # fields by name
    plain: dict[str, Any] = {"dry": True, "model": None, "reference": out, "out": out, "budget": 10.0}
    return check.Options(**plain | changes)


def test_a_section_that_raises_is_a_failure_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[object]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(
        check, "sections", lambda options, device: {"numerics": broken, "repeats": lambda: [Repeat("decode", 3, 0)]}
    )
    out = tmp_path / "r.json"
    assert check.run(options(out)) == 1
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["failures"] == ["numerics: RuntimeError: an illegal memory access"]
    assert "broken" in report["tracebacks"]["numerics"]
    assert report["sections"]["repeats"][0]["launches"] == 3
    shown = capsys.readouterr().out
    assert "FAILED   numerics" in shown
    assert "Traceback" not in shown


def test_sections_beyond_the_budget_are_skipped_and_do_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "sections", lambda options, device: {"speed": lambda: [Repeat("decode", 3, 0)]})
    assert check.run(options(tmp_path / "r.json", budget=-1.0)) == 1
    assert "skipped  speed" in capsys.readouterr().out


def test_a_section_that_measures_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "sections", lambda options, device: {"speed": list})
    assert check.run(options(tmp_path / "r.json")) == 1


def test_section_names_are_the_commands(tmp_path: Path) -> None:
    assert tuple(check.sections(options(tmp_path, model=tmp_path), "cpu")) == command.SECTIONS
    assert tuple(check.sections(options(tmp_path, only=("speed",)), "cpu")) == ("speed",)


def test_ratio_of_bandwidths() -> None:
    assert Bandwidth("b", 1.0, 1.0, 3000.0, 4000.0).ratio == 0.75
