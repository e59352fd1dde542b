"""Operators' actions in the engine: the real core and loader, and messages as the front sends them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kvyard.core.guard import Guard
from kvyard.core.plan import Limits
from kvyard.core.scheduler import Scheduler
from kvyard.engine.control import Controls
from kvyard.engine.policies import Loader
from kvyard.engine.recorder import Recorder
from kvyard.link.messages import Control, Reply

from tests.policy.distributions import install


@pytest.fixture
def controls() -> Controls:
    loader = Loader()
    limits = Limits(blocks=16, block_size=16, max_running=4, max_step_tokens=64, max_model_len=128)
    guard = Guard(clock_ns=time.perf_counter_ns)
    policies = loader.at_start("vllm", {}, [])
    scheduler = Scheduler(limits, policies, clock_ns=time.perf_counter_ns, guard=guard, salt=b"test")
    return Controls(scheduler, loader, Recorder(scheduler, time.monotonic_ns))


def ask(controls: Controls, method: str, **params: Any) -> Reply:  # noqa: ANN401 - JSON values
    reply = controls.answer(Control(7, method, params))
    assert reply is not None and reply.ticket == 7
    return reply


@pytest.mark.parametrize("kind", ["admission", "discipline"])
def test_a_refusal_for_the_quarantine_has_a_code_and_names_the_policy(controls: Controls, kind: str) -> None:
    name = "aging" if kind == "admission" else "sglang"
    part = f"admission/{name}"
    reply = ask(controls, "swap", kind=kind, name=name, params={}, quarantined=[part])
    assert (reply.code, reply.result) == ("quarantined", {"policy": part})
    assert reply.error is not None and part in reply.error
    assert ask(controls, "policies").result["discipline"] == "vllm"


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"kind": "admission", "name": "nobodys"}, "unknown"),
        ({"kind": "admission", "name": "aging", "params": {"nothing": 1}}, "bad-params"),
    ],
)
def test_other_refusals_have_codes_of_their_own(controls: Controls, params: dict[str, Any], code: str) -> None:
    reply = ask(controls, "swap", **params)
    assert (reply.code, reply.result) == (code, {})
    assert reply.error


def test_a_swap_tells_how_long_no_step_ran(
    controls: Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import time
        from kvyard.policy import AdmissionPolicy

        time.sleep(0.06)

        class Slow(AdmissionPolicy):
            def __init__(self, **values):
                super().__init__(**values)
                time.sleep(0.04)
    """
    install(tmp_path, "slow", "[kvyard.admission]\nslow = slow_plugin:Slow\n", modules={"slow_plugin": source})
    monkeypatch.syspath_prepend(str(tmp_path))
    result = ask(controls, "swap", kind="admission", name="slow").result
    assert result["current"]["admission"] == "slow"
    assert result["pause_ms"] >= 100
    assert "pause_ms" not in ask(controls, "set", kind="admission", params={}).result


def test_an_action_that_nobody_knows(controls: Controls) -> None:
    assert ask(controls, "dance").code == "unknown-method"
