"""Watching a connection: who went away, who does not read, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio

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


class Connection:
    """A handle whose bytes are moved by hand."""

    def __init__(self) -> None:
        self.unsent = 0
        self.taken = 0
        self.lost = False
        self.aborted = False

    def allow_unsent(self, size: int) -> None:
        pass

    def abort(self) -> None:
        self.aborted = self.lost = True

    def close_after_response(self) -> None:
        pass


def part(more: bool = True) -> Message:
    return {"type": "http.response.body", "body": b"x", "more_body": more}


async def test_a_watched_send_knows_how_far_the_response_is() -> None:
    client = Client()
    send = WatchedSend(client.send, None, 10, lambda: None)
    assert (send.started, send.ended) == (False, False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    assert (send.started, send.ended) == (True, False)
    await send(part())
    assert not send.ended
    client.reads.clear()
    last = asyncio.create_task(send(part(more=False)))
    await asyncio.sleep(0.001)
    client.reads.set()
    await last
    assert send.ended


@pytest.mark.parametrize(("unsent", "cut"), [(0, 0), (10, 0), (11, 1)])
async def test_a_client_is_given_up_above_the_limit_and_not_at_it(unsent: int, cut: int) -> None:
    connection, cuts = Connection(), []
    connection.unsent = unsent
    send = WatchedSend(Client().send, connection, 10, lambda: cuts.append("cut"))
    await send(part())
    assert len(cuts) == cut


async def test_what_leaves_within_a_turn_of_the_loop_is_not_behind() -> None:
    connection, cuts = Connection(), []
    connection.unsent = 1000
    asyncio.get_running_loop().call_soon(setattr, connection, "unsent", 0)
    await WatchedSend(Client().send, connection, 10, lambda: cuts.append("cut"))(part())
    assert cuts == []


async def test_a_stalled_client_is_cut_once_and_others_are_not() -> None:
    cuts: list[str] = []
    guard = StallGuard(0.05, cuts.append)
    stuck, slow, idle = Connection(), Connection(), Connection()
    stuck.unsent = slow.unsent = 100
    for connection in (stuck, slow, idle):
        guard.enter(connection)
    async with asyncio.timeout(2):
        while not stuck.aborted:
            slow.taken += 1  # and ever more waits for it: it reads, only slowly
            slow.unsent += 10
            await asyncio.sleep(0.005)
    assert (cuts, idle.aborted) == (["stalled"], False)


async def test_what_a_served_request_left_unsent_stays_under_watch() -> None:
    cuts: list[str] = []
    guard, connection = StallGuard(0.05, cuts.append), Connection()
    connection.unsent = 100
    guard.enter(connection)
    guard.leave(connection)
    await asyncio.sleep(0.2)
    assert (cuts, connection.aborted) == (["stalled"], True)


@pytest.mark.parametrize("lost", [False, True])
async def test_no_timer_runs_while_nobody_is_watched(lost: bool) -> None:
    guard, connection = StallGuard(0.02), Connection()
    guard.enter(connection)
    assert guard.armed
    if lost:
        connection.lost = True
    else:
        guard.leave(connection)
    await asyncio.sleep(0.05)
    assert not guard.armed
    assert not connection.aborted
    guard.enter(connection)
    assert guard.armed


async def test_two_requests_of_one_connection_are_both_waited_for() -> None:
    guard, connection = StallGuard(0.02), Connection()
    guard.enter(connection)
    guard.enter(connection)
    guard.leave(connection)
    await asyncio.sleep(0.05)
    assert guard.armed
    guard.leave(connection)
    await asyncio.sleep(0.05)
    assert not guard.armed


async def test_a_server_without_handles_is_no_error() -> None:
    assert handle_of({"type": "http"}) is None
    assert handle_of({"type": "http", "extensions": {}}) is None
    handle = object()
    assert handle_of({"type": "http", "extensions": {EXTENSION: handle}}) is handle
