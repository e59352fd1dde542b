"""Framing of the link, without I/O: length-prefixed frames on two lanes of one stream.

A frame is a 5-byte header (`<IB`: body length, flags) and a body. Messages on the urgent lane (tokens,
replies, commands) are one frame each. Messages on the bulk lane (dumps, long lists) are cut into slices
that are sent only while nothing urgent waits, so that a token never waits behind a large message.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum

HEADER = struct.Struct("<IB")
SLICE = 32 << 10
"""Body bytes of a bulk slice: about 10 us of a local socket's time."""
MAX_MESSAGE = 256 << 20
"""Longest message that is believed; a longer length means that the stream is out of step."""

Body = bytes | bytearray | memoryview
"""A message as bytes. Cut from a memoryview it is a part of that, good until the memory is written to again."""

_MORE = 1
_BULK = 2


class Lane(Enum):
    """Which messages overtake which."""

    URGENT = 0
    BULK = 1


class FrameError(Exception):
    """The byte stream is not a sequence of frames."""


class Outbox:
    """Messages waiting to be sent, as bytes in sending order."""

    def __init__(self) -> None:
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[bytes] = deque()
        self._offset = 0
        self._current = memoryview(b"")
        self.size = 0
        """Bytes not sent yet, headers of frames not yet built left out."""

    def __bool__(self) -> bool:
        return self.size > 0

    def put(self, message: bytes, lane: Lane = Lane.URGENT) -> None:
        """Queue a message."""
        self.size += len(message)
        (self._urgent if lane is Lane.URGENT else self._bulk).append(message)

    def peek(self) -> memoryview:
        """The bytes to send next; empty when there is nothing."""
        if not self._current and self.size:
            self._current = memoryview(self._next())
        return self._current

    def advance(self, count: int) -> None:
        """`count` bytes of what `peek` showed were sent."""
        self.size -= count
        self._current = self._current[count:]

    def _next(self) -> bytes:
        if self._urgent:
            frames = [part for body in self._urgent for part in (HEADER.pack(len(body), 0), body)]
            self.size += HEADER.size * len(self._urgent)
            self._urgent.clear()
            return b"".join(frames)
        self.size += HEADER.size
        body = self._bulk[0]
        piece = body[self._offset : self._offset + SLICE]
        self._offset += len(piece)
        more = self._offset < len(body)
        if not more:
            self._bulk.popleft()
            self._offset = 0
        return HEADER.pack(len(piece), _BULK | (_MORE if more else 0)) + piece


class Inbox:
    """Turns received bytes into whole messages, in order within each lane."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._slices = bytearray()

    def feed(self, data: Body) -> list[Body]:
        """Messages that `data` completes. Raises FrameError."""
        # Mostly nothing is left over, and then the frames are cut from what came without a copy of the whole.
        source = data
        if self._buffer:
            self._buffer += data
            source = self._buffer
        messages: list[Body] = []
        at, size, header, unpack = 0, len(source), HEADER.size, HEADER.unpack_from
        while size - at >= header:
            length, flags = unpack(source, at)
            if length > MAX_MESSAGE or flags > _MORE | _BULK:
                raise FrameError(f"impossible frame header: {length} bytes, flags {flags}")
            end = at + header + length
            if end > size:
                break
            body = source[at + header : end]
            message = self._accept(body, flags) if flags else body
            if message is not None:
                messages.append(message)
            at = end
        if source is self._buffer:
            del self._buffer[:at]
        elif at < size:
            self._buffer += memoryview(source)[at:]
        return messages

    def _accept(self, body: Body, flags: int) -> Body | None:
        if not flags & _BULK:
            return body
        self._slices += body
        if len(self._slices) > MAX_MESSAGE:
            raise FrameError(f"a sliced message exceeds {MAX_MESSAGE} bytes")
        if flags & _MORE:
            return None
        whole = bytes(self._slices)
        self._slices.clear()
        return whole
