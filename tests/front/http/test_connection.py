"""Watching a connection: who went away, who does not read, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from kvyard.front.http.connection import EXTENSION, StallGuard, WatchedSend, handle_of, while_connected
from starlette.types import Message


class Client:
    """The two ends of an ASGI connection, driven by hand."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.received: list[Message] = []

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.received.append(message)


async def none_left(before: set[asyncio.Task[object]]) -> None:
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_the_result_of_work_that_ends_first() -> None:
    before = asyncio.all_tasks()
    told: list[str] = []

    async def work() -> int:
        await asyncio.sleep(0.001)
        return 7

    assert await while_connected(Client().receive, work(), lambda: told.append("gone")) == 7
    assert told == []
    await none_left(before)


async def test_an_error_of_the_work_comes_through() -> None:
    before = asyncio.all_tasks()

    async def work() -> None:
        raise LookupError("as it is")

    with pytest.raises(LookupError, match="as it is"):
        await while_connected(Client().receive, work(), lambda: None)
    await none_left(before)


async def test_a_client_that_leaves_is_told_at_once_and_the_work_is_cancelled() -> None:
    before = asyncio.all_tasks()
    client, order = Client(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("work ended")

    asyncio.get_running_loop().call_later(0.01, client.left.set)
    await while_connected(client.receive, work(), lambda: order.append("gone"))
    assert order == ["gone", "work ended"]
    await none_left(before)


async def test_work_that_is_done_when_the_client_leaves_counts() -> None:
    client = Client()
    client.left.set()

    async def work() -> str:
        return "done"

    assert await while_connected(client.receive, work(), lambda: None) in ("done", None)


async def test_cancelling_from_outside_ends_both() -> None:
    before = asyncio.all_tasks()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(while_connected(Client().receive, work(), lambda: None))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    await none_left(before)


async def test_a_watched_send_knows_how_far_the_response_is() -> None:
    client = Client()
    send = WatchedSend(client.send, lambda: None)
    assert (send.started, send.ended, send.waiting_since) == (False, False, None)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    assert (send.started, send.ended) == (True, False)
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    assert not send.ended
    client.reads.clear()
    last = asyncio.create_task(send({"type": "http.response.body", "body": b"b"}))
    await asyncio.sleep(0.001)
    assert send.waiting_since is not None
    client.reads.set()
    await last
    assert send.ended
    assert send.waiting_since is None


def blocked(cut: Callable[[], None]) -> tuple[WatchedSend, asyncio.Task[None]]:
    client = Client()
    client.reads.clear()
    send = WatchedSend(client.send, cut)
    return send, asyncio.create_task(send({"type": "http.response.body", "body": b"x", "more_body": True}))


async def test_a_stalled_send_is_cut_once_and_others_are_not() -> None:
    guard, cuts = StallGuard(0.05), []
    stuck, task = blocked(lambda: cuts.append("stuck"))
    fine = WatchedSend(Client().send, lambda: cuts.append("fine"))
    guard.watch(stuck)
    guard.watch(fine)
    async with asyncio.timeout(2):
        while not cuts:
            await fine({"type": "http.response.body", "body": b"y", "more_body": True})
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert cuts == ["stuck"]
    task.cancel()


async def test_a_forgotten_send_is_not_cut() -> None:
    guard, cuts = StallGuard(0.02), []
    send, task = blocked(lambda: cuts.append("cut"))
    guard.watch(send)
    guard.forget(send)
    await asyncio.sleep(0.1)
    assert cuts == []
    task.cancel()


async def test_no_timer_runs_while_nobody_is_watched() -> None:
    guard = StallGuard(0.02)
    send = WatchedSend(Client().send, lambda: None)
    guard.watch(send)
    assert guard.armed
    guard.forget(send)
    await asyncio.sleep(0.05)
    assert not guard.armed
    guard.watch(send)
    assert guard.armed


async def test_a_server_without_handles_is_no_error() -> None:
    assert handle_of({"type": "http"}) is None
    assert handle_of({"type": "http", "extensions": {}}) is None
    handle = object()
    assert handle_of({"type": "http", "extensions": {EXTENSION: handle}}) is handle
