"""The event log and feeds to subscribers."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import kvyard.front.events
import msgspec
import pytest
from kvyard.front.events import FIELDS, KINDS, EventLog, Feed, Subscription


def test_events_are_numbered_and_carry_what_a_program_wants() -> None:
    log = EventLog(clock=lambda: 12.5)
    log.add("start", "the front started")
    event = log.add("swap", "aging is in charge", generation=4, who={"uid": 0})
    assert event.at == 12.5 and event.topic == "events"
    assert event.data == {
        "number": 2, "kind": "swap", "message": "aging is in charge", "generation": 4, "who": {"uid": 0},
    }  # fmt: skip
    assert msgspec.json.encode(event)


def test_an_unknown_kind_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no-such-kind"):
        EventLog().add("no-such-kind", "x")


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_can_be_logged(kind: str) -> None:
    assert EventLog().add(kind, "x").data["kind"] == kind


def test_the_log_is_bounded_and_numbers_go_on() -> None:
    log = EventLog(kept=10)
    for index in range(1000):
        log.add("error", str(index))
    assert [event.data["number"] for event in log.last(10_000)] == list(range(991, 1001))


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (-3, []), (2, ["1", "2"]), (100, ["0", "1", "2"])])
def test_the_last_ones_oldest_first(limit: int, expected: list[str]) -> None:
    log = EventLog()
    for index in range(3):
        log.add("error", str(index))
    assert [event.data["message"] for event in log.last(limit)] == expected


async def take(subscription: Subscription[int], number: int) -> list[int]:
    found: list[int] = []
    async for item in subscription:
        found.append(item)
        if len(found) == number:
            break
    return found


async def test_every_subscriber_gets_every_item_in_order() -> None:
    feed: Feed[int] = Feed()
    subscriptions = [feed.subscribe() for _ in range(3)]
    takers = [asyncio.create_task(take(subscription, 100)) for subscription in subscriptions]
    for item in range(100):
        feed.publish(item)
        if item % 7 == 0:
            await asyncio.sleep(0)
    assert await asyncio.gather(*takers) == [list(range(100))] * 3


async def test_a_slow_subscriber_loses_the_oldest_and_knows_how_many() -> None:
    feed: Feed[int] = Feed()
    slow = feed.subscribe(limit=5)
    for item in range(20):
        feed.publish(item)
    assert slow.dropped == 15
    assert await take(slow, 5) == [15, 16, 17, 18, 19]


async def test_a_closed_subscription_takes_nothing_more() -> None:
    feed: Feed[int] = Feed()
    subscription = feed.subscribe()
    assert len(feed) == 1
    subscription.close()
    subscription.close()
    assert len(feed) == 0
    feed.publish(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await take(subscription, 1)


async def test_an_item_that_comes_while_waiting_wakes_the_reader() -> None:
    feed: Feed[int] = Feed()
    taker = asyncio.create_task(take(feed.subscribe(), 2))
    await asyncio.sleep(0.01)
    feed.publish(1)
    await asyncio.sleep(0.01)
    feed.publish(2)
    assert await asyncio.wait_for(taker, 1) == [1, 2]


async def test_a_subscriber_may_leave_while_items_are_published() -> None:
    feed: Feed[int] = Feed()
    stays = asyncio.create_task(take(feed.subscribe(), 11))
    for _ in range(10):
        taker = asyncio.create_task(take(feed.subscribe(), 1000))
        feed.publish(1)
        await asyncio.sleep(0)
        taker.cancel()
    feed.publish(2)
    assert await asyncio.wait_for(stays, 1) == [1] * 10 + [2]


async def test_the_log_publishes_what_it_takes() -> None:
    log = EventLog()
    subscription = log.feed.subscribe()
    event = log.add("pause", "scheduling stopped")
    async for received in subscription:
        assert received is event
        break


def _logged() -> dict[str, set[str]]:
    """The fields of every `log.add` in the daemon's source, by kind."""
    found: dict[str, set[str]] = {}
    for path in Path(kvyard.front.events.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("log.add", "self._changed"))):
                continue
            kind = call.args[0]
            if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                found.setdefault(kind.value, set()).update(word.arg for word in call.keywords if word.arg)
    return found


def test_every_field_that_is_logged_is_documented_and_no_other() -> None:
    found = _logged()
    for kind in ("swap", "set"):  # told by one helper
        found[kind] |= {"who", "generation"}
    found["ejected"] |= {"snapshot", "dump", "decisions"}  # handed on as they are
    assert found == {kind: set(fields) for kind, fields in FIELDS.items()}
    assert FIELDS.keys() == KINDS.keys()
