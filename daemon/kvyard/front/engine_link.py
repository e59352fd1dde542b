"""The front's end of the link: frames over a non-blocking socket on the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvyard.link.codec import LinkError, ToEngine, ToFront, decode_to_front, encode
from kvyard.link.frames import FrameError, Inbox, Outbox
from kvyard.link.messages import Start

READ = 256 << 10


class EngineLink:
    """Sends to and receives from one engine process; `closed` is called once, with the reason."""

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[ToFront], None],
        closed: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._received = received
        self._closed = closed
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._writing = False
        self._open = True
        self._loop = asyncio.get_running_loop()

    def open(self, start: Start, descriptors: list[int]) -> None:
        """Send the first frame, with the descriptors that travel with it, and listen."""
        self._outbox.put(encode(start))
        frame = bytes(self._outbox.peek())
        sent = socket.send_fds(self._sock, [frame], descriptors)
        self._outbox.advance(sent)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._flush()

    def send(self, message: ToEngine) -> None:
        """Queue a message; silently dropped when the engine is gone (the journal has what matters)."""
        if self._open:
            self._outbox.put(encode(message))
            self._flush()

    def close(self, reason: str = "closed by the front") -> None:
        """Close the link; the engine reads end-of-file and leaves."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._closed(reason)

    def drain(self) -> None:
        """Read what a dead engine still had sent: the tokens of its last steps count."""
        if self._open:
            self._readable(rounds=1 << 16)

    def _readable(self, rounds: int = 4) -> None:
        # A few reads per wake-up, so that a flood of records cannot keep the loop from its clients.
        for _ in range(rounds):
            try:
                data = self._sock.recv(READ)
            except BlockingIOError:
                break
            except OSError as error:
                self.close(str(error))
                break
            if not self._accept(data):
                break

    def _accept(self, data: bytes) -> bool:
        """Hand on what arrived; False when the link is closed."""
        if not data:
            self.close("end of file")
            return False
        try:
            for message in self._inbox.feed(data):
                self._received(decode_to_front(message))
        except (FrameError, LinkError) as error:
            self.close(str(error))
        return self._open

    def _flush(self) -> None:
        try:
            while self._outbox:
                self._outbox.advance(self._sock.send(self._outbox.peek()))
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError:
            # The reader sees the end and tells it once; a writer must not.
            self._outbox = Outbox()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())
