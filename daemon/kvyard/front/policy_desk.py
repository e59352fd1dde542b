"""Which policies are in charge, as the front knows it: swaps, parameters, ejections, quarantine.

The engine decides at a step boundary and answers; `current` here never names what is not in charge. One
change at a time. What is in charge outlives the engine: a new one is started with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvyard.control.schema import QuarantineEntry, SwapResult
from kvyard.front.events import EventLog
from kvyard.front.operations import OperationError, Who
from kvyard.front.policy_listing import installed_version, vet
from kvyard.front.quarantine import Quarantine, concerns
from kvyard.link.messages import Ejected, EngineInfo, Reply
from kvyard.policy.base import BUILTIN, KINDS

CHANGE_TIMEOUT_S = 30.0
LONG_PAUSE_MS = 200.0
"""Milliseconds without a step from which on an operator is told in words: whoever reads a stream sees such a gap."""


Taken = Callable[[dict[str, Any], bool], None]
"""What is to be remembered of something that the engine has done: its result, and whether nobody waits for it."""


class EngineControl(Protocol):
    """How the engine is asked."""

    def __call__(self, method: str, params: dict[str, object], done: Any) -> None:  # noqa: ANN401 - a callback
        """Send; `done(reply)` is called once."""


class _EngineRefused(OperationError):
    """The engine said no."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.code or "refused", reply.error or "")
        self.about = reply.result
        """What it is about: `result` of the engine's `Reply`."""


@dataclass(slots=True)
class InCharge:
    """What a new engine is started with."""

    discipline: str | None
    policies: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Parts that differ from the discipline's own, by kind: name and parameters."""
    generation: int = 0
    discipline_params: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind, what an operator set when he swapped the discipline in, or later."""

    @property
    def named(self) -> str | None:
        """The discipline, None when single policies of another origin are in charge. Parameters do not change it."""
        return None if self.policies else self.discipline

    @property
    def changed(self) -> dict[str, Any]:
        """Parameters of a named discipline that an operator set, as `kind.name`."""
        if self.policies:
            return {}
        return {f"{kind}.{name}": v for kind, values in self.discipline_params.items() for name, v in values.items()}

    def set(self, kind: str, name: str, values: dict[str, Any]) -> None:
        """An operator set parameters of the policy of that kind, which is called `name`."""
        if kind in self.policies or self.discipline is None:
            self.policies[kind] = (name, {**self.policies.get(kind, (name, {}))[1], **values})
        else:
            self.discipline_params.setdefault(kind, {}).update(values)

    def put_out(self, kinds: Collection[str]) -> None:
        """The built-ins of these kinds took over; all three together are a discipline, too."""
        self.policies |= dict.fromkeys(kinds, (BUILTIN, {}))
        if all(self.policies.get(kind) == (BUILTIN, {}) for kind in KINDS):
            self.discipline, self.policies, self.discipline_params = BUILTIN, {}, {}

    def parts(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """As `Start.policies` wants it."""
        if not self.discipline_params or self.discipline is None:
            return self.policies
        return {"discipline": (self.discipline, self.discipline_params), **self.policies}


class PolicyDesk:
    """Carries out an operator's wishes about policies and remembers what is in charge."""

    def __init__(
        self,
        discipline: str,
        quarantine: Quarantine,
        log: EventLog,
        ask: EngineControl,
        installed: Callable[[str], str] = installed_version,
    ) -> None:
        """`installed` tells the version in which `kind/name` is installed, empty when it is not."""
        self._installed = installed
        self.in_charge = InCharge(discipline)
        self.quarantine = quarantine
        self.ejections: dict[str, int] = {}
        """Ejections since the start, by `kind/name`."""
        self.came_late: Callable[[], None] = lambda: None
        """Called when a change has happened whose call had been given up."""
        self._loading: list[Collection[str]] = []
        """What the engine was asked to put in charge and has not answered, by `kind/name`."""
        self._log = log
        self._ask = ask
        self._change = asyncio.Lock()

    def loads(self, policy: str) -> bool:
        """The engine may be about to put this one in charge, itself or as a part: it was asked to."""
        return any(policy in asked for asked in self._loading)

    async def ask(
        self, method: str, params: Mapping[str, Any], taken: Taken | None = None, loads: Collection[str] = ()
    ) -> dict[str, Any]:
        """Ask the engine, perhaps to load policies. Raises OperationError with its reason.

        `taken` is called at the very moment in which the engine says that it has done it, ahead of whatever it
        says next, and also when the caller was told in the meantime that there is no answer.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def done(reply: Reply) -> None:
            self._loading.remove(loads)
            if taken is not None and reply.error is None:
                taken(reply.result, answer.done())
            if not answer.done():
                answer.set_result(reply)

        self._loading.append(loads)
        self._ask(method, dict(params), done)
        try:
            reply = await asyncio.wait_for(answer, CHANGE_TIMEOUT_S)
        except TimeoutError:
            raise OperationError(
                "no-answer",
                f"the engine did not answer {method} within {CHANGE_TIMEOUT_S:.0f} s",
                "it may be in a very long step and do it after all; see `kvyard status`",
            ) from None
        if reply.error is not None:
            raise _EngineRefused(reply)
        return reply.result

    async def swap(self, kind: str, name: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        """Put a policy or a discipline in charge; returns when it is."""
        self._check_kind(kind)
        async with self._one_change():
            blocked = f"{kind}/{name}" in self.blocked_names()
            loads: Collection[str] = () if blocked else await vet(kind, name)
            version = await asyncio.to_thread(self._installed, f"{kind}/{name}")
            asked = {"kind": kind, "name": name, "params": dict(params), "quarantined": self.blocked_names()}

            def taken(answer: dict[str, Any], late: bool) -> None:
                result = self._result(answer)
                self._put_in_charge(kind, name, params, result.generation)
                said = f"{kind} {f'{name} {version}'.strip()} is in charge"
                self._changed("swap", said, who, result, late, version=version, pause_ms=result.pause_ms)

            try:
                return self._result(await self.ask("swap", asked, taken, loads))
            except _EngineRefused as error:
                raise self._held_back(error) from None

    def _put_in_charge(self, kind: str, name: str, params: Mapping[str, Any], generation: int) -> None:
        if kind == "discipline":
            self.in_charge = InCharge(name, {}, generation, _by_kind(params))
        else:
            self.in_charge.policies[kind] = (name, dict(params))
            self.in_charge.generation = generation

    def _changed(self, event: str, said: str, who: Who, result: SwapResult, late: bool, **data: object) -> None:
        """Tell of a change; `late` when its call had been given up."""
        self._log.add(event, told(said, late), who=str(who), generation=result.generation, **data)
        if late:
            self.came_late()

    def _held_back(self, error: _EngineRefused) -> OperationError:
        """A refusal for the quarantine with its end and the other way out; the engine knows the names alone."""
        policy = error.about.get("policy") if error.code == "quarantined" else None
        entry = next((e for e in self.quarantine.active() if e.policy == policy), None)
        if entry is None:
            return error
        held = f"version {entry.version} of it" if entry.version else "it"
        until = "" if entry.until is None else time.strftime(" until %Y-%m-%d %H:%M:%S", time.localtime(entry.until))
        release = f"`kvyard policy release {entry.policy}` lets it be loaded again"
        if not self._installed(entry.policy):
            hint = f"{held} is in quarantine{until}; look at `kvyard policy list` for what keeps it from being found"
            return OperationError("unknown", f"{entry.policy} is not installed", hint)
        return OperationError(
            error.code,
            f"{entry.policy} is in quarantine{until} ({entry.code}: {entry.message})",
            f"install a corrected version, which is free at once, or {release}" if entry.version else release,
        )

    async def set(self, kind: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        """Change live parameters of a policy in charge."""
        if kind not in KINDS:
            raise OperationError("bad-kind", f"{kind!r} is not a kind of policy", f"one of {', '.join(KINDS)}")
        async with self._one_change():

            def taken(answer: dict[str, Any], late: bool) -> None:
                result = self._result(answer, params)
                self.in_charge.set(kind, result.current[kind], result.params)
                self.in_charge.generation = result.generation
                said = " ".join(f"{name}={value}" for name, value in result.params.items())
                self._changed("set", f"{kind}: {said}", who, result, late)

            return self._result(await self.ask("set", {"kind": kind, "params": dict(params)}, taken), params)

    def release(self, policy: str, who: Who) -> None:
        """Let a quarantined policy be loaded again. Raises OperationError."""
        if not self.quarantine.release(policy):
            away = ", ".join(entry.policy for entry in self.quarantine.active()) or "none"
            raise OperationError("not-quarantined", f"{policy} is not in quarantine", f"in quarantine: {away}")
        self._log.add("release", f"{policy} may be loaded again", who=str(who))

    def ejected(self, message: Ejected) -> QuarantineEntry:
        """The engine put a policy out; the built-in of its kind is in charge, unless the policy had left before."""
        if not message.in_charge:
            return self._put_away(message, message.version, "was put out after it had left", "nothing changed")
        kinds = {policy.partition("/")[0] for policy in (message.policy, *message.with_it)}
        self.in_charge.put_out(kinds & set(KINDS))
        self.in_charge.generation += 1
        seen = {"snapshot": message.snapshot, "dump": message.dump, "decisions": message.decisions}
        return self._put_away(message, message.version, "was put out", "the built-in took over", **seen)

    def candidate_lost(self, message: Ejected, replaces_itself: bool = False) -> QuarantineEntry:
        """A candidate ended the engine while it was loaded or took over: never in charge, and what was, stays.

        `replaces_itself`: what was has the same name and is a version of it from before, which no engine finds
        again, or the very same.
        """
        then = "nothing changed"
        if replaces_itself:
            self.in_charge.put_out({message.policy.partition("/")[0]} & set(KINDS))
            self.in_charge.generation += 1
            then = "what was in charge by that name cannot be loaded again, and the built-in took over"
        # What is loaded is what is installed, in whichever version it may be in charge.
        return self._put_away(message, self._installed(message.policy), "was not put in charge", then)

    def _put_away(self, message: Ejected, version: str, happened: str, then: str, **seen: object) -> QuarantineEntry:
        """Count it, into quarantine with it, and tell."""
        self.ejections[message.policy] = self.ejections.get(message.policy, 0) + 1
        entry = self.quarantine.add(message.policy, message.code, message.message, version)
        self._log.add(
            "ejected",
            f"{message.policy} {happened} ({message.code}: {message.message}); {then}",
            policy=message.policy,
            code=message.code,
            step=message.step,
            traceback=message.traceback,
            until=entry.until,
            **seen,
        )
        return entry

    def engine_ready(self, info: EngineInfo) -> None:
        """A new engine says what it runs with; what it could not use is no longer in charge."""
        self.in_charge.generation = max(self.in_charge.generation, info.generation)
        meant = self.in_charge.discipline or "mixed"
        lost = self._not_taken(info)
        if lost:
            parts = self.in_charge.policies
            named = [f"{kind}/{parts[kind][0]}" if kind in parts else kind for kind in lost]
            self.in_charge.put_out(lost)
            why = "; ".join(info.notes) or f"{', '.join(named)} cannot be used, the daemon's log says why"
            self._log.add(
                "error",
                f"{why}; the built-in took over. `kvyard policy swap` puts it in charge again when that is mended",
                wanted=meant,
                kinds=lost,
            )

    def _not_taken(self, info: EngineInfo) -> list[str]:
        """Kinds whose built-in is in charge in place of what was asked for."""
        now, parts = self.in_charge, self.in_charge.policies
        lost = [kind for kind, (name, _) in parts.items() if info.policies.get(kind) == BUILTIN != name]
        rest = [kind for kind in KINDS if kind not in parts]
        if info.notes and now.discipline != BUILTIN and all(info.policies.get(kind) == BUILTIN for kind in rest):
            lost += rest
        return lost

    def _check_kind(self, kind: str) -> None:
        if kind != "discipline" and kind not in KINDS:
            raise OperationError(
                "bad-kind", f"{kind!r} is not a kind of policy", f"one of discipline, {', '.join(KINDS)}"
            )

    def blocked_names(self) -> list[str]:
        """`kind/name` of what may not be loaded now, as it is installed."""
        away = self.quarantine.active()
        return list(dict.fromkeys(e.policy for e in away if concerns(e, self._installed(e.policy))))

    def _one_change(self) -> _OneChange:
        return _OneChange(self._change)

    @staticmethod
    def _result(answer: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> SwapResult:
        """`params` are those that were set; the policy may have taken them as something else, 3 as 3.0."""
        pause_ms = float(answer.get("pause_ms", 0.0))
        as_taken = answer.get("params", {})
        return SwapResult(
            ok=True,
            generation=int(answer["generation"]),
            current=dict(answer["current"]),
            previous=dict(answer["previous"]),
            step=int(answer["step"]),
            message=_long_pause(pause_ms),
            pause_ms=pause_ms,
            params={name: as_taken.get(name, value) for name, value in (params or {}).items()},
        )


def told(said: str, late: bool) -> str:
    """What happened, for the event log; `late` where the call for it had been given up."""
    return f"{said}; it took longer than the call for it waited" if late else said


def _long_pause(pause_ms: float) -> str:
    """What to say of a load that stopped the streams for long; empty when it did not."""
    if pause_ms < LONG_PAUSE_MS:
        return ""
    return (
        f"the streams stood still for {pause_ms / 1000:.1f} s while it was imported and constructed; "
        "docs/plugins.md says how a plugin avoids that"
    )


def _by_kind(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A discipline's parameters, which may be written `{kind: {name: value}}` or `{"kind.name": value}`."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in params.items():
        kind, _, name = key.partition(".")
        found.setdefault(kind, {}).update({name: value} if name else value)
    return found


class _OneChange:
    """Refuses a second change while one is under way, instead of queueing it behind the operator's back."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        if self._lock.locked():
            raise OperationError("busy", "another policy change is under way", "try again when it is done")
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
