"""What the daemon says of a reload (in force, after a restart), and the way back from a drain."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvyard.control.schema import SwapResult
from kvyard.front import policy_desk
from kvyard.front.daemon import Daemon, EngineRefused, Served, reload_words, rows_in_force
from kvyard.front.keys import KeyRing
from kvyard.front.operations import OperationError, Who
from kvyard.front.policy_desk import PolicyDesk, Taken
from kvyard.front.settings import Difference, Settings
from kvyard.link.codec import ToEngine
from kvyard.link.messages import Refused, Reply
from kvyard.link.progress import EnginePhase
from kvyard.policy.base import BUILTIN

from tests.front.yard import death, info

WHO = Who(pid=1, uid=0, gid=0, role="admin", user="root")
IN_CHARGE = {"admission": "vllm", "preemption": "vllm", "prefill": "vllm"}


def changed(kind: str, name: str, version: str = "1.0") -> dict[str, Any]:
    """What the engine answers when it has put this one in charge beside vllm's."""
    current = {**IN_CHARGE, kind: name}
    versions = {**dict.fromkeys(IN_CHARGE, "0.1"), kind: version}
    return {"generation": 1, "current": current, "previous": IN_CHARGE, "step": 5, "versions": versions}


@pytest.mark.parametrize(
    ("live", "restart", "keys", "wanted", "said"),
    [
        ([], [], "", 16, "in force now: nothing new"),
        ([], ["block_size"], "", 16, "in force now: nothing new; needs a restart: block_size"),
        (["max_waiting"], ["block_size"], "", 16, "in force now: max_waiting; needs a restart: block_size"),
        ([], ["block_size"], "api keys: 1 added", 16, "in force now: api keys: 1 added; needs a restart: block_size"),
        (["max_running"], [], "", 64, "max_running is 16 now (64 needs a restart)"),
        ([], [], "", 64, "max_running is 16 now (64 needs a restart)"),
        (
            ["max_running", "max_waiting"],
            ["block_size"],
            "",
            64,
            "in force now: max_waiting; max_running is 16 now (64 needs a restart); needs a restart: block_size",
        ),
    ],
)
def test_a_reload_says_what_is_in_force(
    live: list[str], restart: list[str], keys: str, wanted: int, said: str
) -> None:
    assert reload_words(Difference(live, restart), keys, 16, wanted) == said


def test_places_that_the_engine_has_are_in_force_like_any_other_live_setting() -> None:
    assert reload_words(Difference(["max_running"], []), "", 8, 8) == "in force now: max_running"


@pytest.mark.parametrize(("start", "wanted", "places"), [(16, 64, 16), (16, 4, 4), (16, 16, 16)])
def test_the_running_daemons_settings_are_those_in_force(start: int, wanted: int, places: int) -> None:
    begun = Settings(max_running=start, block_size=16, max_waiting=5)
    new = Settings(max_running=wanted, block_size=32, max_waiting=7)
    rows = {row["name"]: row for row in rows_in_force(new, begun)}
    assert (rows["max_running"]["value"], rows["max_running"].get("after_restart")) == (
        places,
        wanted if wanted > places else None,
    )
    assert (rows["block_size"]["value"], rows["block_size"]["after_restart"]) == (16, 32)
    assert rows["max_waiting"]["value"] == 7
    later = {name for name, row in rows.items() if "after_restart" in row}
    assert later == {"block_size", *(["max_running"] if wanted > places else [])}
    assert set(rows) == set(Settings.model_fields)


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One without an engine whose every control call succeeds."""

    async def answer(
        self: PolicyDesk, method: str, params: object, taken: Taken = lambda answer, late: None, loads: object = ()
    ) -> dict[str, Any]:
        taken({}, False)
        return {}

    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(PolicyDesk, "ask", answer)
    return Daemon(Settings(), Served("m", "m.gguf", "llama"), "http://x", KeyRing(None))


async def reloaded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:  # noqa: ANN401
    """What a reload of the settings at the start with these changes says."""
    monkeypatch.setattr("kvyard.front.daemon.configure", lambda level, form: None)
    told = asyncio.Event()
    daemon.log.written = lambda event: told.set()
    daemon.reload(lambda: Settings(**changes))
    await told.wait()
    return str(daemon.log.last(1)[0].data["message"])


async def test_what_waits_for_a_restart_is_told_until_it_does_not(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = "needs a restart: block_size"
    assert await reloaded(daemon, monkeypatch, block_size=32) == f"in force now: nothing new; {pending}"
    assert await reloaded(daemon, monkeypatch, block_size=32) == f"in force now: nothing new; {pending}"
    assert (
        await reloaded(daemon, monkeypatch, block_size=32, max_waiting=7) == f"in force now: max_waiting; {pending}"
    )
    assert await reloaded(daemon, monkeypatch, max_waiting=7) == "in force now: nothing new"


async def test_a_drain_that_does_not_stop_is_ended_by_resume(daemon: Daemon) -> None:
    answer = await daemon.drain(False, WHO)
    assert answer["hint"] == "`kvyard resume` takes requests again"
    assert daemon.serving.draining
    await daemon.resume(WHO)
    assert not daemon.serving.draining
    assert [event.data["message"] for event in daemon.log.last(2)] == [
        "requests are taken again",
        "scheduling goes on",
    ]


async def test_a_drain_that_stops_is_not(daemon: Daemon) -> None:
    assert "hint" not in await daemon.drain(True, WHO)
    assert "hint" not in await daemon.drain(False, WHO), "it still stops"
    await daemon.resume(WHO)
    assert daemon.serving.draining


@pytest.fixture
async def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One whose engine is the test, and which waits for its answers for a moment only."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(policy_desk, "CHANGE_TIMEOUT_S", 0.01)
    daemon = Daemon(Settings(), Served("m", "m.gguf", "llama"), "http://x", KeyRing(None))
    daemon.engine_ready(info(policies=IN_CHARGE))
    return daemon


def last_call(daemon: Daemon) -> int:
    """The ticket of what the engine was asked last."""
    return max(daemon.serving._calls)


async def test_a_late_change_is_what_the_daemon_tells(serving: Daemon) -> None:
    with pytest.raises(OperationError, match="did not answer swap"):
        await serving.policy_swap("admission", "aging", {}, WHO)
    serving.engine_message(Reply(last_call(serving), changed("admission", "aging")))
    status = await serving.status()
    assert {row.kind: row.name for row in status.policies} == {**IN_CHARGE, "admission": "aging"}
    assert (status.discipline, status.generation) == (None, 1)
    assert serving._start_message().policies == {"admission": ("aging", {})}, "the next engine has it, too"
    row = {"kind": "admission", "name": "aging", "params": [{"name": "rate", "value": 2.0}], "installed": "1"}
    serving.engine_message(Reply(last_call(serving), {"policies": [row]}))
    assert (await serving.status()).policies[0].params == {"rate": 2.0}, "asked for without a call"


async def test_scheduling_that_stops_late_is_told(serving: Daemon) -> None:
    with pytest.raises(OperationError, match="did not answer pause"):
        await serving.pause(WHO)
    assert not serving.serving.paused
    serving.engine_message(Reply(last_call(serving), {"paused": True}))
    assert serving.serving.paused and (await serving.status()).paused
    assert serving.log.last(1)[0].data["message"].startswith("scheduling stopped; it took longer")


async def test_what_ends_the_daemon_at_its_start_is_said_once(daemon: Daemon) -> None:
    refused = Refused("unknown", "no such discipline", "choose another")
    daemon.engine_refused(refused)
    with pytest.raises(EngineRefused, match="no such discipline"):
        await daemon.first_ready
    assert daemon.log.last(9) == [], "the command says it"
    daemon.engine_refused(refused)
    assert daemon.log.last(9)[0].data["message"] == "the engine cannot start: no such discipline"


def swapped(daemon: Daemon, answered: bool) -> list[Reply]:
    """An engine that serves is asked for admission/x, and has perhaps answered; what the asker hears."""
    daemon.engine_ready(info(policies=IN_CHARGE))
    heard: list[Reply] = []
    daemon.serving.control("swap", {"kind": "admission", "name": "x"}, heard.append)
    if answered:
        ticket = max(daemon.serving._calls)
        daemon.engine_message(Reply(ticket, changed("admission", "x")))
    return heard


@pytest.mark.parametrize("phase", [EnginePhase.CANDIDATE, EnginePhase.POLICY])
async def test_who_dies_before_it_is_in_charge_changes_nothing(daemon: Daemon, phase: EnginePhase) -> None:
    heard = swapped(daemon, answered=False)
    daemon.engine_lost(death((), phase=phase))
    assert [reply.code for reply in heard] == ["crashed"]
    assert str(heard[0].error).startswith("admission/x took the engine down")
    assert (daemon.desk.in_charge.discipline, daemon.desk.in_charge.policies) == ("kvyard", {})
    assert daemon.desk.blocked_names() == ["admission/x"]
    words = [event.data["message"] for event in daemon.log.last(9) if event.data["kind"] == "ejected"]
    assert len(words) == 1 and words[0].endswith("; nothing changed")


async def test_who_dies_right_after_it_took_charge_is_put_out(daemon: Daemon) -> None:
    heard = swapped(daemon, answered=True)
    assert [reply.error for reply in heard] == [None]
    daemon.engine_lost(death((), phase=EnginePhase.POLICY))
    assert daemon.desk.in_charge.policies == {"admission": (BUILTIN, {})}
    words = [event.data["message"] for event in daemon.log.last(9) if event.data["kind"] == "ejected"]
    assert len(words) == 1 and words[0].endswith("; the built-in took over")


async def upgrading(serving: Daemon, monkeypatch: pytest.MonkeyPatch, kind: str) -> asyncio.Task[SwapResult]:
    """admission/x 1.0 is in charge, 2.0 is installed, and the engine is asked for it, or for its discipline."""
    vetted = frozenset({f"{kind}/x", "admission/x"})

    async def vet(kind: str, name: str) -> frozenset[str]:
        return vetted

    monkeypatch.setattr(policy_desk, "vet", vet)
    monkeypatch.setattr(policy_desk, "CHANGE_TIMEOUT_S", 30.0)
    serving.desk._installed = lambda label: "2.0"
    serving.desk.in_charge.policies["admission"] = ("x", {})
    row = {"kind": "admission", "name": "x", "params": [], "installed": "1.0"}
    serving.engine_message(Reply(last_call(serving), {"policies": [row]}))
    asked = asyncio.Event()
    send = serving.serving._send

    def sent(message: ToEngine) -> None:
        send(message)
        asked.set()

    serving.serving._send = sent
    change = asyncio.create_task(serving.policy_swap(kind, "x", {}, WHO))
    await asked.wait()
    return change


@pytest.mark.parametrize("kind", ["admission", "discipline"])
async def test_a_new_version_that_dies_while_it_takes_over_is_the_one_at_fault(
    serving: Daemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    change = await upgrading(serving, monkeypatch, kind)
    serving.engine_lost(death((), phase=EnginePhase.POLICY))
    with pytest.raises(OperationError, match="admission/x took the engine down") as refusal:
        await change
    assert refusal.value.code == "crashed"
    assert [(e.policy, e.version) for e in serving.desk.quarantine.active()] == [("admission/x", "2.0")]
    assert serving.desk.in_charge.policies == {"admission": (BUILTIN, {})}, "1.0 is nowhere to be found"
    words = [event.data["message"] for event in serving.log.last(9) if event.data["kind"] == "ejected"]
    assert len(words) == 1
    assert words[0].startswith("admission/x was not put in charge") and words[0].endswith("the built-in took over")


async def test_a_new_version_that_dies_after_it_took_charge_is_known_as_itself(
    serving: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = await upgrading(serving, monkeypatch, "admission")
    serving.engine_message(Reply(last_call(serving), changed("admission", "x", "2.0")))
    serving.engine_lost(death((), phase=EnginePhase.POLICY))
    assert (await change).ok
    assert [(e.policy, e.version) for e in serving.desk.quarantine.active()] == [("admission/x", "2.0")]
    words = [event.data["message"] for event in serving.log.last(9) if event.data["kind"] == "ejected"]
    assert len(words) == 1 and words[0].startswith("admission/x was put out")


async def test_a_refused_new_version_has_no_part_in_what_the_old_one_does(
    serving: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = await upgrading(serving, monkeypatch, "admission")
    serving.engine_message(Reply(last_call(serving), error="it cannot be imported", code="import"))
    with pytest.raises(OperationError, match="cannot be imported"):
        await change
    serving.engine_lost(death((), phase=EnginePhase.POLICY))
    assert [(e.policy, e.version) for e in serving.desk.quarantine.active()] == [("admission/x", "1.0")]


async def test_a_policy_that_dies_before_the_engine_serves_is_no_candidate(daemon: Daemon) -> None:
    daemon.engine_lost(replace(death((), phase=EnginePhase.CANDIDATE), ready=False))
    assert daemon.desk.in_charge.policies == {"admission": (BUILTIN, {})}


async def test_a_forced_stop_is_no_drain(daemon: Daemon) -> None:
    daemon.forced()
    await daemon.drained(1.0)
    assert [event.data["message"] for event in daemon.log.last(9)][-1] != "drained"
    assert any("stopped at once: 0 sequences" in event.data["message"] for event in daemon.log.last(9))
