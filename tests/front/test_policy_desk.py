"""The policy desk: what is in charge is what the engine said, one change at a time, ejections remembered."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from kvyard.front import policy_desk
from kvyard.front.events import EventLog
from kvyard.front.operations import OperationError, Who
from kvyard.front.policy_desk import PolicyDesk
from kvyard.front.quarantine import Quarantine
from kvyard.link.messages import Ejected, Reply
from kvyard.policy.base import BUILTIN, KINDS

from tests.front.yard import info

WHO = Who(pid=1, uid=0, gid=0, role="admin", user="root")


class Engine:
    """What the desk asks, and the test's answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.waiting: list[Any] = []
        self.refusal: Reply | None = None
        self.generation = 0
        self.taken: dict[str, Any] = {}
        self.pause_ms = 1.5
        self.slow = False
        self.asked_slowly = asyncio.Event()

    def __call__(self, method: str, params: dict[str, object], done: Any) -> None:  # noqa: ANN401 - a callback
        self.asked.append((method, params))
        if self.slow:
            self.waiting.append(done)
            self.asked_slowly.set()
        else:
            done(self.refusal or self.done(params))

    def done(self, params: dict[str, object]) -> Reply:
        self.generation += 1
        current = {"admission": "a", "preemption": "p", "prefill": "f"}
        if params.get("kind") in current:
            current[str(params["kind"])] = str(params.get("name", "a"))
        answer = {"generation": self.generation, "current": current, "previous": {}, "step": 9}
        return Reply(1, {**answer, "params": self.taken, "pause_ms": self.pause_ms})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def desk(engine: Engine) -> PolicyDesk:
    return PolicyDesk("kvyard", Quarantine(None), EventLog(), engine)


async def test_a_swap_is_in_charge_for_the_next_engine_too(desk: PolicyDesk, engine: Engine) -> None:
    result = await desk.swap("admission", "mine", {"x": 1}, WHO)
    assert (result.generation, result.current["admission"], result.step) == (1, "mine", 9)
    assert desk.in_charge.policies == {"admission": ("mine", {"x": 1})}
    await desk.swap("discipline", "vllm", {}, WHO)
    assert (desk.in_charge.discipline, desk.in_charge.policies, desk.in_charge.generation) == ("vllm", {}, 2)


@pytest.mark.parametrize(("pause_ms", "told"), [(1.5, ""), (2345.6, "the streams stood still for 2.3 s ")])
async def test_a_swap_tells_how_long_the_streams_stood_still(
    engine: Engine, log: EventLog, pause_ms: float, told: str
) -> None:
    engine.pause_ms = pause_ms
    desk = PolicyDesk("kvyard", Quarantine(None), log, engine)
    result = await desk.swap("admission", "mine", {}, WHO)
    assert result.pause_ms == pause_ms
    assert result.message.startswith(told) and bool(result.message) is bool(told)
    assert log.last(1)[0].data["pause_ms"] == pause_ms


async def test_a_disciplines_own_parameters_outlive_the_engine(desk: PolicyDesk, engine: Engine) -> None:
    await desk.swap("discipline", "vllm", {"admission": {"watermark": 0.2}}, WHO)
    assert desk.in_charge.parts() == {"discipline": ("vllm", {"admission": {"watermark": 0.2}})}
    assert desk.in_charge.policies == {}


async def test_a_changed_parameter_leaves_the_discipline_its_name(desk: PolicyDesk, engine: Engine) -> None:
    await desk.swap("discipline", "vllm", {"admission.watermark": 0.2}, WHO)
    result = await desk.set("admission", {"order": "priority"}, WHO)
    assert result.params == {"order": "priority"}
    assert desk.in_charge.named == "vllm"
    assert desk.in_charge.changed == {"admission.watermark": 0.2, "admission.order": "priority"}
    assert desk.in_charge.parts() == {
        "discipline": ("vllm", {"admission": {"watermark": 0.2, "order": "priority"}}),
    }
    await desk.swap("prefill", "mine", {}, WHO)
    assert [desk.in_charge.named, desk.in_charge.changed] == [None, {}], "now it is mixed"
    await desk.set("prefill", {"x": 1}, WHO)
    assert desk.in_charge.policies == {"prefill": ("a", {"x": 1})}, "by the name that the engine says"


async def test_a_set_parameter_is_told_as_the_policy_took_it(desk: PolicyDesk, engine: Engine) -> None:
    engine.taken = {"aging": 3.0, "watermark": 0.01}
    assert (await desk.set("admission", {"aging": 3}, WHO)).params == {"aging": 3.0}
    assert desk.in_charge.changed == {"admission.aging": 3.0}


async def test_a_refused_candidate_changes_nothing(desk: PolicyDesk, engine: Engine) -> None:
    engine.refusal = Reply(1, error="no such policy", code="unknown")
    with pytest.raises(OperationError, match="no such policy") as error:
        await desk.swap("admission", "mine", {}, WHO)
    assert error.value.code == "unknown"
    assert desk.in_charge.policies == {}
    assert desk.in_charge.generation == 0


async def test_one_change_at_a_time(desk: PolicyDesk, engine: Engine) -> None:
    engine.slow = True
    first = asyncio.create_task(desk.swap("admission", "mine", {}, WHO))
    await engine.asked_slowly.wait()
    with pytest.raises(OperationError, match="another policy change is under way"):
        await desk.swap("prefill", "other", {}, WHO)
    engine.waiting[0](engine.done({"kind": "admission", "name": "mine"}))
    assert (await first).ok
    engine.slow = False
    assert (await desk.swap("prefill", "other", {}, WHO)).ok


async def given_up(desk: PolicyDesk, engine: Engine, change: Any) -> OperationError:  # noqa: ANN401 - a coroutine
    """The engine says nothing to this change for as long as it is waited for."""
    engine.slow = True
    with pytest.raises(OperationError, match="the engine did not answer") as refusal:
        await change
    assert refusal.value.code == "no-answer"
    assert "do it after all" in refusal.value.hint
    return refusal.value


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_desk, "CHANGE_TIMEOUT_S", 0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["admission", "discipline"])
async def test_a_swap_that_happens_after_all_is_in_charge(engine: Engine, log: EventLog, kind: str) -> None:
    desk = PolicyDesk("kvyard", Quarantine(None), log, engine)
    refreshed: list[int] = []
    desk.came_late = lambda: refreshed.append(desk.in_charge.generation)
    await given_up(desk, engine, desk.swap(kind, "mine", {"prefill.x": 1} if kind == "discipline" else {"x": 1}, WHO))
    assert (desk.in_charge.discipline, desk.in_charge.policies, log.last(9)) == ("kvyard", {}, [])
    engine.waiting[0](engine.done({"kind": kind, "name": "mine"}))
    if kind == "discipline":
        assert desk.in_charge.parts() == {"discipline": ("mine", {"prefill": {"x": 1}})}
    else:
        assert desk.in_charge.parts() == {"admission": ("mine", {"x": 1})}
    (event,) = log.last(9)
    assert event.data["message"] == f"{kind} mine is in charge; it took longer than the call for it waited"
    assert (event.data["kind"], event.data["generation"], event.data["who"]) == ("swap", 1, str(WHO))
    assert refreshed == [1]


@pytest.mark.usefixtures("impatient")
async def test_parameters_that_are_set_after_all_are_in_force(engine: Engine, log: EventLog) -> None:
    desk = PolicyDesk("kvyard", Quarantine(None), log, engine)
    await given_up(desk, engine, desk.set("admission", {"aging": 3}, WHO))
    engine.taken = {"aging": 3.0}
    engine.waiting[0](engine.done({"kind": "admission"}))
    assert (desk.in_charge.changed, desk.in_charge.generation) == ({"admission.aging": 3.0}, 1)
    assert log.last(1)[0].data["message"].startswith("admission: aging=3.0; it took longer")


@pytest.mark.usefixtures("impatient")
async def test_a_change_that_is_refused_in_the_end_changes_nothing(engine: Engine, log: EventLog) -> None:
    desk = PolicyDesk("kvyard", Quarantine(None), log, engine)
    await given_up(desk, engine, desk.swap("admission", "mine", {}, WHO))
    engine.waiting[0](Reply(1, error="the engine ended", code="engine-lost"))
    assert (desk.in_charge.parts(), log.last(9)) == ({}, [])


@pytest.mark.usefixtures("impatient")
async def test_what_the_engine_may_be_loading_is_known_until_it_answers(desk: PolicyDesk, engine: Engine) -> None:
    assert not desk.loads("admission/mine")
    await given_up(desk, engine, desk.swap("admission", "mine", {}, WHO))
    assert desk.loads("admission/mine") and not desk.loads("prefill/mine")
    engine.waiting[0](Reply(1, error="no", code="import"))
    assert not desk.loads("admission/mine")


async def test_who_is_put_out_right_behind_the_answer_is_not_in_charge(desk: PolicyDesk, engine: Engine) -> None:
    """Both messages come at once, before the operator's call goes on."""
    engine.slow = True
    change = asyncio.create_task(desk.swap("admission", "mine", {}, WHO))
    await engine.asked_slowly.wait()
    engine.waiting[0](engine.done({"kind": "admission", "name": "mine"}))
    desk.ejected(Ejected("admission/mine", "raised", "no", 5))
    assert (await change).current["admission"] == "mine"
    assert desk.in_charge.policies == {"admission": (BUILTIN, {})}
    assert desk.in_charge.generation == 2


@pytest.mark.parametrize("kind", ["admision", "", "disciplines"])
async def test_a_wrong_kind_is_named(desk: PolicyDesk, engine: Engine, kind: str) -> None:
    with pytest.raises(OperationError, match="not a kind of policy"):
        await desk.swap(kind, "x", {}, WHO)
    assert engine.asked == []


async def test_a_part_that_was_put_out_alone_makes_it_mixed(desk: PolicyDesk, engine: Engine) -> None:
    await desk.swap("admission", "bad", {}, WHO)
    desk.ejected(Ejected("admission/bad", "raised", "no", 5))
    assert desk.in_charge.named is None
    assert desk.in_charge.parts() == {"admission": (BUILTIN, {})}


async def test_a_candidate_that_took_the_engine_down_leaves_what_was_in_charge(desk: PolicyDesk) -> None:
    generation = desk.in_charge.generation
    desk.candidate_lost(Ejected("admission/bad", "crashed", "no", 5))
    assert (desk.in_charge.discipline, desk.in_charge.policies) == ("kvyard", {})
    assert desk.in_charge.generation == generation
    assert desk.blocked_names() == ["admission/bad"]
    assert desk.ejections == {"admission/bad": 1}


async def test_a_new_version_that_took_the_engine_down_leaves_nothing_of_its_name(desk: PolicyDesk) -> None:
    await desk.swap("admission", "bad", {}, WHO)
    desk.candidate_lost(Ejected("admission/bad", "crashed", "no", 5), replaces_itself=True)
    assert (desk.in_charge.policies, desk.in_charge.generation) == ({"admission": (BUILTIN, {})}, 2)


async def test_an_ejected_discipline_leaves_the_built_ins_in_charge(desk: PolicyDesk, engine: Engine) -> None:
    await desk.swap("discipline", "theirs", {}, WHO)
    desk.ejected(Ejected("admission/bad", "raised", "no", 5, with_it=["preemption/p", "prefill/f"]))
    assert (desk.in_charge.named, desk.in_charge.parts(), desk.in_charge.changed) == (BUILTIN, {}, {})
    assert desk.in_charge.generation == 2
    assert desk.blocked_names() == ["admission/bad"]
    assert desk.ejections == {"admission/bad": 1}
    await desk.swap("admission", "good", {}, WHO)
    assert engine.asked[-1][1]["quarantined"] == ["admission/bad"]
    desk.release("admission/bad", WHO)
    assert desk.blocked_names() == []
    with pytest.raises(OperationError, match="not in quarantine"):
        desk.release("admission/bad", WHO)


async def test_only_the_version_that_was_put_out_is_blocked(engine: Engine) -> None:
    installed = {"admission/bad": "1.0.0"}
    desk = PolicyDesk("kvyard", Quarantine(None), EventLog(), engine, lambda policy: installed.get(policy, ""))
    desk.ejected(Ejected("admission/bad", "raised", "no", 5, version="1.0.0"))
    assert desk.blocked_names() == ["admission/bad"]
    installed["admission/bad"] = "1.0.1"
    assert desk.blocked_names() == []
    installed.clear()
    assert desk.blocked_names() == ["admission/bad"], "it is not installed at all"


@pytest.fixture
def log() -> EventLog:
    return EventLog()


async def test_a_discipline_that_the_engine_could_not_use_is_not_in_charge(engine: Engine, log: EventLog) -> None:
    desk = PolicyDesk("mine", Quarantine(None), log, engine)
    desk.engine_ready(info(policies=dict.fromkeys(KINDS, BUILTIN), notes=["the discipline mine cannot be used: why"]))
    assert (desk.in_charge.named, desk.in_charge.parts()) == (BUILTIN, {})
    (event,) = log.last(10)
    assert event.data["message"].startswith("the discipline mine cannot be used: why; the built-in took over")
    desk.engine_ready(info(policies=dict.fromkeys(KINDS, BUILTIN)))
    assert len(log.last(10)) == 1, "told once"


async def test_a_part_that_the_next_engine_could_not_use_is_not_in_charge(engine: Engine, log: EventLog) -> None:
    desk = PolicyDesk("vllm", Quarantine(None), log, engine)
    await desk.swap("admission", "mine", {}, WHO)
    desk.engine_ready(info(policies={"admission": BUILTIN, "preemption": "vllm", "prefill": "vllm"}))
    assert desk.in_charge.policies == {"admission": (BUILTIN, {})}
    assert log.last(1)[0].data["kinds"] == ["admission"]


async def test_an_engine_that_took_everything_changes_nothing(engine: Engine, log: EventLog) -> None:
    desk = PolicyDesk("builtin", Quarantine(None), log, engine)
    desk.engine_ready(info(policies=dict.fromkeys(KINDS, BUILTIN)))
    desk = PolicyDesk("vllm", Quarantine(None), log, engine)
    desk.engine_ready(info(policies=dict.fromkeys(KINDS, "vllm")))
    assert not log.last(10)


async def refused_swap(versions: dict[str, str], engine: Engine) -> OperationError:
    quarantine = Quarantine(None, clock=lambda: 1000.0)
    quarantine.add("admission/mine", "raised", "ValueError: no", "1.0")
    engine.refusal = Reply(1, {"policy": "admission/mine"}, error="it may not be loaded", code="quarantined")
    desk = PolicyDesk("kvyard", quarantine, EventLog(), engine, installed=lambda label: versions.get(label, ""))
    with pytest.raises(OperationError) as refusal:
        await desk.swap("admission", "mine", {}, WHO)
    return refusal.value


async def test_a_swap_that_the_quarantine_refuses_says_until_when_and_both_ways_out(engine: Engine) -> None:
    error = await refused_swap({"admission/mine": "1.0"}, engine)
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1060.0))
    assert error.code == "quarantined"
    assert error.message == f"admission/mine is in quarantine until {end} (raised: ValueError: no)"
    assert "install a corrected version" in error.hint and "kvyard policy release admission/mine" in error.hint


async def test_a_part_of_a_discipline_in_quarantine_is_told_by_its_own_name(desk: PolicyDesk, engine: Engine) -> None:
    desk.quarantine.add("prefill/part", "raised", "no", "")
    engine.refusal = Reply(1, {"policy": "prefill/part"}, error="it may not be loaded", code="quarantined")
    with pytest.raises(OperationError, match="prefill/part is not installed") as refusal:
        await desk.swap("discipline", "theirs", {}, WHO)
    assert refusal.value.code == "unknown"


async def test_other_refusals_are_told_in_the_engines_words(desk: PolicyDesk, engine: Engine) -> None:
    desk.quarantine.add("admission/mine", "raised", "no", "")
    words = "admission/mine is in quarantine, as its own exception says"
    engine.refusal = Reply(1, error=words, code="raised")
    with pytest.raises(OperationError) as refusal:
        await desk.swap("admission", "mine", {}, WHO)
    assert (refusal.value.code, refusal.value.message) == ("raised", words)


async def test_what_left_the_quarantine_meanwhile_is_told_as_the_engine_did(desk: PolicyDesk, engine: Engine) -> None:
    engine.refusal = Reply(1, {"policy": "admission/mine"}, error="it may not be loaded", code="quarantined")
    with pytest.raises(OperationError, match="it may not be loaded") as refusal:
        await desk.swap("admission", "mine", {}, WHO)
    assert refusal.value.code == "quarantined"


async def test_what_is_not_installed_is_not_called_in_quarantine(engine: Engine) -> None:
    error = await refused_swap({}, engine)
    assert (error.code, error.message) == ("unknown", "admission/mine is not installed")
    assert error.hint.startswith("version 1.0 of it is in quarantine until ")


async def test_a_swaps_event_names_the_version(engine: Engine, log: EventLog) -> None:
    desk = PolicyDesk("kvyard", Quarantine(None), log, engine, installed={"admission/mine": "2.1"}.__getitem__)
    await desk.swap("admission", "mine", {}, WHO)
    assert log.last(1)[0].data["message"] == "admission mine 2.1 is in charge"
