"""The screen on the real daemon: what it shows is true, and what it changes is changed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.quick_model import quick_model
from tests.tui.screen import allow_changes, line_with, text, until, until_text, watching

FLAGS = ("--dtype", "float32", "--kv-blocks", "24", "--max-running", "6", "--max-step-tokens", "64")


HELD_AT = 50
"""Tokens of a sequence in KV at which steps are held: more than a prompt of the load, fewer than its requests get."""


@pytest.fixture(scope="module")
def go_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it is not there, no step with a sequence that is so far ends."""
    path = tmp_path_factory.mktemp("held") / "go on"
    path.touch()
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, go_on: Path) -> Iterator[DaemonProcess]:
    """A daemon with little room, so that requests wait and are preempted, in steps that take their time."""
    held = {"point": "model", "action": "hold", "computed": HELD_AT, "until": str(go_on)}
    faults = json.dumps([{"point": "model", "action": "sleep", "seconds": 0.02}, held])
    model = quick_model(tmp_path_factory.mktemp("quick"))
    with daemon(*FLAGS, model=model, env={"KVYARD_TEST_FAULTS": faults}) as one:
        yield one


@pytest.fixture
def held(go_on: Path) -> Iterator[Callable[[], None]]:
    """The load stops half-way, however long somebody types, until this is called."""
    go_on.unlink()
    yield go_on.touch
    go_on.touch()


TOKENS = 60
"""Output tokens of each request of the load."""


async def load(running: DaemonProcess, count: int, tokens: int) -> list[httpx.Response]:
    """Requests at once, each with its own beginning."""
    async with httpx.AsyncClient(timeout=90) as client:

        def ask(number: int) -> asyncio.Task[httpx.Response]:
            body = {
                "model": "smollm2-135m", "prompt": f"Story {number}: once upon a time", "max_tokens": tokens,
                "ignore_eos": True,
            }  # fmt: skip
            headers = {"X-Request-Id": f"story-{number}"}
            return asyncio.create_task(client.post(running.base + "/v1/completions", json=body, headers=headers))

        return await asyncio.gather(*(ask(number) for number in range(count)))


async def test_a_swap_under_load_from_the_screen(running: DaemonProcess, held: Callable[[], None]) -> None:
    async with watching(running.socket, (120, 40)) as (app, pilot):
        await until_text(app, pilot, "● ready", 20)
        assert "24 blocks of 16" in text(app)
        clients = asyncio.create_task(load(running, 14, TOKENS))
        await until_text(app, pilot, "▶ running", 20)
        await until_text(app, pilot, "waiting (", 20)
        await allow_changes(app, pilot)
        before = app.yard.status.generation if app.yard.status is not None else -1
        await pilot.press("x")
        await until_text(app, pilot, "* discipline  kvyard")
        dialog = app.screen
        await pilot.press(*"discipline/vllm")
        await until_text(app, pilot, "kvyard -> vllm,")
        assert not clients.done()
        held()
        await pilot.press("enter", "enter", "right", "enter")
        await until_text(app, pilot, f"generation {before + 1}", 30)
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is not dialog)
        await until_text(app, pilot, f"vllm, generation {before + 1}")
        answers = await clients
        assert [answer.status_code for answer in answers] == [200] * 14
        assert all(answer.json()["usage"]["completion_tokens"] == TOKENS for answer in answers)
        await until_text(app, pilot, "0 of 6 running · 0 waiting", 20)
        assert int(line_with(app, "finished ").split()[1].replace(",", "")) >= 14
        assert running.status()["discipline"] == "vllm"


async def test_a_request_is_cancelled_from_the_screen(running: DaemonProcess, held: Callable[[], None]) -> None:
    async with watching(running.socket, (120, 40), readonly=False) as (app, pilot):
        await until_text(app, pilot, "● ready", 20)
        clients = asyncio.create_task(load(running, 2, 200))
        await until_text(app, pilot, "▶ running", 20)
        await pilot.press("down")
        await until(pilot, lambda: app.choice.selected is not None)
        await pilot.press("c")
        await until_text(app, pilot, "Cancel this request?")
        held()
        await pilot.press("right", "enter")
        await until_text(app, pilot, " cancelled")
        await until(pilot, lambda: app.choice.selected is None)
        answers = await clients
        assert sum(answer.status_code == 200 for answer in answers) == 1


async def test_pause_and_resume_from_the_screen(running: DaemonProcess) -> None:
    async with watching(running.socket, (120, 40), readonly=False) as (app, pilot):
        await until_text(app, pilot, "● ready", 20)
        await pilot.press("P")
        await until_text(app, pilot, "Pause scheduling?")
        await pilot.press("right", "enter")
        await until_text(app, pilot, "■ paused", 20)
        clients = asyncio.create_task(load(running, 1, 5))
        await until_text(app, pilot, "○ waiting", 20)
        await pilot.press("P")
        await until_text(app, pilot, "Resume scheduling?")
        await pilot.press("right", "enter")
        [answer] = await clients
        assert answer.status_code == 200
        await until_text(app, pilot, "● ready", 20)


async def test_an_engine_that_dies_is_seen_and_its_successor_too(running: DaemonProcess) -> None:
    async with watching(running.socket, (160, 40)) as (app, pilot):
        await until_text(app, pilot, "● ready", 20)
        engine = running.engine_pid
        clients = asyncio.create_task(load(running, 2, 40))
        await until_text(app, pilot, "▶ running", 20)
        os.kill(engine, signal.SIGKILL)
        await until_text(app, pilot, "restarts 1", 30)
        await until_text(app, pilot, "● ready", 60)
        answers = await clients
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "restart" in text(app)
