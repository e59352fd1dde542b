"""A generation's deltas: merged for a slow reader, whole, in order, finished once."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.generation import LiveGeneration
from kvyard.front.service import Delta, FinishReason


class Ends:
    """A `Canceller` that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def end(self, sequence_id: int, reason: FinishReason) -> None:
        self.seen.append((sequence_id, reason))


async def read(generation: LiveGeneration) -> list[Delta]:
    return [delta async for delta in generation]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 999)), max_size=40))
def test_every_token_arrives_once_in_order_of_its_continuation(pushes: list[tuple[int, int]]) -> None:
    generation = LiveGeneration(Ends(), [10, 11, 12])
    for index, token in pushes:
        generation.push(index, token, hash_=token)
    for index in range(3):
        generation.finish(index, "length")
    deltas = asyncio.run(read(generation))
    for index in range(3):
        mine = [delta for delta in deltas if delta.index == index]
        expected = [token for at, token in pushes if at == index]
        assert [token for delta in mine for token in delta.tokens] == expected
        assert [digest for delta in mine for digest in delta.hashes] == expected
        assert [delta.finish for delta in mine if delta.finish] == ["length"]


def test_a_slow_reader_gets_one_delta_however_many_tokens() -> None:
    generation = LiveGeneration(Ends(), [10])
    for token in range(1000):
        generation.push(0, token)
    generation.finish(0, "stop")
    (delta,) = asyncio.run(read(generation))
    assert len(delta.tokens) == 1000
    assert delta.finish == "stop"


def test_an_error_comes_after_the_tokens_before_it() -> None:
    generation = LiveGeneration(Ends(), [10])
    generation.push(0, 1)
    generation.finish(0, "error", ("engine_killed", "it did"))
    generation.finish(0, "length")
    (delta,) = asyncio.run(read(generation))
    assert (delta.tokens, delta.finish, delta.error) == ([1], "error", ("engine_killed", "it did"))


def test_cancelling_ends_what_is_open_alone() -> None:
    ends = Ends()
    generation = LiveGeneration(ends, [10, 11, 12])
    generation.finish(1, "length")
    generation.cancel()
    assert ends.seen == [(10, "cancelled"), (12, "cancelled")]
    generation.cancel()
    assert len(ends.seen) == 2


async def test_cancelling_wakes_the_reader() -> None:
    generation = LiveGeneration(Ends(), [10])
    reader = asyncio.ensure_future(read(generation))
    await asyncio.sleep(0.01)
    generation.cancel()
    assert await asyncio.wait_for(reader, 1) == []


async def test_stopping_while_reading_drops_what_was_not_read() -> None:
    ends = Ends()
    generation = LiveGeneration(ends, [10])
    generation.push(0, 1)
    seen = []
    async for delta in generation:
        seen += delta.tokens
        generation.push(0, 2)
        generation.stop(0)
    assert seen == [1]
    assert ends.seen == [(10, "stop")]
