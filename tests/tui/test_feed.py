"""The feed keeps the yard up to date and comes back for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from kvyard_tui import feed as module
from kvyard_tui.feed import Feed, operate
from kvyard_tui.model import Yard

from tests.tui.screen import serving
from tests.tui.yard import Daemon, row


@contextlib.asynccontextmanager
async def fed(daemon: Daemon, interval: float = 0.1) -> AsyncIterator[Yard]:
    yard = Yard()
    task = asyncio.create_task(Feed(daemon.path, yard, lambda: None, interval).run())
    try:
        yield yard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(so: Callable[[], bool], limit_s: float = 8.0) -> None:
    for _ in range(int(limit_s / 0.02)):
        if so():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come about in time")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits."""
    monkeypatch.setattr(module, "BACK_OFF", (0.05, 0.1))
    monkeypatch.setattr(module, "POLL", 0.1)
    monkeypatch.setattr(module, "SILENCE", 0.6)


async def test_it_fills_the_yard(hurried: None) -> None:
    async with serving() as daemon, fed(daemon) as yard:
        await until(lambda: yard.requests is not None)
        assert yard.phase == "live" and yard.status is not None
        assert [event.data["kind"] for event in yard.events] == ["start"]
        await daemon.event("swap", "one")
        await until(lambda: len(yard.events) == 2)
        daemon.rows = [row(9)]
        await until(lambda: yard.row(9) is not None)


async def test_it_gives_its_rights_away_before_it_asks_anything(hurried: None) -> None:
    async with serving(role="admin") as daemon, fed(daemon) as yard:
        await until(lambda: yard.requests is not None)
        assert daemon.calls[0].method == "lower"
        assert {call.role for call in daemon.calls[1:]} == {"viewer"}
        assert yard.hello is not None and yard.hello.role == "admin"


async def test_a_viewer_has_nothing_to_give_away(hurried: None) -> None:
    async with serving(role="viewer") as daemon, fed(daemon) as yard:
        await until(lambda: yard.requests is not None)
        assert "lower" not in {call.method for call in daemon.calls}


async def test_it_comes_back_as_often_as_the_daemon_does(hurried: None) -> None:
    async with serving() as daemon, fed(daemon) as yard:
        for number in range(1, 6):
            await until(lambda: yard.phase == "live")
            await daemon.stop()
            await until(lambda: yard.phase == "lost")
            assert yard.problem and yard.retry_at is not None and yard.status is not None
            daemon.rows = [row(100 + number)]
            await daemon.start()
            await until(lambda number=number: yard.row(100 + number) is not None)  # type: ignore[misc]  # loop's value


async def test_it_leaves_no_connection_behind(hurried: None) -> None:
    async with serving() as daemon:
        async with fed(daemon) as yard:
            for _ in range(3):
                await until(lambda: yard.phase == "live")
                await daemon.stop()
                await until(lambda: yard.phase == "lost")
                await daemon.start()
            await until(lambda: yard.phase == "live")
            assert len(daemon.sessions) == 1
        await until(lambda: not daemon.sessions)


async def test_silence_counts_as_loss(hurried: None) -> None:
    async with serving() as daemon, fed(daemon) as yard:
        await until(lambda: yard.requests is not None)
        daemon.alter = lambda: (_ for _ in ()).throw(OSError)  # no status comes any more; calls are answered
        await until(lambda: yard.phase == "lost")
        assert "no status" in yard.problem


async def test_a_status_that_is_none_is_told(hurried: None) -> None:
    async with serving() as daemon, fed(daemon) as yard:
        await until(lambda: yard.phase == "live")
        daemon.status.version = 7  # type: ignore[assignment]  # what another version might send
        await until(lambda: "not understood" in yard.problem)
        daemon.status.version = "0.1.0"
        await until(lambda: yard.phase == "live")


async def test_operate_uses_the_full_role_and_goes() -> None:
    async with serving(role="operator") as daemon:
        await operate(daemon.path, "pause", object, {})
        assert daemon.status.paused
        assert daemon.calls[-1].role == "operator"
        await until(lambda: not daemon.sessions)
