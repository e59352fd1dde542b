"""One faulty policy at a time on a live daemon: swapped in, put out, and what everybody got meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import Result, Wish, run_all, wishes
from tests.e2e.test_equality import check_equal
from tests.e2e.timing import limit

FLAGS = (
    *("--deterministic", "--dtype", "float32", "--kv-blocks", "11"),
    *("--max-running", "8", "--max-step-tokens", "128"),
)
WANTED = wishes(28, seed=91, prompt=(8, 16), output=(3, 7))
"""Eight run and twenty wait when all have come; the pool is too small for the eight."""
HARD_S, WALL_S = 0.05, 0.5
"""The guard's limits: CPU time and wall time of one call."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A policy of `plugins/faulty` and what is to become of it."""

    name: str
    codes: tuple[str, ...]
    """Why it may be put out; empty when the core copes with it and nobody is put out."""
    kind: str = "admission"
    most_s: float = HARD_S
    """Most time that the step in which it is put out may spend on scheduling."""
    beside: str = ""
    """A preemption policy of the package that lets it do its harm."""

    @property
    def policy(self) -> str:
        """`kind/name`."""
        return f"{self.kind}/faulty-{self.name}"


@dataclass
class Yard:
    """A daemon with the faulty plugin, and everything it says of its steps."""

    running: DaemonProcess
    solo: list[Result]
    client: Client
    wanted: list[Wish] = field(default_factory=lambda: WANTED)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def swap(self, kind: str, name: str) -> dict[str, Any]:
        """Put a policy in charge."""
        result: dict[str, Any] = self.client.call("policy.swap", {"kind": kind, "name": name, "params": {}})
        return result

    def in_charge(self) -> dict[str, str]:
        """Kind to name."""
        return {row["kind"]: row["name"] for row in self.client.call("status")["policies"]}

    def ejections(self) -> list[dict[str, Any]]:
        """Exit records so far."""
        events = self.client.call("events", {"limit": 1000})
        return [event["data"] for event in events if event["data"].get("kind") == "ejected"]

    def load(self, during: Callable[[], None] = lambda: None) -> list[Result]:
        """Run all requests at once and check that each got the logits of its solo run.

        Scheduling begins when all of them wait, in the order of the wishes, so that every run meets the same
        eight and twenty. (In some other orders eight never run while twelve wait, and the fault never comes.)
        """

        async def sent(count: int) -> None:
            await asyncio.to_thread(wait_until, partial(self._waiting, count), 20, f"{count} requests to wait")
            if count == len(self.wanted):
                self.client.call("resume")
                await asyncio.to_thread(during)

        self.client.call("pause")
        got = asyncio.run(run_all(self.running.base, self.wanted, sent=sent))
        check_equal(got, self.solo, self.wanted)
        idle_again(self.running)
        return got

    def _waiting(self, count: int) -> bool:
        return int(self.client.call("requests", {"limit": 1})["total"]) >= count

    def restore(self) -> None:
        """The default discipline in charge, nobody in quarantine."""
        for entry in self.client.call("status")["quarantine"]:
            self.client.call("policy.release", {"policy": entry["policy"]})
        self.swap("discipline", "kvyard")


def try_fault(yard: Yard, fault: Fault) -> dict[str, Any] | None:
    """Swap it in, run the load, check everything; its exit record."""
    before, counted = len(yard.ejections()), ejected(yard, fault)
    try:
        if fault.beside:
            yard.swap("preemption", f"faulty-{fault.beside}")
        yard.swap(fault.kind, f"faulty-{fault.name}")
        yard.load()
        exits = yard.ejections()[before:]
        if not fault.codes:
            assert exits == [], "nobody was to be put out"
            assert yard.in_charge()[fault.kind] == f"faulty-{fault.name}"
            return None
        assert [(record["policy"], record["code"] in fault.codes) for record in exits] == [(fault.policy, True)], (
            exits
        )
        check_exit(yard, fault, exits[0])
        assert ejected(yard, fault) == counted + 1, "the counter goes up by one"
        told = [line for line in yard.running.log.splitlines() if "policy.ejected" in line and fault.policy in line]
        assert told, "and the log says so"
        return exits[0]
    finally:
        with contextlib.suppress(ControlError):
            yard.restore()


def ejected(yard: Yard, fault: Fault) -> float:
    """Policies of this kind put out so far, by the metrics."""
    return value(yard.running, "kvyard_policy_ejections_total", kind=fault.kind)


def check_exit(yard: Yard, fault: Fault, record: dict[str, Any]) -> None:
    """The record says what an author needs, the built-in is in charge, and the step was not delayed."""
    assert record["message"]
    assert record["snapshot"]["step"] == record["step"]
    assert record["snapshot"]["running"] + record["snapshot"]["waiting"] > 0
    status = yard.client.call("status")
    assert yard.in_charge()[fault.kind] == "builtin"
    assert [entry["policy"] for entry in status["quarantine"]] == [fault.policy]
    assert status["engine"]["restarts"] == 0
    wait_until(lambda: record["step"] in yard.steps, 5, f"the record of step {record['step']}")
    if record["code"] == "timeout":
        spent = re.search(r"ended after (\d+) ms of CPU time and (\d+) ms by the clock\)", record["message"])
        assert spent is not None
        assert float(spent[1]) / 1e3 < HARD_S * 3, "CPU time, on whatever machine"
        assert float(spent[2]) / 1e3 < limit(fault.most_s) * 3
    step = yard.steps[record["step"]]
    assert step["timings"]["schedule"] / 1e9 < limit(fault.most_s) * 3, step["timings"]
    if record["code"] != "stalled":
        assert step["prompt_tokens"] + step["decode_tokens"] > 0, "the built-in went on in the same step"


@contextlib.contextmanager
def yard_of(running: DaemonProcess, solo: list[Result], wanted: list[Wish] = WANTED) -> Iterator[Yard]:
    """Connect, and listen to the steps."""
    with Client(running.socket, timeout=60) as client, Client(running.socket) as listener:
        yard = Yard(running, solo, client, wanted)

        def listen() -> None:
            with contextlib.suppress(ControlError, OSError):
                for event in listener.subscribe(["steps"]):
                    if "step" in event.data:
                        yard.steps[event.data["step"]] = event.data

        threading.Thread(target=listen, daemon=True).start()
        yield yard
