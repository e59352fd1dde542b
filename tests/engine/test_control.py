"""Operators' actions in the engine: the real core and loader, and messages as the front sends them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kvyard.core.guard import Fault, Guard
from kvyard.core.plan import Limits, SequenceSpec
from kvyard.core.scheduler import Scheduler
from kvyard.engine.control import Controls
from kvyard.engine.policies import Loader
from kvyard.engine.recorder import Recorder
from kvyard.link.messages import Control, Reply
from structlog.testing import capture_logs

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
    assert result["versions"]["admission"] == "1.0", "of what was loaded"
    assert result["versions"]["prefill"] == ask(controls, "policies").result["policies"][2]["installed"] != ""
    assert result["pause_ms"] >= 100
    assert "pause_ms" not in ask(controls, "set", kind="admission", params={}).result


FRAGILE = """
    from kvyard.policy import Admission, AdmissionPolicy, PolicyParams, live

    class Fragile(AdmissionPolicy):
        class Params(PolicyParams):
            divisor: float = live(1.0, ge=0, doc="divides")
            limit: float = live(1.0, ge=0, doc="must not be 7")

        def key(self, request):
            return (1 / self.params.divisor,)

        def admit(self, snapshot):
            return Admission(())

        def set_params(self, values):
            super().set_params(values)
            if self.params.limit == 7:
                raise LookupError("there is no seven")
"""


@pytest.fixture
def fragile(controls: Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controls:
    """One request waits, and somebody's policy that some parameters break is in charge."""
    install(
        tmp_path,
        "fragile",
        "[kvyard.admission]\nfragile = fragile_plugin:Fragile\n",
        modules={"fragile_plugin": FRAGILE},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    controls._scheduler.add(SequenceSpec(1, 1, 1, 0.0, prompt_len=8, max_new=4))
    ask(controls, "swap", kind="admission", name="fragile")
    assert controls._scheduler.schedule(0.0).idle
    return controls


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"divisor": 0}, "key() raised ZeroDivisionError"),
        ({"limit": 7}, "set_params() raised LookupError: there is no seven"),
    ],
)
def test_values_that_break_the_policy_in_charge_are_no_refused_candidate(
    fragile: Controls, params: dict[str, Any], says: str
) -> None:
    reply = ask(fragile, "set", kind="admission", params=params)
    assert reply.code == "raised"
    assert str(reply.error).startswith(f"the new values broke the policy in charge, which was put out: {says}")
    assert [(exit_.policy, exit_.code) for exit_ in fragile.ejections()] == [("admission/fragile", "raised")]
    assert fragile._scheduler.policies.name("admission") == "builtin"


def test_a_candidate_that_fails_is_told_as_one(fragile: Controls) -> None:
    with capture_logs() as told:
        reply = ask(fragile, "swap", kind="admission", name="fragile", params={"divisor": 0})
    assert [(entry["event"], entry["candidates"]) for entry in told] == [("policy.refused", {"admission": "fragile"})]
    assert "in key" in told[0]["traceback"]
    assert str(reply.error).startswith("the candidate was refused: key() raised ZeroDivisionError")
    assert (fragile.ejections(), fragile._scheduler.policies.name("admission")) == ([], "fragile")


def test_values_of_a_policy_that_is_put_out_meanwhile_go_with_it(fragile: Controls) -> None:
    """The queue is so long that its order takes several boundaries, and the policy goes before the second."""
    scheduler = fragile._scheduler
    for number in range(2, 4000):
        scheduler.add(SequenceSpec(number, number, number, 0.0, prompt_len=8, max_new=4))
    assert fragile.answer(Control(8, "set", {"kind": "admission", "params": {"divisor": 2.0}})) is None
    with scheduler.guard.armed():
        scheduler.advice.eject(Fault("admission", "raised", "for another reason"))
    while not (replies := fragile.replies()):
        scheduler.schedule(0.0)
    assert (replies[0].ticket, replies[0].code) == (8, "refused")
    assert str(replies[0].error).startswith("the new values went with the policy: it was put out before")


def test_a_wrong_value_breaks_nothing(fragile: Controls) -> None:
    assert ask(fragile, "set", kind="admission", params={"divisor": -1}).code == "bad-params"
    assert fragile._scheduler.policies.name("admission") == "fragile"


SILENT = """
    from kvyard.policy import Admission, AdmissionPolicy, PolicyParams, live

    class Silent(AdmissionPolicy):
        class Params(PolicyParams):
            limit: float = live(1.0, ge=0, doc="any")

        def admit(self, snapshot):
            return Admission(())

        def set_params(self, values):
            self.params = None
"""


@pytest.fixture
def silent(controls: Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controls:
    """Somebody's policy that loses its parameters when they are set is in charge."""
    install(
        tmp_path,
        "silent",
        "[kvyard.admission]\nsilent = silent_plugin:Silent\n",
        modules={"silent_plugin": SILENT},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ask(controls, "swap", kind="admission", name="silent").error is None
    return controls


def test_who_has_no_parameters_after_they_were_set_is_put_out(silent: Controls) -> None:
    reply = ask(silent, "set", kind="admission", params={"limit": 2.0})
    assert (reply.code, reply.result) == ("raised", {})
    assert [ejected.policy for ejected in silent.ejections()] == ["admission/silent"]
    assert ask(silent, "policies").result["policies"][0]["name"] == "builtin"


def test_who_cannot_say_what_it_is_is_listed_all_the_same(silent: Controls) -> None:
    silent._scheduler.policies.admission.params = None  # type: ignore[assignment]  # as its code may do at any time
    row = ask(silent, "policies").result["policies"][0]
    assert (row["name"], row["version"], row["installed"], row["params"]) == ("silent", "1.0", "1.0", [])
    assert ask(silent, "dump").result["policies"]["admission"]["params"] == {}
    assert silent.ejections() == [], "it decides as before"


def test_an_action_that_nobody_knows(controls: Controls) -> None:
    assert ask(controls, "dance").code == "unknown-method"


@pytest.mark.parametrize(("prefix_cache", "host_blocks"), [(True, 8), (False, 0)])
def test_what_the_engine_was_started_with_is_in_force(prefix_cache: bool, host_blocks: int) -> None:
    limits = Limits(16, 16, 4, 64, 128, prefix_cache=prefix_cache, swap_blocks=host_blocks)
    loader = Loader()
    scheduler = Scheduler(limits, loader.at_start("vllm", {}, []), clock_ns=time.perf_counter_ns, salt=b"test")
    controls = Controls(scheduler, loader, Recorder(scheduler, time.monotonic_ns))
    force = ask(controls, "policies").result["in_force"]
    assert (force["prefix_reuse"], force["host_blocks"]) == (prefix_cache, host_blocks)
    assert (force["max_running"], force["max_step_tokens"], force["kv_blocks"]) == (4, 64, 16)
