"""The engine's end of the link: never blocks a step, sleeps when there is nothing to do."""

from __future__ import annotations

import select
import socket

from kvyard.link.codec import ToEngine, ToFront, decode_to_engine, encode
from kvyard.link.frames import Body, Inbox, Lane, Outbox
from kvyard.link.messages import Start

READ = 256 << 10
BACKLOG = 8 << 20
"""Bytes not taken by the front from which on the engine stops scheduling rather than pile up more."""


class FrontGone(Exception):
    """The front closed the link or died; there is nobody to work for."""


class Channel:
    """Messages over a non-blocking socket; everything the front sends is read between steps."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = Inbox()
        # One buffer for all: a new one of this size in every step costs page faults.
        self._received = memoryview(bytearray(READ))
        self._outbox = Outbox()
        self._early: list[ToEngine] = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._arrived = select.poll()
        self._arrived.register(sock, select.POLLIN)
        self.stalls = 0
        """Times that scheduling had to stop because the front did not read."""

    def receive_start(self) -> tuple[Start, list[int]]:
        """The first message and the descriptors that came with it. Blocks. Raises FrontGone."""
        descriptors: list[int] = []
        messages: list[Body] = []
        while not messages:
            data, more, _, _ = socket.recv_fds(self._sock, READ, 4)
            descriptors += more
            if not data:
                raise FrontGone
            messages = self._inbox.feed(data)
        self._sock.setblocking(False)
        first, *rest = [decode_to_engine(message) for message in messages]
        if not isinstance(first, Start):
            raise FrontGone
        self._early = rest
        return first, descriptors

    def send(self, message: ToFront, lane: Lane = Lane.URGENT) -> None:
        """Queue a message and send what the socket takes now. Raises FrontGone."""
        self._outbox.put(encode(message), lane)
        self.flush()

    def post(self, message: ToFront) -> None:
        """Queue a message that goes out with the next `send`: one system call for both."""
        self._outbox.put(encode(message))

    def flush(self) -> None:
        """Send what the socket takes now. Raises FrontGone."""
        try:
            while self._outbox:
                self._outbox.advance(self._sock.send(self._outbox.peek()))
        except BlockingIOError:
            return
        except OSError as error:
            raise FrontGone from error

    def finish(self, seconds: float) -> None:
        """Send the last words, blocking for at most so long."""
        self._sock.settimeout(seconds)
        self.flush()

    @property
    def backlogged(self) -> bool:
        """The front does not keep up."""
        return self._outbox.size > BACKLOG

    def receive(self) -> list[ToEngine]:
        """All messages that are there. Raises FrontGone at end-of-file."""
        messages, self._early = self._early, []
        # In most steps nothing has come: to ask costs 1 us, the exception of a read in vain 9.
        if not self._arrived.poll(0):
            return messages
        while True:
            try:
                count = self._sock.recv_into(self._received)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise FrontGone from error
            if not count:
                raise FrontGone
            messages += [decode_to_engine(message) for message in self._inbox.feed(self._received[:count])]
            if count < READ:  # there was no more; what comes now is for the next step
                return messages

    def wait(self, seconds: float | None) -> None:
        """Sleep until the front says something, the outbox can go on, or the time is up."""
        events = select.POLLIN | (select.POLLOUT if self._outbox else 0)
        self._poll.modify(self._sock, events)
        self._poll.poll(None if seconds is None else seconds * 1000)
        if self._outbox:
            self.flush()
