"""The step records of a live daemon, kept as they come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, wait_until


class Records:
    """Every step record since it was opened, in order."""

    def __init__(self, client: Client) -> None:
        self.steps: list[dict[str, Any]] = []
        self._client = client
        self._first = 0

    def take(self, record: dict[str, Any]) -> None:
        """One more, unless it is of a step that was over when those before were forgotten."""
        if record["step"] >= self._first:
            self.steps.append(record)

    def clear(self) -> None:
        """Forget those of all steps so far; records come behind the answers, so some may still be on their way."""
        self._first = self._client.call("dump")["engine"]["step"]
        self.steps.clear()

    def admissions(self) -> list[int]:
        """Ids in the order in which they came in."""
        return [pair[0] for record in list(self.steps) for pair in record["admitted"]]

    def wait_for(self, sequences: Iterable[int]) -> None:
        """Records come behind the answers: until the end of each of these is recorded."""
        wanted = set(sequences)
        wait_until(
            lambda: wanted <= {pair[0] for r in list(self.steps) for pair in r["finished"]}, 30, "their records"
        )

    def admitted_in(self, sequence: int) -> int:
        """Place in `steps` of the record in which a sequence came in first."""
        return next(i for i, record in enumerate(self.steps) if sequence in dict(record["admitted"]))


@contextlib.contextmanager
def recording(running: DaemonProcess) -> Iterator[Records]:
    """Listen to the steps until the block ends."""
    with Client(running.socket, timeout=60) as client, Client(running.socket) as listener:
        records = Records(client)

        def listen() -> None:
            with contextlib.suppress(ControlError, OSError):
                for event in listener.subscribe(["steps"]):
                    if "step" in event.data:
                        records.take(event.data)

        threading.Thread(target=listen, daemon=True).start()
        # A subscription counts from when it is answered: a step seen proves that it is.
        running.complete([5, 6, 7], max_tokens=1, ignore_eos=True)
        for _ in range(50):
            if records.steps:
                break
            running.complete([5, 6, 7], max_tokens=1, ignore_eos=True)
        wait_until(lambda: records.steps, 5, "a step record")
        yield records
