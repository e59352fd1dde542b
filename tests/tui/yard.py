"""A daemon as the control socket shows it: a real Unix socket that speaks the real protocol.

    python -m tests.tui.yard SOCKET --rows 150 --hz 10

serves one by itself. What it is told to change changes, so that a screen can be watched doing it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvyard.control.schema import (
    MAX_LINE,
    PROTOCOL,
    EngineStatus,
    ErrorBody,
    Event,
    Hello,
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
    Request,
    RequestCounts,
    RequestPage,
    RequestRow,
    Response,
    Role,
    Status,
    SwapResult,
)
from kvyard.front.control.steps import step_data
from kvyard.link.record import Preemption, StepRecord, Timings
from msgspec.structs import replace as struct_replace

RANK: dict[str, int] = {"viewer": 0, "operator": 1, "admin": 2}
NEEDS: dict[str, Role] = {
    "policy.swap": "operator",
    "policy.set": "operator",
    "policy.release": "operator",
    "cancel": "operator",
    "pause": "operator",
    "resume": "operator",
    "drain": "admin",
}


def status() -> Status:
    """A daemon under load."""
    return Status(
        version="0.1.0",
        uptime_s=3725.0,
        ready=True,
        draining=False,
        paused=False,
        address="127.0.0.1:8000",
        model=ModelStatus("SmolLM2-135M-Instruct", "llama", 8192, "float32", "cpu", "AMD EPYC", True),
        engine=EngineStatus("ready", 4242, 0, 123456, 3700.0, 0.01),
        requests=RequestCounts(3, 2, {"no blocks": 2}, 1204, 7, 0, 3, 12),
        kv=KvStatus(2048, 1229, 410, 409, 16, 1 << 30),
        limits=Limits(16, 2048, 2048, 512),
        rates=Rates(1234.0, 340.0, 2.5, 0.012, 0.031),
        latency=Latency(
            queue=Quantiles(0.004, 1.25, 2.0, 150),
            ttft=Quantiles(0.085, 1.31, 2.1, 149),
            itl=Quantiles(0.0121, 0.0184, 0.031, 18211),
            e2e=Quantiles(2.4, 9.8, 14.0, 120),
        ),
        errors={},
        policies=[
            policy("admission", "aging", {"rate": 0.1}),
            policy("preemption", "newest", {}),
            policy("prefill", "vllm", {"chunk": 512}),
        ],
        discipline="vllm-aging",
        generation=3,
        quarantine=[],
    )


def policy(kind: str, name: str, params: dict[str, Any]) -> PolicyStatus:
    """A policy in charge."""
    return PolicyStatus(kind, name, "0.1.0", "kvyard", params, 12345, 2.0, 9.0, {}, 0)


def quarantined(name: str = "admission/lottery") -> QuarantineEntry:
    """A policy that was put out."""
    return QuarantineEntry(name, "too-slow", "20 overruns in 100 calls", time.time() + 60, 2)


def row(number: int, state: str = "running", **changes: Any) -> RequestRow:  # noqa: ANN401 - any field of the struct
    """One unfinished sequence."""
    running = state == "running"
    base = RequestRow(
        id=number,
        request_id=f"req-{number:04d}",
        state=state,
        reason="" if running else "no blocks",
        age_s=float(number),
        priority=0,
        tenant="",
        prompt_tokens=512,
        computed_tokens=512 if running else 0,
        output_tokens=number % 100 + 1 if running else 0,
        max_new=200,
        blocks=40 if running else 0,
        preemptions=0,
    )
    return struct_replace(base, **changes)


def listing() -> PolicyListing:
    """What is installed."""
    rows = [
        PolicyRow("discipline", "vllm-aging", "kvyard", "0.1.0", "1.0", True, doc="vLLM's shape with aging."),
        PolicyRow("discipline", "sarathi", "kvyard", "0.1.0", "1.0", False, doc="Decodes first, prompts in chunks."),
        PolicyRow("admission", "aging", "kvyard", "0.1.0", "1.0", True, doc="Priority that ages."),
        PolicyRow("admission", "fcfs", "kvyard", "0.1.0", "1.0", False, doc="In the order of arrival."),
        PolicyRow("admission", "lottery", "yard-lottery", "2.0", "2.0", False, "needs API 2.0, this is 1.0"),
        PolicyRow("preemption", "newest", "kvyard", "0.1.0", "1.0", True, doc="The newest gives way."),
        PolicyRow("prefill", "vllm", "kvyard", "0.1.0", "1.0", True, doc="Running first, then newcomers."),
    ]
    return PolicyListing(rows, ["yard-broken 0.1: entry points cannot be read"])


@dataclass
class Call:
    """A call as it came, with the role that the session had then."""

    method: str
    params: dict[str, Any]
    role: str


class CallError(Exception):
    """What the daemon answers instead of a result."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.body = ErrorBody(code, message, hint)


@dataclass(eq=False)
class Session:
    """One connection."""

    writer: asyncio.StreamWriter
    role: Role
    task: asyncio.Task[None] | None = None

    def send(self, item: object) -> None:
        self.writer.write(msgspec.json.encode(item) + b"\n")


class Daemon:
    """Serves a state that tests change freely."""

    def __init__(self, path: Path, *, role: Role = "admin", rows: int = 5) -> None:
        self.path = path
        self.role: Role = role
        self.status = status()
        self.rows = [row(i, "running" if i <= 3 * rows // 5 else "waiting") for i in range(1, rows + 1)]
        self.log = [Event("events", time.time() - 60, {"number": 1, "kind": "start", "message": "the front started"})]
        self.calls: list[Call] = []
        self.push: float | None = None
        """Seconds between status events, whatever the client asked for."""
        self.alter: Callable[[], None] = lambda: None
        """Called before every status event."""
        self.protocol = PROTOCOL
        self.silent = False
        self.sessions: set[Session] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_LINE)

    async def stop(self) -> None:
        """Gone at once, as after a kill: connections end, the socket file stays."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for session in list(self.sessions):
            if session.task is not None:
                session.task.cancel()
            session.writer.transport.abort()
        await asyncio.sleep(0)

    def changes(self) -> list[Call]:
        """Calls that change the daemon."""
        return [call for call in self.calls if call.method in NEEDS]

    async def event(self, kind: str, message: str, **data: object) -> None:
        """Log an event and tell the subscribers."""
        event = Event("events", time.time(), {"number": len(self.log) + 1, "kind": kind, "message": message, **data})
        self.log.append(event)
        for session in self.sessions:
            if session.task is not None:
                session.send(event)

    async def step(self, preempted: list[Preemption] | None = None, ids: int = 64) -> None:
        """Tell the subscribers of a step, as the daemon does."""
        self.status.engine.step += 1
        granted = array("i", [1] * ids).tobytes()
        sequences = array("q", range(ids)).tobytes()
        timings = Timings(1, 2, 3, 4, 5, 6)
        record = StepRecord(
            self.status.engine.step, time.monotonic(), timings, sequences, granted, 0, ids, ids, 0, 0, 10, 10, 10
        )
        record.preempted = preempted or []
        for session in self.sessions:
            if session.task is not None:
                session.send(Event("steps", time.time(), step_data(record)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(writer, self.role)
        self.sessions.add(session)
        try:
            session.send(Hello(self.protocol, "0.1.0", self.role, 1))
            while line := await reader.readline():
                await self._answer(session, msgspec.json.decode(line, type=Request))
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.sessions.discard(session)
            if session.task is not None:
                session.task.cancel()
            writer.close()

    async def _answer(self, session: Session, request: Request) -> None:
        self.calls.append(Call(request.method, request.params, session.role))
        if self.silent:
            return
        try:
            needed = NEEDS.get(request.method, "viewer")
            if RANK[session.role] < RANK[needed]:
                raise CallError(
                    "forbidden", f"{request.method} needs the role {needed}", "ask for the operator group"
                )
            result = await self._do(session, request.method, request.params)
        except CallError as error:
            session.send(Response(request.id, error=error.body))
        else:
            session.send(Response(request.id, result))

    async def _do(self, session: Session, method: str, params: dict[str, Any]) -> object:
        name = "do_" + method.replace(".", "_")
        handler = getattr(self, name, None)
        if handler is None:
            raise CallError("unknown-method", f"there is no method {method}")
        return await handler(session, params)

    # ---- methods -----------------------------------------------------------------------------------------------

    async def do_lower(self, session: Session, params: dict[str, Any]) -> object:
        wanted: Role = params["role"]
        session.role = min(session.role, wanted, key=RANK.__getitem__)
        return {"role": session.role}

    async def do_status(self, session: Session, params: dict[str, Any]) -> Status:
        self._count()
        return self.status

    def _count(self) -> None:
        """The status counts the rows, as the daemon's does."""
        counts = self.status.requests
        waiting = [one for one in self.rows if one.state != "running"]
        counts.running, counts.waiting = len(self.rows) - len(waiting), len(waiting)
        counts.waiting_by_reason = dict(Counter(one.reason for one in waiting))

    async def do_requests(self, session: Session, params: dict[str, Any]) -> RequestPage:
        return RequestPage(len(self.rows), self.rows[: params.get("limit", 200)])

    async def do_events(self, session: Session, params: dict[str, Any]) -> list[Event]:
        return self.log[-params.get("limit", 100) :]

    async def do_subscribe(self, session: Session, params: dict[str, Any]) -> object:
        session.task = asyncio.create_task(self._push(session, self.push or params["interval"]))
        return {}

    async def _push(self, session: Session, interval: float) -> None:
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(interval)
                if not self.silent:
                    self.alter()
                    self._count()
                    data = msgspec.to_builtins(self.status)
                    session.send(Event("status", time.time(), data))

    async def do_policy_list(self, session: Session, params: dict[str, Any]) -> PolicyListing:
        return listing()

    async def do_policy_show(self, session: Session, params: dict[str, Any]) -> object:
        spec = {"type": "number", "ge": 0, "le": 10, "unit": "per second", "doc": "Gain of priority."}
        if not params["name"]:
            parts = [(p.kind, p.name, p.params) for p in self.status.policies]
            live = {"rate": "live", "chunk": "restart"}
            return {
                "policies": [
                    {
                        "kind": kind,
                        "name": name,
                        "params": [
                            {"name": key, "value": value, "change": live.get(key, "live"), **spec}
                            for key, value in values.items()
                        ],
                    }
                    for kind, name, values in parts
                ]
            }
        if params["kind"] == "discipline":
            return {"kind": "discipline", "name": params["name"], "parts": {"admission": {"name": "fcfs"}}}
        return {"kind": params["kind"], "name": params["name"], "params": [{"name": "rate", "value": 0.1, **spec}]}

    async def do_policy_swap(self, session: Session, params: dict[str, Any]) -> SwapResult:
        kind, name = params["kind"], params["name"]
        before = {"discipline": self.status.discipline or ""} | {p.kind: p.name for p in self.status.policies}
        if params["params"].get("fail"):
            return SwapResult(False, self.status.generation, before, before, 0, "the candidate raised ValueError")
        self.status.generation += 1
        if kind == "discipline":
            self.status.discipline = name
        else:
            self.status.discipline = None
            self.status.policies = [
                policy(kind, name, params["params"]) if p.kind == kind else p for p in self.status.policies
            ]
        after = {"discipline": self.status.discipline or ""} | {p.kind: p.name for p in self.status.policies}
        await self.event("swap", f"{kind}: {before[kind]} -> {name}", who="root (uid 0, pid 7)")
        return SwapResult(True, self.status.generation, {kind: after[kind]}, {kind: before[kind]}, 123500)

    async def do_policy_set(self, session: Session, params: dict[str, Any]) -> SwapResult:
        found = next(p for p in self.status.policies if p.kind == params["kind"])
        for name, value in params["params"].items():
            if not isinstance(value, int | float):
                raise CallError("bad-parameter", f"{name} takes a number, not {value!r}", "see policy show")
            found.params[name] = value
        self.status.generation += 1
        names = {found.kind: found.name}
        return SwapResult(True, self.status.generation, names, names, 123501)

    async def do_policy_release(self, session: Session, params: dict[str, Any]) -> object:
        self.status.quarantine = [q for q in self.status.quarantine if q.policy != params["policy"]]
        return {}

    async def do_cancel(self, session: Session, params: dict[str, Any]) -> object:
        kept = [r for r in self.rows if r.request_id != params["request_id"]]
        if len(kept) == len(self.rows):
            raise CallError("unknown-request", f"there is no request {params['request_id']}")
        self.rows = kept
        return {}

    async def do_pause(self, session: Session, params: dict[str, Any]) -> object:
        self.status.paused = True
        return {}

    async def do_resume(self, session: Session, params: dict[str, Any]) -> object:
        self.status.paused = False
        return {}

    async def do_drain(self, session: Session, params: dict[str, Any]) -> object:
        self.status.draining = True
        return {}


def busy(daemon: Daemon) -> Callable[[], None]:
    """Something to watch: outputs grow, rates swing, requests come and go."""
    started, number = time.monotonic(), len(daemon.rows)

    def alter() -> None:
        nonlocal number
        now = time.monotonic() - started
        for one in daemon.rows:
            one.age_s += daemon.push or 0.5
            if one.state == "running":
                one.output_tokens += 1
        done = [one for one in daemon.rows if one.output_tokens >= one.max_new]
        for one in done:
            daemon.rows.remove(one)
            number += 1
            daemon.rows.append(row(number, "waiting", age_s=0.0))
            daemon.status.requests.finished += 1
        wave = abs((now * 7) % 40 - 20) / 20
        daemon.status.rates = struct_replace(
            daemon.status.rates,
            output_tokens=200 + 300 * wave,
            prompt_tokens=900 + 600 * wave,
            step_p50=0.01 + 0.01 * wave,
        )
        used = int(900 + 700 * wave)
        daemon.status.kv = KvStatus(2048, used, 300, 2048 - used - 300, 16, 1 << 30)
        daemon.status.engine.step += 10
        daemon.status.uptime_s += daemon.push or 0.5

    return alter


async def main(path: Path, rows: int, hz: float, *, moving: bool = True) -> None:
    """Serve until killed."""
    daemon = Daemon(path, rows=rows)
    daemon.push = 1 / hz if hz > 0 else None
    if moving:
        daemon.alter = busy(daemon)
    await daemon.start()
    while True:
        await asyncio.sleep(0.02)
        if moving:
            await daemon.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--hz", type=float, default=0)
    parser.add_argument("--still", action="store_true")
    options = parser.parse_args()
    asyncio.run(main(options.socket, options.rows, options.hz, moving=not options.still))
