"""Frames: every message arrives whole, in order within its lane, whatever the stream is cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.link.frames import HEADER, MAX_MESSAGE, SLICE, FrameError, Inbox, Lane, Outbox

MESSAGES = st.lists(st.tuples(st.binary(max_size=200), st.sampled_from(list(Lane))), max_size=20)


def drain(outbox: Outbox, most: int) -> bytes:
    """All that the outbox wants to send, taken `most` bytes at a time."""
    sent = bytearray()
    while outbox:
        view = outbox.peek()
        piece = bytes(view[:most])
        sent += piece
        outbox.advance(len(piece))
    return bytes(sent)


@given(MESSAGES, st.integers(1, 64), st.integers(1, 64))
def test_messages_survive_any_cutting(messages: list[tuple[bytes, Lane]], send: int, receive: int) -> None:
    outbox, inbox = Outbox(), Inbox()
    # An empty message has no bytes to wait for: give every one a byte, as msgpack does.
    messages = [(b"\x01" + body, lane) for body, lane in messages]
    for body, lane in messages:
        outbox.put(body, lane)
    stream = drain(outbox, send)
    got = [m for at in range(0, len(stream), receive) for m in inbox.feed(stream[at : at + receive])]
    for lane in Lane:
        expected = [body for body, where in messages if where is lane]
        remaining = list(got)
        for body in expected:
            assert body in remaining
            remaining.remove(body)
    assert len(got) == len(messages)
    assert outbox.size == 0


def test_urgent_overtakes_a_bulk_message_between_its_slices() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.put(b"b" * (3 * SLICE), Lane.BULK)
    first = bytes(outbox.peek())
    outbox.advance(len(first))
    outbox.put(b"token")
    rest = drain(outbox, 1 << 20)
    assert inbox.feed(first) == []
    assert inbox.feed(rest) == [b"token", b"b" * (3 * SLICE)]


def test_size_counts_what_is_not_sent() -> None:
    outbox = Outbox()
    outbox.put(b"abc")
    assert outbox.size == 3
    outbox.advance(len(outbox.peek()))
    assert outbox.size == 0
    assert not outbox


def test_urgent_messages_go_out_in_one_piece_of_memory() -> None:
    outbox = Outbox()
    for body in (b"a", b"b", b"c"):
        outbox.put(body)
    assert len(outbox.peek()) == 3 * (HEADER.size + 1)


@pytest.mark.parametrize("header", [HEADER.pack(MAX_MESSAGE + 1, 0), HEADER.pack(1, 4)])
def test_a_stream_out_of_step_is_refused(header: bytes) -> None:
    with pytest.raises(FrameError, match="impossible frame header"):
        Inbox().feed(header)
