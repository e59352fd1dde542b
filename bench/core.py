"""What the engine does between two model steps, measured: `make bench-core`.

The real step loop of the engine runs in a process of its own, with its link, guard, timer, containment, step
records, their encoding and their sending, and the collector off as in production; only the model and its
sampling are replaced, by a fixed token that is there at once. This process plays the front, and reads the costs
from the step records: inbox, scheduling, outputs and the gap between two steps, in which the record is made and
encoded. Building the batch belongs to the model and is left out with it, as in what is measured of other schedulers;
with `--batch` it is built, its time not counted, and then the engine finds torch's code and data in the processor's
caches and not its own, which costs it about a sixth. The limits are for what the engine itself does; the system call
that hands the record over is told beside it (`send`): most of it is the kernel's work of waking the front, which in a
virtual machine takes several times as long as on bare metal.

    python bench/core.py [--quick] [--rounds N] [--batch] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from kvyard.front.engine_child import engine_environment
from kvyard.link.codec import ToFront, decode_sampling, decode_to_front, encode, encode_sampling
from kvyard.link.frames import HEADER, Inbox
from kvyard.link.messages import PROTOCOL, Control, EngineInfo, Reply, Sampling, Sequence, Start, Stop, Submit
from kvyard.link.record import StepRecord

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BLOCK_SIZE = 16
WIDTH = 480
"""Most tokens of a sequence in the mixed load."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload and its limit."""

    name: str
    running: int
    waiting: int
    load: str
    """`mixed` (prompts of 256 tokens on average, 128 outputs), `decode` (nothing comes or ends)."""
    prefix_cache: bool = False
    limit_us: float | None = None
    """Most microseconds per running sequence and step, at the median."""
    limit_p99_ms: float | None = None
    grows: bool = False
    """Measure the same engine once more when its queue has drained."""
    batch: bool = False
    """Build the batch of each step before the model that is not there."""


CASES = (
    Case("decode", 256, 0, "decode", limit_us=0.3),
    Case("decode", 1024, 0, "decode", limit_us=0.3),
    Case("mixed", 256, 0, "mixed", limit_us=0.7),
    Case("mixed", 256, 10_000, "mixed", limit_us=0.7),
    Case("mixed", 1024, 0, "mixed", limit_us=0.5),
    Case("mixed", 1024, 10_000, "mixed", limit_us=0.5, limit_p99_ms=1.0, grows=True),
    Case("mixed", 1024, 100_000, "mixed", limit_us=0.5, grows=True),
    Case("prefix cache", 256, 10_000, "mixed", prefix_cache=True, limit_us=1.2),
    Case("prefix cache", 1024, 10_000, "mixed", prefix_cache=True, limit_us=1.2),
)
GROWTH_LIMIT = 0.1
"""Most growth of the median from an empty queue to the longest, between two engines."""
DRAINED = 40
"""Waiting sequences with which a queue has drained; what is measured then explains the growth, and has no limit.

With none at all, newcomers come when the front has answered, in bursts, and some steps have none: part of the growth
is that steps with a queue do more work. In one engine, between steps in which as many come in, the rest is left.
"""
FEW_STEPS = 8
"""Steps with one number of newcomers that say nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Costs of one case."""

    us_p50: float
    """Microseconds per running sequence and step."""
    us_p99: float
    step_ms_p50: float
    step_ms_p99: float
    us_with_send_p50: float
    """`us_p50` and the system call that hands the record over."""
    parts_us: dict[str, float]
    """Median microseconds of a step by part; `send` is in none of the other figures but `us_with_send_p50`."""
    steps: int
    spread: tuple[float, float] = (0.0, 0.0)
    """Least and most `us_p50` of all rounds."""
    growth: float | None = None
    """Of the cost, from the same engine with a drained queue."""


# ---- the front's side ----------------------------------------------------------------------------------------


class Front:
    """Feeds the engine and reads its records."""

    def __init__(self, case: Case) -> None:
        self.case = case
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with theirs:
            command = [sys.executable, __file__, "--engine", str(theirs.fileno()), "--case", json.dumps(asdict(case))]
            environment = engine_environment(dict(os.environ))
            self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._socket, self._inbox = ours, Inbox()
        self._rng = np.random.default_rng(7)
        self._next = 0
        self._ready: deque[bytes] = deque()

    def close(self) -> None:
        """End the engine."""
        self._send(encode(Stop()))
        self._socket.close()
        self.child.wait(10)

    def _send(self, message: bytes) -> None:
        self._socket.sendall(HEADER.pack(len(message), 0) + message)

    def messages(self) -> Iterator[ToFront]:
        """Whatever the engine says."""
        while data := self._socket.recv(1 << 20):
            for message in self._inbox.feed(data):
                yield decode_to_front(message)

    def prepare(self, count: int) -> None:
        """Make so many sequences now, to be sent later: made in time, the engine would wait for them."""
        for _ in range(count):
            self._next += 1
            message = encode(Submit(self._sequence(self._next)))
            self._ready.append(HEADER.pack(len(message), 0) + message)

    def submit(self, count: int) -> None:
        """So many new sequences."""
        self.prepare(count - len(self._ready))
        self._socket.sendall(b"".join([self._ready.popleft() for _ in range(count)]))

    def _sequence(self, number: int) -> Sequence:
        rng = self._rng
        if self.case.load == "decode":
            prompt, output = 16, 4000
        else:
            prompt, output = int(rng.integers(52, 461)), int(rng.integers(26, 231))
            output = min(output, WIDTH - prompt) if prompt + 26 < WIDTH else 19
        tokens = rng.integers(0, 50_000, prompt, dtype=np.int32)
        sampling = encode_sampling(Sampling(seed=number, temperature=0.0, ignore_eos=True))
        return Sequence(number, number, 0, number * 1e-3, tokens.tobytes(), output, sampling)

    def control(self, method: str) -> None:
        """Ask, and wait for the answer."""
        self._send(encode(Control(1, method)))
        for message in self.messages():
            if isinstance(message, Reply):
                return

    def fill(self, steps: int) -> None:
        """All that is to run and to wait before the first step; what comes in so many steps is made ready."""
        self._send(encode(_start(self.case)))
        for message in self.messages():
            if isinstance(message, EngineInfo):
                break
        self.control("pause")
        waiting = self.case.running + self.case.waiting
        while waiting > 0:
            self.submit(min(waiting, 1000))
            waiting -= 1000
        self.prepare(steps * max(1, self.case.running // 100) if self.case.load == "mixed" else 0)
        self.control("resume")

    def drain(self) -> None:
        """Until hardly anybody waits."""
        for message in self.messages():
            if isinstance(message, StepRecord) and message.waiting <= DRAINED:
                return

    def measure(self, warm_up: int, steps: int) -> list[StepRecord]:
        """Records of `steps` steps at the full number of running sequences."""
        records: list[StepRecord] = []
        seen = 0
        for message in self.messages():
            if not isinstance(message, StepRecord):
                continue
            if message.finished:
                self.submit(len(message.finished))
            seen += message.running >= self.case.running * 0.97
            if seen > warm_up:
                records.append(message)
            if len(records) == steps:
                break
        return records


def _start(case: Case) -> Start:
    return Start(
        protocol=PROTOCOL,
        model_path="",
        device="cpu",
        dtype="float32",
        deterministic=False,
        kv_blocks=case.running * 64 if case.load == "mixed" else case.running * 256,
        block_size=BLOCK_SIZE,
        max_running=case.running,
        max_step_tokens=8192,
        max_model_len=WIDTH if case.load == "mixed" else 4080,
        prefix_cache=case.prefix_cache,
        swap_blocks=0,
        discipline="kvyard",
        policies={},
        quarantined=[],
        generation=0,
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """Of the steps in these records, but the last one; columns by step."""

    parts: dict[str, IntArray]
    """Nanoseconds."""
    send: IntArray
    running: IntArray
    newcomers: IntArray

    @classmethod
    def of(cls, records: list[StepRecord]) -> Costs:
        """Read from the records."""
        timings = [record.timings for record in records]
        parts = {
            "inbox": np.array([t.inbox for t in timings[:-1]]),
            "schedule": np.array([t.schedule for t in timings[:-1]]),
            "outputs": np.array([t.outputs for t in timings[:-1]]),
            "gap": np.array([t.gap - t.send for t in timings[1:]]),  # told by the record after it
        }
        send = np.array([t.send for t in timings[1:]])
        running = np.array([max(1, record.running) for record in records[:-1]])
        return cls(parts, send, running, np.array([len(record.admitted) for record in records[:-1]]))

    @property
    def whole(self) -> FloatArray:
        """Microseconds of each step."""
        whole: FloatArray = np.sum(list(self.parts.values()), axis=0) / 1e3
        return whole

    def by_newcomers(self) -> dict[int, float]:
        """Median microseconds per sequence of the steps in which so many came in, where there are enough."""
        each, counts = self.whole / self.running, np.bincount(self.newcomers)
        enough = np.flatnonzero(counts > FEW_STEPS).tolist()
        return {number: float(np.median(each[self.newcomers == number])) for number in enough if number}


def run(case: Case, warm_up: int, steps: int) -> Outcome:
    """Measure one case."""
    front = Front(case)
    grows = case.grows
    drained: list[StepRecord] = []
    try:
        front.fill(2 * (warm_up + steps) if grows else warm_up + steps)
        records = front.measure(warm_up, steps)
        if grows:
            front.drain()
            drained = front.measure(warm_up, steps)
    finally:
        front.close()
    costs = Costs.of(records)
    whole, send = costs.whole, costs.send
    each = whole / costs.running
    return Outcome(
        us_p50=float(np.median(each)),
        us_p99=float(np.percentile(each, 99)),
        step_ms_p50=float(np.median(whole)) / 1e3,
        step_ms_p99=float(np.percentile(whole, 99)) / 1e3,
        us_with_send_p50=float(np.median((whole + send / 1e3) / costs.running)),
        parts_us={name: float(np.median(values)) / 1e3 for name, values in {**costs.parts, "send": send}.items()},
        steps=len(whole),
        growth=_growth(Costs.of(drained), costs) if grows else None,
    )


def _growth(short: Costs, long: Costs) -> float:
    """Of the mean over the numbers of newcomers that both have."""
    before, after = short.by_newcomers(), long.by_newcomers()
    both = before.keys() & after.keys()
    return sum(after[number] for number in both) / sum(before[number] for number in both) - 1


def middle(outcomes: list[Outcome]) -> Outcome:
    """The run with the median of the medians, and how far the others were from it."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.us_p50)
    return replace(ordered[len(ordered) // 2], spread=(ordered[0].us_p50, ordered[-1].us_p50))


def middles(rounds: list[dict[Case, Outcome]]) -> dict[Case, Outcome]:
    """The middle run of each case."""
    return {case: middle([each[case] for each in rounds]) for case in rounds[0]}


# ---- the engine's side ---------------------------------------------------------------------------------------


def engine(link: socket.socket, case: Case) -> None:
    """The real loop around a model that answers at once."""
    import torch
    from kvyard.core.plan import Plan
    from kvyard.engine.channel import Channel, FrontGone
    from kvyard.engine.loading import Loaded
    from kvyard.engine.model_config import ModelConfig, Rope
    from kvyard.engine.policies import Loader
    from kvyard.engine.pool_size import PoolSize
    from kvyard.engine.process import assemble
    from kvyard.engine.recorder import Recorder
    from kvyard.engine.sampler import Sampled
    from kvyard.link.progress import ProgressPage

    class NoModel:
        """A backend without a model: one token's logits for everybody."""

        name = "cpu"
        device_name = "none"
        geometry: Any = type("Geometry", (), {"block_bytes": 1})()

        def forward(self, batch: Any, read: Any = None) -> torch.Tensor:  # noqa: ANN401 - a Batch; its import would load torch in the front
            return torch.zeros((len(batch.logit_rows), 8))

    class FixedToken:
        """A sampler that has its answer ready."""

        def bind(self, *args: object) -> None:
            """Nothing to remember."""

        def sample(self, logits: torch.Tensor, slots: Any, generated: Any) -> Sampled:  # noqa: ANN401 - int64 columns
            return Sampled(np.zeros(len(slots), np.int32), np.zeros(len(slots), np.bool_), None)

    def fixed_tokens(recorder: Recorder, plan: Plan) -> Sampled:
        """The whole model step; that newcomers' parameters are read then is counted with the outputs."""
        recorder.computed()
        recorder.sampled()
        for newcomer in plan.admitted:
            decode_sampling(newcomer.attached)
        count = np.count_nonzero(plan.samples)
        return Sampled(np.zeros(count, np.int32), np.zeros(count, np.bool_), None)

    channel = Channel(link)
    start, _ = channel.receive_start()
    config = ModelConfig("none", 8, 8, 1, 1, 1, 8, 8, 1 << 20, 1e-5, Rope(dim=8, theta=10_000.0))
    loader = Loader()
    policies = loader.at_start(start.discipline, {}, [])
    loaded = Loaded(NoModel(), config, (0,), "float32")  # type: ignore[arg-type]  # all that the loop asks of it
    assert start.kv_blocks is not None
    assert start.max_model_len is not None
    size = PoolSize(start.kv_blocks, start.max_model_len)
    page = ProgressPage(ProgressPage.create())
    fixed: Any = FixedToken()
    made = assemble(start, policies, loader, loaded, size, channel, page, sampler=fixed)
    if not case.batch:
        made.loop._compute = partial(fixed_tokens, made.loop._p.recorder)  # type: ignore[method-assign]
    channel.send(made.info)
    try:
        made.loop.run()
    except FrontGone:
        os._exit(0)


# ---- the report ----------------------------------------------------------------------------------------------


def report(rounds: list[dict[Case, Outcome]]) -> list[str]:
    """Print a table; what is over its limit, in words."""
    outcomes = middles(rounds)
    print("case          running waiting  us/seq p50  (least-most)    p99  limit  step ms p99  with send  parts (us)")
    over = []
    for case, outcome in outcomes.items():
        parts = " ".join(f"{name} {value:.0f}" for name, value in outcome.parts_us.items())
        limit = "" if case.limit_us is None else f"{case.limit_us:g}"
        least, most = outcome.spread
        each = f"{outcome.us_p50:11.3f}  ({least:.3f}-{most:.3f}) {outcome.us_p99:6.2f} {limit:>6}"
        each += f" {outcome.step_ms_p99:12.3f}"
        each += f" {outcome.us_with_send_p50:10.3f}"
        print(f"{case.name:13} {case.running:7} {case.waiting:7} {each}  {parts}")
        title = f"{case.name} at {case.running} running, {case.waiting} waiting"
        if case.limit_us is not None and outcome.us_p50 > case.limit_us:
            over.append(f"{title}: {outcome.us_p50:.2f} us, limit {case.limit_us:g}")
        if case.limit_p99_ms is not None and outcome.step_ms_p99 > case.limit_p99_ms:
            over.append(f"{title}: p99 of a step {outcome.step_ms_p99:.2f} ms, limit {case.limit_p99_ms:g}")
    over += _report_growth(outcomes)
    _report_drained(rounds)
    return over


def _report_growth(outcomes: dict[Case, Outcome]) -> list[str]:
    cost = {c.waiting: o.us_p50 for c, o in outcomes.items() if c.name == "mixed" and c.running == 1024}
    if len(cost) < 2:
        return []
    growth = cost[max(cost)] / cost[min(cost)] - 1
    print(f"growth from {min(cost):,} to {max(cost):,} waiting: {growth:+.1%} (limit {GROWTH_LIMIT:.0%})")
    return [f"growth with the queue: {growth:.1%}"] if growth > GROWTH_LIMIT else []


def _report_drained(rounds: list[dict[Case, Outcome]]) -> None:
    for case in rounds[0]:
        found = sorted(each.growth for outcomes in rounds if (each := outcomes[case]).growth is not None)
        if not found:
            continue
        middle, spread = found[len(found) // 2], f"({found[0]:+.1%} to {found[-1]:+.1%})"
        title = f"of it at {case.waiting:,} waiting, from the same engine with a drained queue and as many newcomers"
        print(f"{title}: {middle:+.1%} {spread}")


def main() -> int:
    """Measure all; 1 when something is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, no 100,000 waiting")
    parser.add_argument(
        "--rounds", type=int, help="runs of each case, of which the middle one counts: 5, or 1 if quick"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--batch", action="store_true", help="build each step's batch, uncounted: colder caches")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        engine(socket.socket(fileno=options.engine), Case(**json.loads(options.case)))
        return 0
    cases = [case for case in CASES if options.only in case.name and not (options.quick and case.waiting > 10_000)]
    if options.batch:
        cases = [replace(case, batch=True) for case in cases]
    steps = (100, 200) if options.quick else (300, 1000)
    # The collector would stop the front for milliseconds, and with an empty queue newcomers would come in bursts.
    gc.disable()
    # Round by round, so that whatever else the machine did for a while touches no case in all of its runs.
    rounds = [
        {case: run(case, *steps) for case in cases} for _ in range(options.rounds or (1 if options.quick else 5))
    ]
    if options.json:
        outcomes = middles(rounds)
        print(json.dumps([{**asdict(case), **asdict(outcome)} for case, outcome in outcomes.items()]))
        return 0
    over = report(rounds)
    for line in over:
        print("over the limit:", line)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
