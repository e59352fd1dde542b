"""The engine process: `python -m kvyard.engine.process LINK_FD PARENT_PID`, started by the front alone."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvyard.core.advice import PolicySet
from kvyard.core.guard import Guard
from kvyard.core.interrupt import SignalTimer
from kvyard.core.plan import Limits
from kvyard.core.scheduler import Scheduler
from kvyard.engine.backends.base import BackendError
from kvyard.engine.channel import Channel, FrontGone
from kvyard.engine.containment import ProcessContainment
from kvyard.engine.control import Controls
from kvyard.engine.faults import Faults, conduct_limits
from kvyard.engine.loading import Loaded, load
from kvyard.engine.loop import EngineLoop, Parts
from kvyard.engine.model_config import ModelError
from kvyard.engine.policies import Loader
from kvyard.engine.pool_size import PoolSize, pool_size
from kvyard.engine.recorder import Recorder
from kvyard.engine.sampler import Sampler
from kvyard.engine.scripted import make_sampler
from kvyard.link.messages import PROTOCOL, EngineInfo, Loading, Refused, Start
from kvyard.link.progress import EnginePhase, ProgressPage
from kvyard.logs import configure
from kvyard.policy.base import KINDS, Kind, Policy
from kvyard.policy.params import ParamError
from kvyard.policy.registry import RegistryError

log = structlog.get_logger(__name__)

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


class StartError(Exception):
    """The engine cannot start as asked."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def die_with(parent: int) -> None:
    """End this process when its parent ends, even if that happened just before this call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NAME, b"kvyard-engine", 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


class _PolicyWatch:
    """Writes the policy that is running to the progress page, for the supervisor."""

    def __init__(self, page: ProgressPage, label: Callable[[Kind, Policy], str]) -> None:
        self._page = page
        self._label = label
        self._known: dict[Kind, tuple[Policy, str]] = {}

    def __call__(self, kind: Kind, policy: Policy | None, at: int) -> None:
        """A policy is entered, or left; `perf_counter_ns` and `monotonic_ns` are one clock on Linux."""
        if policy is None:
            self._page.phase(EnginePhase.SCHEDULE, at)
            return
        known = self._known.get(kind)
        if known is None or known[0] is not policy:
            known = self._known[kind] = (policy, self._label(kind, policy))
        self._page.policy(known[1], at)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loop that is ready to run, and what it says of itself."""

    loop: EngineLoop
    info: EngineInfo


def _build(start: Start, channel: Channel, page: ProgressPage) -> Engine:
    """Everything from the start message to a loop that is ready to run. Raises StartError."""

    def progress(what: str, fraction: float) -> None:
        page.phase(EnginePhase.LOADING, time.monotonic_ns())
        channel.send(Loading(what, fraction))

    if start.protocol != PROTOCOL:
        raise StartError("protocol", f"front speaks link protocol {start.protocol}, this engine {PROTOCOL}")
    loader = Loader(page.candidate)
    try:
        again = start.again or start.generation > 0
        policies = loader.at_start(start.discipline, start.policies, start.quarantined, again=again)
    except (RegistryError, ParamError) as error:
        absent = getattr(error, "code", "") == "unknown"
        raise StartError(
            "unknown" if absent else "policy", f"cannot start with discipline {start.discipline!r}: {error}"
        ) from None
    loaded = load(
        start.model_path,
        device=start.device,
        dtype=start.dtype,
        deterministic=start.deterministic,
        block_size=start.block_size,
        progress=progress,
    )
    size = _allocate(start, loaded)
    return assemble(start, policies, loader, loaded, size, channel, page)


def assemble(
    start: Start,
    policies: PolicySet,
    loader: Loader,
    loaded: Loaded,
    size: PoolSize,
    channel: Channel,
    page: ProgressPage,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    sampler: Sampler | None = None,
) -> Engine:
    """The loop around a loaded model. Raises Fault when a policy's declarations cannot be used.

    `clock_ns` times the parts of a step; a `sampler` of one's own is for measurements without a model.
    """
    limits = Limits(
        blocks=size.blocks,
        block_size=start.block_size,
        max_running=start.max_running,
        max_step_tokens=start.max_step_tokens,
        max_model_len=size.max_model_len,
        prefix_cache=start.prefix_cache,
        isolate_tenants=start.prefix_cache_isolation == "tenant",
        swap_blocks=start.swap_blocks,
    )
    timer = SignalTimer()
    guard = Guard(
        clock_ns=time.perf_counter_ns,
        cpu_ns=time.thread_time_ns,
        timer=timer,
        containment=ProcessContainment(timer),
        watch=_PolicyWatch(page, loader.label),
    )
    scheduler = Scheduler(
        limits,
        policies,
        clock_ns=time.perf_counter_ns,
        guard=guard,
        salt=secrets.token_bytes(16),
        conduct=conduct_limits(),
    )
    scheduler.import_states(start.policy_state)
    recorder = Recorder(scheduler, clock_ns)
    recorder.generation = start.generation
    parts = Parts(
        channel=channel,
        scheduler=scheduler,
        backend=loaded.backend,
        sampler=sampler
        or make_sampler(loaded.config.vocab_size, loaded.eos_ids, 2 * start.max_running, hashes=start.deterministic),
        page=page,
        recorder=recorder,
        controls=Controls(scheduler, loader, recorder),
        block_size=start.block_size,
    )
    loop = EngineLoop(parts, clock=time.monotonic, clock_ns=clock_ns, faults=Faults.from_environment())
    return Engine(loop, _info(start, loaded, limits, scheduler, loader.notes))


def _allocate(start: Start, loaded: Loaded) -> PoolSize:
    size = pool_size(
        asked=start.kv_blocks,
        max_model_len=start.max_model_len,
        model_limit=loaded.config.max_context,
        block_size=start.block_size,
        block_bytes=loaded.backend.geometry.block_bytes,
        free_bytes=loaded.backend.free_bytes(),
        on_cpu=loaded.backend.name == "cpu",
    )
    loaded.backend.allocate(size.blocks, start.swap_blocks)
    if start.deterministic:
        loaded.backend.self_check()
    return size


def _info(start: Start, loaded: Loaded, limits: Limits, scheduler: Scheduler, notes: list[str]) -> EngineInfo:
    geometry = loaded.backend.geometry
    return EngineInfo(
        pid=os.getpid(),
        backend="cuda" if loaded.backend.name == "cuda" else "cpu",
        device=loaded.backend.device_name,
        dtype="bfloat16" if loaded.dtype_name == "bfloat16" else "float32",
        deterministic=start.deterministic,
        kv_blocks=limits.blocks,
        block_size=limits.block_size,
        kv_bytes=limits.blocks * geometry.block_bytes,
        max_running=limits.max_running,
        max_step_tokens=limits.max_step_tokens,
        max_model_len=limits.max_model_len,
        vocab_size=loaded.config.vocab_size,
        eos_ids=list(loaded.eos_ids),
        policies={kind: scheduler.policies.name(kind) for kind in KINDS},
        generation=start.generation,
        notes=list(notes),
    )


def run(link: socket.socket) -> int:
    """Serve one front until it says stop or is gone; the exit status."""
    channel = Channel(link)
    start, descriptors = channel.receive_start()
    page = ProgressPage(descriptors[0])
    page.begin(os.getpid(), time.monotonic_ns())
    # The supervisor asks for the stack with SIGUSR1; faulthandler answers even from inside a C loop.
    faulthandler.register(signal.SIGUSR1, file=descriptors[1], all_threads=True)
    try:
        engine = _build(start, channel, page)
    except (StartError, BackendError, ModelError) as error:
        code = error.code if isinstance(error, StartError) else "backend"
        channel.send(Refused(code, str(error), error.hint))
        channel.finish(2.0)
        return 6
    channel.send(engine.info)
    engine.loop.run()
    page.phase(EnginePhase.LEAVING, time.monotonic_ns())
    channel.finish(1.0)
    return 0


def main() -> None:
    """Entry of the process."""
    link_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    faulthandler.enable()
    # A terminal's Ctrl-C, a service manager's SIGTERM and a reload's SIGHUP, which may go to the whole group, are for
    # the front: it drains and then says stop, or tells what it read anew.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configure("info", "auto")
    with socket.socket(fileno=link_fd) as link:
        try:
            status = run(link)
        except FrontGone:
            status = 0
    # Interpreter shutdown with torch loaded takes half a second and can only go wrong.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
