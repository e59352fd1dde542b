"""The supervisor over real processes: starts, deaths, hangs and refusals, and what is told of each."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from kvyard.front.engine_child import EngineDeath, engine_environment, oom_kills
from kvyard.front.engine_states import EngineState
from kvyard.front.supervisor import Patience, Supervisor
from kvyard.link.codec import ToFront
from kvyard.link.messages import Control, EngineInfo, Goodbye, Refused, Reply, Start
from kvyard.link.progress import EnginePhase, Progress

MODULE = "tests.front.tiny_engine"
PATIENCE = Patience(policy=0.4, candidate=0.4, step=0.8, loading=20, leaving=0.5)


def start(what: str) -> Start:
    return Start(
        protocol=1,
        model_path=what,
        device="cpu",
        dtype="float32",
        deterministic=False,
        kv_blocks=8,
        block_size=16,
        max_running=2,
        max_step_tokens=8,
        max_model_len=64,
        prefix_cache=False,
        swap_blocks=0,
        discipline="kvyard",
        policies={},
        quarantined=[],
        generation=0,
    )


class Told:
    """An `EngineHandler` that remembers."""

    def __init__(self) -> None:
        self.messages: list[ToFront] = []
        self.ready: list[EngineInfo] = []
        self.deaths: list[EngineDeath] = []
        self.refusals: list[Refused] = []

    def engine_message(self, message: ToFront) -> None:
        self.messages.append(message)

    def engine_ready(self, info: EngineInfo) -> None:
        self.ready.append(info)

    def engine_lost(self, death: EngineDeath) -> None:
        self.deaths.append(death)

    def engine_refused(self, refused: Refused) -> None:
        self.refusals.append(refused)


@asynccontextmanager
async def supervised(what: str = "serve", patience: Patience = PATIENCE) -> AsyncIterator[tuple[Supervisor, Told]]:
    told = Told()
    supervisor = Supervisor(lambda: start(what), told, patience=patience, module=MODULE)
    supervisor.spawn()
    try:
        yield supervisor, told
    finally:
        await supervisor.stop()


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


def ask(supervisor: Supervisor, method: str) -> None:
    supervisor.send(Control(1, method))


async def test_an_engine_that_dies_is_replaced_at_once() -> None:
    async with supervised() as (supervisor, told):
        await until(lambda: told.ready)
        first = told.ready[0].pid
        assert supervisor.state is EngineState.READY
        os.kill(first, signal.SIGKILL)
        await until(lambda: told.deaths)
        death = told.deaths[0]
        assert death.unexplained_kill
        assert death.words == "was killed by another process (SIGKILL)"
        await until(lambda: len(told.ready) == 2)
        assert told.ready[1].pid != first
        assert supervisor.restarts == 1


async def test_a_crash_is_told_with_the_step_and_the_last_words() -> None:
    async with supervised() as (supervisor, told):
        await until(lambda: told.ready)
        ask(supervisor, "exit")
        await until(lambda: told.deaths)
        death = told.deaths[0]
        assert (death.returncode, death.words) == (3, "exited with status 3")
        assert not death.unexplained_kill
        assert death.progress is not None
        assert death.progress.in_step
        assert death.progress.ids == (5, 6)
        assert [message.reason for message in told.messages if isinstance(message, Goodbye)] == ["last words"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("hang", "stayed in model for"),
        ("hang-in-policy", "policy admission/stuck did not return for"),
        ("hang-in-candidate", "policy admission/endless could not be loaded"),
    ],
)
async def test_a_hang_is_ended_and_its_stack_is_told(method: str, words: str) -> None:
    async with supervised() as (supervisor, told):
        await until(lambda: told.ready)
        ask(supervisor, method)
        await until(lambda: told.deaths)
        death = told.deaths[0]
        assert words in death.words
        assert not death.unexplained_kill
        assert "tiny_engine.py" in death.stack
        assert "in act" in death.stack
        await until(lambda: len(told.ready) == 2)


async def test_a_long_legal_step_is_no_hang() -> None:
    async with supervised(patience=Patience(policy=0.2, step=30)) as (supervisor, told):
        await until(lambda: told.ready)
        ask(supervisor, "hang")
        await asyncio.sleep(1.2)
        assert told.deaths == []
        assert supervisor.in_time()
        supervisor.kill("enough")
        await until(lambda: told.deaths)


async def test_a_refusal_is_told_and_not_tried_again() -> None:
    async with supervised("refuse") as (supervisor, told):
        await until(lambda: told.refusals)
        assert (told.refusals[0].message, told.refusals[0].hint) == ("no such model", "choose another")
        await asyncio.sleep(0.5)
        assert supervisor.restarts == 0
        assert supervisor.state is EngineState.REFUSED
    assert told.deaths == []


async def test_an_engine_that_never_comes_up_is_tried_ever_more_slowly() -> None:
    async with supervised("die-at-start") as (_, told):
        await until(lambda: len(told.deaths) == 3)
        began = time.monotonic()
        await until(lambda: len(told.deaths) == 4)
        assert time.monotonic() - began > 1.0
        assert not told.deaths[0].ready


async def test_an_engine_that_will_not_leave_is_made_to() -> None:
    async with supervised("deaf") as (supervisor, told):
        await until(lambda: told.ready)
        process = psutil.Process(told.ready[0].pid)
    assert supervisor.state is EngineState.DOWN
    assert not process.is_running()
    assert told.deaths == []


async def test_the_engine_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVYARD_API_KEYS", "hush")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("HARMLESS", "1")
    async with supervised() as (supervisor, told):
        await until(lambda: told.ready)
        ask(supervisor, "answer")
        await until(lambda: told.messages)
        (reply,) = told.messages
        assert isinstance(reply, Reply)
        names = reply.result["environment"]
        assert "HARMLESS" in names
        assert "KVYARD_API_KEYS" not in names
        assert "NOTIFY_SOCKET" not in names
        open_sockets = psutil.Process(told.ready[0].pid).net_connections("inet")
        assert open_sockets == []


def test_waiting_threads_do_not_spin_unless_told_to() -> None:
    assert engine_environment({})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert engine_environment({})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=127"
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        assert engine_environment({})[cache] == "128"
        assert engine_environment({cache: "1024"})[cache] == "1024"
    assert engine_environment({"PYTHONMALLOC": "debug"})["PYTHONMALLOC"] == "debug"
    assert engine_environment({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_kernels_count_can_be_read() -> None:
    assert oom_kills() >= 0


@pytest.mark.parametrize(
    ("computed_s", "age_s", "ended"),
    [(0.5, 9.0, False), (0.5, 13.9, False), (0.5, 14.1, True), (6.0, 6.9, False), (6.0, 7.1, True)],
)
def test_a_candidate_that_waits_is_left_to_the_guard(
    monkeypatch: pytest.MonkeyPatch, computed_s: float, age_s: float, ended: bool
) -> None:
    """The guard ends Python code after 5 s of CPU time or 10 s, and with it no request."""
    monkeypatch.setattr("kvyard.front.supervisor.cpu_seconds", lambda pid: computed_s)
    supervisor = Supervisor(lambda: start(""), Told())
    supervisor.pid = 5
    seen = Progress(5, EnginePhase.CANDIDATE, 0, 1, 0, "admission/slow", ())
    assert (supervisor._overdue(seen, int(age_s * 1e9)) is not None) == ended
