"""The description that a daemon serves is true of it: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again
from tests.e2e.quick_model import quick_model

CHECKS = (
    "not_a_server_error",  # 503 of /ready is documented, and never the answer of a daemon that serves
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
"""Not `positive_data_acceptance`: rules between fields (`best_of` and `n`, `stream_options` and `stream`), the
vocabulary and the window's length are beyond what a schema can say, so that a body that fits it may be a 400."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A quick model that can chat."""
    folder = quick_model(tmp_path_factory.mktemp("chatting"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with daemon("--dtype", "float32", "--kv-blocks", "512", "--max-model-len", "256", model=folder) as running:
        yield running


def conforms(running: DaemonProcess, folder: Path, *more: str) -> None:
    """Run schemathesis on everything that is described; what it found is the failure's text."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{running.base}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--seed", "1", "--continue-on-failure", "--suppress-health-check", "all"),
        *("--no-shrink", "--warnings", "off", *more),
    ]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.e2e.openapi_hooks", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **hooks}, capture_output=True, text=True, timeout=280, check=False
    )
    print(done.stdout[-1000:])
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]
    assert "Traceback" not in running.log
    idle_again(running)


@pytest.mark.timeout(300)
def test_API_the_description_is_true(described: DaemonProcess, tmp_path: Path) -> None:
    conforms(described, tmp_path, "--phases", "coverage", "--mode", "positive")
    conforms(described, tmp_path, "--phases", "fuzzing", "--max-examples", "8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", [("coverage",), ("fuzzing", "--max-examples", "300")], ids=lambda phase: phase[0])
def test_the_description_is_true_of_whatever_is_sent(
    described: DaemonProcess, tmp_path: Path, phase: tuple[str, ...]
) -> None:
    conforms(described, tmp_path, "--phases", *phase)
