"""A daemon without an engine behind the real control server: what it does is remembered, what it says is fixed.

Run as a program it serves a socket until it is told to drain, for tests of the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from kvyard.control.schema import (
    EngineStatus,
    KvStatus,
    Latency,
    Limits,
    ModelStatus,
    PolicyListing,
    PolicyRow,
    PolicyStatus,
    Quantiles,
    QuarantineEntry,
    Rates,
    RequestCounts,
    RequestPage,
    RequestRow,
    Status,
    SwapResult,
)
from kvyard.front.control.server import ControlServer
from kvyard.front.events import EventLog, Feed
from kvyard.front.operations import GenerateCall, OperationError, Who
from kvyard.link.record import PolicyCost, Preemption, StepRecord, Timings, Wait

EMPTY = Quantiles(None, None, None, 0)
SOME = Quantiles(0.0123, 0.2, 1.5, 40)


def status(waiting: int = 3) -> Status:
    """A busy daemon's status, without surprises in any field."""
    return Status(
        version="9.9.9",
        uptime_s=3725.0,
        ready=True,
        draining=False,
        paused=False,
        address="http://127.0.0.1:8000",
        model=ModelStatus("tiny", "llama", 2048, "float32", "cpu", "a CPU", True),
        engine=EngineStatus("ready", 4242, 1, 1234, 60.0, 0.004),
        requests=RequestCounts(2, waiting, {"blocks": waiting}, 100, 4, 1, 7, 12),
        kv=KvStatus(100, 50, 20, 30, 16, 1 << 24),
        limits=Limits(256, 512, 100, 2048),
        rates=Rates(900.0, 55.5, 1.25, 0.011, 0.03),
        latency=Latency(SOME, SOME, SOME, EMPTY),
        errors={"engine-lost": 1},
        policies=[
            PolicyStatus("admission", "aging", "1.0", "kvyard", {"rate": 0.5}, 1000, 4.5, 20.0, {"capacity": 2}, 1)
        ],
        discipline="kvyard",
        generation=3,
        quarantine=[QuarantineEntry("admission/greedy", "raised", "ValueError: no", None, 2)],
    )


def rows(number: int) -> list[RequestRow]:
    """Waiting requests, their names as long as names may be."""
    return [
        RequestRow(i, f"req-{i:05d}-{'x' * 60}", "waiting", "blocks", 1.5, 0, "a tenant", 100, 0, 0, 50, 0, 0)
        for i in range(number)
    ]


def record(step: int = 7, sequences: int = 2) -> StepRecord:
    """A step record with something in every field."""
    return StepRecord(
        step=step,
        at=12.5,
        timings=Timings(1000, 20_000, 5_000_000, 30_000, 4_000, 50_000),
        ids=b"".join(i.to_bytes(8, "little") for i in range(1, sequences + 1)),
        granted=b"".join(i.to_bytes(4, "little") for i in range(1, sequences + 1)),
        prompt_tokens=30,
        decode_tokens=2,
        running=2,
        waiting=3,
        swapped=1,
        blocks_used=50,
        blocks_cached=20,
        blocks_free=30,
        admitted=[(1, 16)],
        preempted=[Preemption(9, 1, "growth", "recompute", 40)],
        finished=[(8, "stop")],
        waits=[Wait(0, "blocks"), Wait(11, "slots", 99)],
        policies=[PolicyCost("admission", "aging", 1, 4000, {"capacity": 1})],
        generation=3,
    )


class Desk:
    """Implements `Operations`; `calls` are the mutations in order, with who made them."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.steps: Feed[StepRecord] = Feed()
        self.policy_pids: set[int] = set()
        self.waiting = 3
        self.requests_listed = 2
        self.calls: list[tuple[str, object, Who]] = []
        self.slow = 0.0
        """Seconds that a swap takes."""
        self.endless = False
        """`generate` never ends by itself."""
        self.generating = 0
        self.drained = asyncio.Event()

    async def status(self) -> Status:
        return status(self.waiting)

    async def requests(self, limit: int) -> RequestPage:
        return RequestPage(self.requests_listed, rows(min(limit, self.requests_listed)))

    async def explain(self, request_id: str) -> Mapping[str, Any]:
        return {"sequences": []}

    async def policy_list(self) -> PolicyListing:
        listed = [
            PolicyRow("admission", "aging", "kvyard", "1.0", "1.0", True, doc="Priority with aging.\n\nMore."),
            PolicyRow("admission", "broken", "elsewhere", "0.1", "2.0", False, problem="written for API 2.0"),
        ]
        return PolicyListing(listed, ["bad-package 0.1: its metadata cannot be read"])

    async def policy_show(self, kind: str, name: str) -> Mapping[str, Any]:
        if kind not in ("", "admission"):
            raise OperationError("unknown-policy", f"there is no {kind} policy", "see `kvyard policy list`")
        return {"admission": {"name": name or "aging", "params": [{"name": "rate", "value": 0.5}], "none": None}}

    async def policy_swap(self, kind: str, name: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        await asyncio.sleep(self.slow)
        self.calls.append(("swap", (kind, name, dict(params)), who))
        if name == "broken":
            return SwapResult(False, 3, {kind: "aging"}, {kind: "aging"}, 0, "it is written for API 2.0")
        if name == "explode":
            raise ZeroDivisionError("a defect of the daemon")
        if name == "heavy":
            return SwapResult(True, 4, {kind: name}, {kind: "aging"}, 55, "a long pause", pause_ms=2340.0)
        return SwapResult(True, 4, {kind: name}, {kind: "aging"}, 55)

    async def policy_set(self, kind: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        self.calls.append(("set", (kind, dict(params)), who))
        return SwapResult(True, 4, {kind: "aging"}, {kind: "aging"}, 56, params=dict(params))

    async def policy_release(self, policy: str, who: Who) -> Mapping[str, Any]:
        self.calls.append(("release", policy, who))
        return {"released": policy}

    async def cancel(self, request_id: str, who: Who) -> Mapping[str, Any]:
        if request_id == "nobody":
            raise OperationError("unknown-request", "there is no unfinished request nobody", "see `kvyard top`")
        self.calls.append(("cancel", request_id, who))
        return {"cancelled": request_id}

    async def pause(self, who: Who) -> Mapping[str, Any]:
        self.calls.append(("pause", None, who))
        return {"paused": True}

    async def resume(self, who: Who) -> Mapping[str, Any]:
        self.calls.append(("resume", None, who))
        return {"paused": False}

    async def drain(self, stop: bool, who: Who) -> Mapping[str, Any]:
        self.calls.append(("drain", stop, who))
        self.drained.set()
        return {"draining": True, "stop": stop}

    async def dump(self) -> Mapping[str, Any]:
        return {"status": "whole", "odd": {1, 2}, "blob": b"\x00\x01"}

    async def generate(self, call: GenerateCall, who: Who) -> AsyncIterator[Mapping[str, Any]]:
        self.generating += 1
        try:
            for index, word in enumerate(("Par", "is", "\x1b[2J!")):
                yield {"text": word, "token_ids": [index]}
            while self.endless:
                await asyncio.sleep(0.01)
                yield {"text": ".", "token_ids": [9]}
            if call.priority == 13:
                yield {"text": "", "finish_reason": "error", "error": {"code": "engine-lost", "message": "it died"}}
            else:
                yield {"text": "", "finish_reason": "length", "usage": {"completion_tokens": 3}}
        finally:
            self.generating -= 1

    async def model_list(self) -> Mapping[str, Any]:
        return {"models": ["tiny"]}

    async def config_show(self) -> list[Mapping[str, Any]]:
        row = {
            "name": "port",
            "value": 8000,
            "default": 8000,
            "origin": "flag --port",
            "change": "restart",
            "doc": "",
        }
        return [row]


async def serve(path: Path) -> None:
    """Serve until `drain` is called, or a quarter of an hour is over: nobody is left who would call it."""
    server = ControlServer(path, "9.9.9")
    desk = Desk()
    await server.start(desk)
    desk.log.add("start", "the front started")
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(900):
            while not desk.drained.is_set():
                desk.log.add("engine", f"tick {time.monotonic():.0f}")
                desk.steps.publish(record())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(desk.drained.wait(), 0.2)
    await server.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
