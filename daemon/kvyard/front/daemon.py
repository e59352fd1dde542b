"""The daemon: joins supervisor, serving, policies, metrics and both APIs; carries out what operators ask."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog

from kvyard import __version__
from kvyard.control.schema import PolicyListing, RequestPage, Status, SwapResult
from kvyard.front import scratch
from kvyard.front.decisions import DecisionLog
from kvyard.front.engine_child import EngineDeath
from kvyard.front.event_lines import write_event
from kvyard.front.events import EventLog, Feed
from kvyard.front.keys import KeyFileError, KeyRing
from kvyard.front.metrics import Metrics
from kvyard.front.one_shot import run_one
from kvyard.front.operations import GenerateCall, OperationError, Who
from kvyard.front.policy_desk import PolicyDesk, told
from kvyard.front.policy_listing import describe_installed, listing, no_such_kind
from kvyard.front.quarantine import Quarantine, state_file
from kvyard.front.request_ids import find_request
from kvyard.front.serving import Serving
from kvyard.front.settings import Difference, Settings, SettingsError, compare
from kvyard.front.status import Sources, build_status, placeholder_policies, request_page
from kvyard.front.supervisor import Patience, Supervisor
from kvyard.front.text.support import TextSupport
from kvyard.link.codec import ToFront
from kvyard.link.messages import (
    PROTOCOL,
    Ejected,
    EngineInfo,
    Failed,
    Goodbye,
    Outputs,
    PolicyState,
    Refused,
    Reply,
    Start,
)
from kvyard.link.progress import EnginePhase
from kvyard.link.record import StepRecord
from kvyard.logs import configure
from kvyard.policy.base import BUILTIN, KINDS

log = structlog.get_logger(__name__)

SWEEP_S = 0.1
CHANGES = ("swap", "set")
"""What the engine is asked for that may put another policy in charge."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model as the daemon was told to serve it."""

    id: str
    path: str
    family: str


class Daemon:
    """Implements `Operations` for the control server and `EngineHandler` for the supervisor."""

    def __init__(self, settings: Settings, model: Served, address: str, keys: KeyRing) -> None:
        self.keys = keys
        self.settings = settings
        """In force: what a reload changed is in here, what needs a restart too."""
        self._started_with = settings
        self.model = model
        self.log = EventLog()
        self.log.written = write_event
        self.steps: Feed[StepRecord] = Feed()
        self.metrics = Metrics(model.id)
        self.supervisor = Supervisor(self._start_message, self, patience=Patience(step=settings.step_timeout_s))
        self.serving = Serving(
            self.supervisor.send,
            self.metrics,
            max_waiting=settings.max_waiting,
            max_waiting_tokens=settings.max_waiting_tokens,
        )
        self.decisions = DecisionLog(
            settings.retention_s, settings.retention_mib << 20, lambda sequence_id: f"sequence {sequence_id}"
        )
        self.serving.watched_by(self.decisions)
        self.serving.stalled = self.supervisor.stalled
        self.desk = PolicyDesk(settings.discipline, Quarantine(state_file()), self.log, self.serving.control)
        self.desk.came_late = self._refresh_policies
        self.text: TextSupport | None = None
        self.first_ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        """Result: the first engine serves; an EngineRefused exception when it cannot start as asked."""
        self._reloading = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()
        self.stop_asked: Callable[[], None] = lambda: None
        """Called when an operator asks the daemon to drain and stop."""
        self._forced = False
        self._policy_state: dict[str, Any] = {}
        self._in_force: list[dict[str, Any]] = []
        self._sources = Sources(
            version=__version__,
            started=time.monotonic(),
            address=address,
            model_id=model.id,
            family=model.family,
            settings=settings,
            serving=self.serving,
            supervisor=self.supervisor,
            stats=self.metrics.stats,
            desk=self.desk,
        )
        if self.desk.quarantine.problem:
            log.warning("quarantine.file", problem=self.desk.quarantine.problem)

    # ---- life

    def start(self) -> None:
        """Start the first engine."""
        self.log.add("start", f"kvyard {__version__} serves {self.model.id}", model=self.model.id)
        self.supervisor.spawn()

    async def sweep(self) -> None:
        """Ends what has passed its time; runs for as long as the daemon does."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.serving.sweep()

    def forced(self) -> None:
        """Leave at once: what is not complete is ended, and no drain is over."""
        self._forced = True
        left = self._cut_off()
        self.log.add("drain", f"stopped at once: {left} sequences were ended", left=left)

    def _cut_off(self) -> int:
        return self.serving.fail_all("shutting_down", "the daemon was stopped before this request was complete")

    async def drained(self, limit_s: float) -> int:
        """Take nothing new and wait for what runs; how many sequences had to be ended at the limit."""
        self.serving.draining = self.serving.leaving = True
        self.log.add("drain", f"draining: {len(self.serving.journal)} sequences to finish", limit_s=limit_s)
        done = asyncio.Event()
        self.serving.idle = done.set
        if len(self.serving.journal):
            if self.serving.paused:
                await self._resume_for_drain()
            try:
                await asyncio.wait_for(done.wait(), limit_s)
            except TimeoutError:
                left = self._cut_off()
                self.log.add("drain", f"the limit of {limit_s:g} s passed: {left} sequences were ended", left=left)
                return left
        if not self._forced:
            self.log.add("drain", "drained")
        return 0

    def status_line(self) -> str:
        """One line for the service manager."""
        if self.serving.not_ready_reason:
            return self.serving.not_ready_reason
        return f"serving {self.model.id}; {self.desk.in_charge.named or 'mixed'} discipline in charge"

    def reload(self, reread: Callable[[], Settings]) -> None:
        """SIGHUP: take over the live settings that changed, name those that need a restart. One after the other."""
        task = asyncio.create_task(self._reload(reread))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, reread: Callable[[], Settings]) -> None:
        async with self._reloading:
            await self._reload_now(reread)

    async def _reload_now(self, reread: Callable[[], Settings]) -> None:
        try:
            new, keys = await asyncio.to_thread(self._read_again, reread)
        except (SettingsError, KeyFileError) as error:
            self.log.add("reload", f"the configuration was refused and nothing changed: {error}")
            log.error("config.refused", problems=str(error).splitlines())
            return
        live = compare(self.settings, new).live
        # Whatever waits for a restart is told each time, changed by this reload or by an earlier one.
        restart = compare(self._started_with, new).restart
        self.settings = self._sources.settings = new
        self.serving.max_waiting = new.max_waiting
        self.serving.max_waiting_tokens = new.max_waiting_tokens
        configure(new.log_level, new.log_format)
        self._apply_places()
        self.log.add(
            "reload",
            reload_words(Difference(live, restart), keys, self._places, new.max_running),
            live=live,
            restart=restart,
        )
        log.info("config.reloaded", live=live, needs_restart=restart, api_keys=len(self.keys))

    def _read_again(self, reread: Callable[[], Settings]) -> tuple[Settings, str]:
        new = reread()
        return new, str(self.keys.load(new.api_key_file))

    @property
    def _places(self) -> int:
        # The engine's columns are as long as it was started with.
        return min(self.settings.max_running, self._started_with.max_running)

    def _apply_places(self) -> None:
        """Tell the engine how many may run at once. One that is not there is told when it is."""
        places = self._places

        def done(reply: Reply) -> None:
            if reply.error is None and self.serving.info is not None:
                self.serving.info = msgspec.structs.replace(self.serving.info, max_running=places)
                self.metrics.places(places)

        self.serving.control("places", {"max_running": places}, done)

    def _start_message(self) -> Start:
        # A crash is no restart: what a reload left for one must not slip in with the next engine.
        s = self._started_with
        return Start(
            protocol=PROTOCOL,
            model_path=self.model.path,
            device=s.device,
            dtype=s.dtype,
            deterministic=s.deterministic,
            kv_blocks=s.kv_blocks,
            block_size=s.block_size,
            max_running=s.max_running,
            max_step_tokens=s.max_step_tokens,
            max_model_len=s.max_model_len,
            prefix_cache=s.prefix_cache,
            prefix_cache_isolation=s.prefix_cache_isolation,
            swap_blocks=s.swap_blocks,
            discipline=self.desk.in_charge.discipline or s.discipline,
            policies=self.desk.in_charge.parts(),
            quarantined=self.desk.blocked_names(),
            generation=self.desk.in_charge.generation,
            policy_state=self._policy_state,
            again=self.serving.info is not None,
        )

    # ---- EngineHandler

    def engine_message(self, message: ToFront) -> None:
        """Anything but the start's own messages."""
        match message:
            case Outputs():
                self.supervisor.productive()
                self.serving.outputs(message)
            case StepRecord():
                self.metrics.step(message)
                self.serving.step(message)
                self.decisions.step(message)
                self.steps.publish(message)
            case Reply():
                if self.serving.asked(message.ticket) in CHANGES and message.error is None:
                    self._took_charge(message.result)
                self.serving.replied(message)
            case Failed():
                self.serving.failed(message)
            case Ejected():
                self._ejected(message)
            case PolicyState():
                self._policy_state = message.state
            case Goodbye():
                log.info("engine.leaves", reason=message.reason)

    def engine_ready(self, info: EngineInfo) -> None:
        """A new engine serves."""
        self.metrics.engine(info)
        self.desk.engine_ready(info)
        self._in_force = placeholder_policies(info)
        self.decisions.engine_up()
        self.decisions.pool(info.block_size, info.kv_bytes // info.kv_blocks)
        self.serving.engine_up(info)
        if self.serving.paused:
            self.serving.control("pause", {}, lambda reply: None)
        if self.settings.max_running < info.max_running:
            self._apply_places()
        self._refresh_policies()
        self.log.add("engine", f"the engine serves on {info.device}", pid=info.pid, kv_blocks=info.kv_blocks)
        if not self.first_ready.done():
            self.first_ready.set_result(info)

    def engine_lost(self, death: EngineDeath) -> None:
        """It is gone; a new one will be started."""
        seen = death.progress
        candidate = self._candidate(death)
        if death.policy_at_fault is not None and seen is not None:
            at = "was loaded" if seen.phase is EnginePhase.CANDIDATE else "took over" if candidate else "ran"
            words = death.hang or f"the engine {death.words} while the policy {at}"
            # The engine can say no more; what it last said was in force is what it died with.
            version = self._versions.get(death.policy_at_fault)
            exit_ = Ejected(
                death.policy_at_fault, death.code, words, seen.step, traceback=death.stack, version=version or ""
            )
            lost = partial(self.desk.candidate_lost, replaces_itself=version is not None)
            self._ejected(exit_, lost if candidate else self.desk.ejected)
        log.error("engine.lost", how=death.words, phase=seen.phase.name.lower() if seen else None, stack=death.stack)
        self.log.add(
            "restart",
            f"the engine {death.words}; {len(self.serving.journal)} sequences go on with a new one",
            returncode=death.returncode,
            step=seen.step if seen is not None else None,
            in_step=list(seen.ids) if seen is not None and seen.in_step else [],
            stack=death.stack,
        )
        self.metrics.engine_restarted()
        self.decisions.engine_lost(time.monotonic(), seen.step if seen is not None else -1, death.words)
        self.serving.engine_down(death, candidate)

    def _candidate(self, death: EngineDeath) -> str | None:
        """The policy at fault, where it was not in charge yet: it was loaded, or it took over the live requests."""
        label, seen = death.policy_at_fault, death.progress
        if label is None or seen is None or not death.ready:
            return None
        # One that is asked for by the name of what is in charge is another version of it, or the same anew.
        takes_over = label not in self._versions or self.desk.loads(label)
        return label if seen.phase is EnginePhase.CANDIDATE or takes_over else None

    @property
    def _versions(self) -> dict[str, str]:
        """`kind/name` of what is in charge, with the version that runs; empty where that is not known."""
        return {_label(row): str(row.get("installed", "")) for row in self._in_force}

    def engine_refused(self, refused: Refused) -> None:
        """It cannot start as asked."""
        if not self.first_ready.done():  # `serve` ends with it, and says it
            self.first_ready.set_exception(EngineRefused(refused))
            return
        self.log.add("error", f"the engine cannot start: {refused.message}", code=refused.code, hint=refused.hint)

    def _ejected(self, message: Ejected, told: Callable[[Ejected], object] | None = None) -> None:
        (told or self.desk.ejected)(message)
        self.metrics.ejected(message.policy, message.code)
        self._refresh_policies()

    def _refresh_policies(self) -> None:
        def done(reply: Reply) -> None:
            if reply.error is None:
                self._in_force_now(reply.result)

        self.serving.control("policies", {}, done)

    async def _refreshed_policies(self) -> None:
        """Before a change is answered: what `status` and `policy list` say then must be what was answered."""
        with contextlib.suppress(OperationError):
            self._in_force_now(await self.desk.ask("policies", {}))

    def _took_charge(self, change: Mapping[str, Any]) -> None:
        """A change is done: who is in charge from now on, should the engine die before it is asked for more."""
        known = {(_label(row), row.get("installed")): row for row in self._in_force}
        rows = [
            {"kind": kind, "name": name, "params": [], "installed": change["versions"][kind]}
            for kind, name in change["current"].items()
        ]
        self._in_force = [known.get((_label(row), row["installed"]), row) for row in rows]

    def _in_force_now(self, answer: Mapping[str, Any]) -> None:
        self._in_force = list(answer["policies"])
        names = {str(p["kind"]): str(p["name"]) for p in self._in_force}
        self.metrics.policies(names, self.desk.in_charge.generation)
        self.decisions.in_charge(names)

    # ---- Operations

    @property
    def policy_pids(self) -> Collection[int]:
        """Processes that run policies, the engine and scratch ones: they may not use the control socket."""
        engine = self.supervisor.pid
        return scratch.running() | (set() if engine is None else {engine})

    async def status(self) -> Status:
        """Everything the first screen shows."""
        return build_status(self._sources, self._in_force, self.serving.paused)

    async def requests(self, limit: int) -> RequestPage:
        """Unfinished sequences, running first, then waiting in order."""
        return request_page(self._sources, limit)

    async def explain(self, request_id: str) -> Mapping[str, Any]:
        """Why a request waits, who gave way for whom, who overtook it."""
        meant = find_request(request_id, self.decisions.known())
        answers = self.decisions.explain(meant, time.monotonic()) if meant is not None else []
        if not answers:
            raise OperationError(
                "not-found",
                f"nothing is known of a request {request_id!r}",
                f"finished ones are kept for {self._started_with.retention_s:g} s; `kvyard top` lists the others",
            )
        return {"sequences": answers}

    async def policy_list(self) -> PolicyListing:
        """Installed policies and disciplines."""
        active = {(str(p["kind"]), str(p["name"])): str(p.get("installed", "")) for p in self._in_force}
        if self.desk.in_charge.named is not None:
            active["discipline", self.desk.in_charge.named] = ""
        return await asyncio.to_thread(listing, active, self.desk.quarantine.active())

    async def policy_show(self, kind: str, name: str) -> Mapping[str, Any]:
        """What is in force; both empty for everything in charge."""
        if kind not in ("", "discipline", *KINDS):
            raise await asyncio.to_thread(no_such_kind, kind)
        in_charge = {(str(p["kind"]), str(p["name"])) for p in self._in_force}
        in_charge.add(("discipline", self.desk.in_charge.named or ""))
        if name and (kind == "discipline" or (kind, name) not in in_charge):
            shown = await self._described(kind, name)
            return {**shown, "in_charge": (kind, name) in in_charge}
        answer = await self.desk.ask("policies", {})
        rows = [p for p in answer["policies"] if kind in ("", "discipline", p["kind"])]
        now = self.desk.in_charge
        words = {"discipline": now.named or "mixed", "changed": now.changed}
        return {**rows[0], "in_charge": True} if name else {**answer, **words, "policies": rows}

    async def _described(self, kind: str, name: str) -> dict[str, Any]:
        """A policy that is not in charge, or a discipline; its parameters are those in force where it is."""
        if name == BUILTIN:
            return await self.desk.ask("builtin", {"kind": kind})
        shown = await describe_installed(kind, name, parts=True)
        if kind == "discipline" and name == self.desk.in_charge.named:
            answer = await self.desk.ask("policies", {})
            for row in answer["policies"]:
                shown["parts"][row["kind"]]["parameters"] = row["params"]
        return shown

    async def policy_swap(self, kind: str, name: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        """Put another policy (or `kind` discipline) in charge; returns when it is."""
        result = await self.desk.swap(kind, name, params, who)
        await self._refreshed_policies()
        return result

    async def policy_set(self, kind: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        """Change live parameters."""
        result = await self.desk.set(kind, params, who)
        await self._refreshed_policies()
        return result

    async def policy_release(self, policy: str, who: Who) -> Mapping[str, Any]:
        """Release `kind/name` from quarantine."""
        self.desk.release(policy, who)
        return {"policy": policy, "released": True}

    async def cancel(self, request_id: str, who: Who) -> Mapping[str, Any]:
        """Cancel a request."""
        meant = find_request(request_id, ((entry.id, entry.request_id) for entry in self.serving.journal))
        ended = self.serving.cancel_request(meant) if meant is not None else 0
        if not ended:
            raise OperationError(
                "not-found", f"no unfinished request has the id {request_id!r}", "`kvyard top` lists them"
            )
        self.log.add("cancel", f"request {meant}: {ended} sequences", who=str(who))
        return {"request_id": meant, "sequences": ended}

    async def pause(self, who: Who) -> Mapping[str, Any]:
        """Stop scheduling."""
        return await self._pause("pause", True, who)

    async def resume(self, who: Who) -> Mapping[str, Any]:
        """Schedule again, and take requests again after a drain that does not stop."""
        if self.serving.draining and not self.serving.leaving:
            self.serving.draining = False
            self.log.add("drain", "requests are taken again", who=str(who))
        return await self._pause("resume", False, who)

    async def _pause(self, method: str, paused: bool, who: Who) -> Mapping[str, Any]:
        def taken(answer: dict[str, Any], late: bool) -> None:
            self.serving.paused = paused
            said = "scheduling stopped" if paused else "scheduling goes on"
            self.log.add("pause", told(said, late), who=str(who))

        await self.desk.ask(method, {}, taken)
        return {"paused": paused}

    async def _resume_for_drain(self) -> None:
        def taken(answer: dict[str, Any], late: bool) -> None:
            self.serving.paused = False

        try:
            await self.desk.ask("resume", {}, taken)
        except OperationError as error:
            log.warning("engine.ask", method="resume", problem=error.message)

    async def drain(self, stop: bool, who: Who) -> Mapping[str, Any]:
        """Refuse what comes and finish what runs; with `stop` exit then."""
        self.serving.draining = True
        self.serving.leaving = self.serving.leaving or stop
        left = len(self.serving.journal)
        self.log.add("drain", f"drain asked for{' and stop' if stop else ''}", who=str(who), sequences=left)
        if stop:
            self.stop_asked()
        back = "" if self.serving.leaving else "`kvyard resume` takes requests again"
        return {"draining": True, "stop": stop, "sequences": left, **({"hint": back} if back else {})}

    async def dump(self) -> Mapping[str, Any]:
        """The whole state as JSON values."""
        engine: Mapping[str, Any]
        try:
            engine = await self.desk.ask("dump", {})
        except OperationError as error:
            engine = {"unavailable": error.message}
        return {
            "status": await self.status(),
            "requests": await self.requests(1_000_000),
            "events": self.log.last(1_000_000),
            "config": await self.config_show(),
            "tables": self.serving.tables(),
            "engine": engine,
        }

    def generate(self, call: GenerateCall, who: Who) -> AsyncIterator[Mapping[str, Any]]:
        """One request: deltas, then a last item with `finish_reason` and `usage`."""
        if self.text is None:
            raise OperationError("starting", "the tokenizer is still loading", "try again in a moment")
        return run_one(self.serving, self.text, call)

    async def model_list(self) -> Mapping[str, Any]:
        """The served model."""
        return {"models": [{"id": self.model.id, "path": self.model.path, "family": self.model.family}]}

    async def config_show(self) -> list[Mapping[str, Any]]:
        """Every setting with the value in force, default, origin, change and doc.

        `after_restart` is there where a reload has read a value that only a restart puts in force.
        """
        return rows_in_force(self.settings, self._started_with)


def reload_words(difference: Difference, keys: str, places: int, wanted: int) -> str:
    """What a reload changed and what waits for a restart; `places` of the `wanted` max_running are in force."""
    short = places < wanted
    live = [*(name for name in difference.live if not short or name != "max_running"), *([keys] if keys else [])]
    parts = [f"in force now: {', '.join(live) or 'nothing new'}"] if live or not short else []
    if short:
        parts.append(f"max_running is {places} now ({wanted} needs a restart)")
    if difference.restart:
        parts.append(f"needs a restart: {', '.join(difference.restart)}")
    return "; ".join(parts)


def rows_in_force(settings: Settings, begun: Settings) -> list[Mapping[str, Any]]:
    """`Settings.describe` of what was read last, with the values that are in force since the start with `begun`."""
    at_start = {row["name"]: row for row in begun.describe()}
    rows: list[Mapping[str, Any]] = []
    for row in settings.describe():
        now = row if row["change"] == "live" else at_start[row["name"]]
        if row["name"] == "max_running":
            now = {**row, "value": min(settings.max_running, begun.max_running)}
        rows.append(now if now["value"] == row["value"] else {**now, "after_restart": row["value"]})
    return rows


def _label(policy: Mapping[str, Any]) -> str:
    return f"{policy['kind']}/{policy['name']}"


class EngineRefused(Exception):
    """The engine said that it cannot start as asked."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused
