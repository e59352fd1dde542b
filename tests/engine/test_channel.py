"""The engine's end of the link: descriptors arrive, nothing blocks, the front's end is noticed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
from kvyard.engine.channel import BACKLOG, Channel, FrontGone
from kvyard.link.codec import ToFront, decode_to_front, encode
from kvyard.link.frames import Inbox, Lane, Outbox
from kvyard.link.messages import Cancel, Control, Failed, Loading, Start, Stop


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    front, engine = socket.socketpair()
    yield Channel(engine), front
    front.close()
    engine.close()


def framed(*messages: Cancel | Control | Start | Stop) -> bytes:
    outbox = Outbox()
    for message in messages:
        outbox.put(encode(message))
    return bytes(outbox.peek())


def start() -> Start:
    return Start(
        protocol=1,
        model_path="m",
        device="cpu",
        dtype="auto",
        deterministic=False,
        kv_blocks=None,
        block_size=16,
        max_running=4,
        max_step_tokens=64,
        max_model_len=None,
        prefix_cache=False,
        swap_blocks=0,
        discipline="kvyard",
        policies={},
        quarantined=[],
        generation=0,
    )


def test_start_brings_descriptors_and_whatever_follows(pair: tuple[Channel, socket.socket]) -> None:
    channel, front = pair
    fd = os.memfd_create("test")
    os.write(fd, b"page")
    socket.send_fds(front, [framed(start(), Cancel([3]))], [fd])
    got, descriptors = channel.receive_start()
    assert got == start()
    assert os.pread(descriptors[0], 4, 0) == b"page"
    assert channel.receive() == [Cancel([3])]
    assert channel.receive() == []
    for each in (fd, *descriptors):
        os.close(each)


def test_the_fronts_end_is_noticed(pair: tuple[Channel, socket.socket]) -> None:
    channel, front = pair
    front.sendall(framed(start()))
    channel.receive_start()
    front.close()
    with pytest.raises(FrontGone):
        channel.receive()
    with pytest.raises(FrontGone):
        channel.send(Loading("x"))


def test_no_start_is_no_front(pair: tuple[Channel, socket.socket]) -> None:
    channel, front = pair
    front.sendall(framed(Stop()))
    with pytest.raises(FrontGone):
        channel.receive_start()


def test_a_front_that_does_not_read_blocks_nothing(pair: tuple[Channel, socket.socket]) -> None:
    channel, front = pair
    front.sendall(framed(start()))
    channel.receive_start()
    began = time.monotonic()
    for number in range(40):
        channel.send(Failed(number, "big", "x" * (512 << 10)))
    assert time.monotonic() - began < 5
    assert channel.backlogged
    inbox = Inbox()
    got: list[ToFront] = []
    while len(got) < 40:
        channel.flush()
        got += [decode_to_front(message) for message in inbox.feed(front.recv(1 << 20))]
    assert [message.id for message in got if isinstance(message, Failed)] == list(range(40))
    assert not channel.backlogged


def test_waiting_ends_with_a_message_or_in_time(pair: tuple[Channel, socket.socket]) -> None:
    channel, front = pair
    front.sendall(framed(start()))
    channel.receive_start()
    began = time.monotonic()
    channel.wait(0.05)
    assert 0.03 < time.monotonic() - began < 2
    front.sendall(framed(Cancel([1])))
    channel.wait(None)
    assert channel.receive() == [Cancel([1])]


def test_bulk_waits_for_tokens(pair: tuple[Channel, socket.socket]) -> None:
    channel, front = pair
    front.sendall(framed(start()))
    channel.receive_start()
    channel.send(Failed(1, "dump", "x" * (BACKLOG // 2)), Lane.BULK)
    channel.send(Failed(2, "token", "y"))
    inbox = Inbox()
    got: list[ToFront] = []
    while len(got) < 2:
        channel.flush()
        got += [decode_to_front(message) for message in inbox.feed(front.recv(1 << 20))]
    assert [message.id for message in got if isinstance(message, Failed)] == [2, 1]
