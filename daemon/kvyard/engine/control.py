"""Operators' actions inside the engine: carried out at the step boundary, answered when they have happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import structlog

from kvyard.core.advice import Exit
from kvyard.core.guard import Fault, NotLoaded
from kvyard.core.remains import Blame
from kvyard.core.scheduler import Scheduler
from kvyard.core.swap import SwapBusy, SwapTicket
from kvyard.engine.policies import Loader, Quarantined, describe_builtin, describe_policy
from kvyard.engine.recorder import Recorder
from kvyard.link.messages import Control, Ejected, PolicyState, Reply
from kvyard.policy.base import KINDS, Kind, Policy
from kvyard.policy.params import ParamError
from kvyard.policy.registry import RegistryError

log = structlog.get_logger(__name__)

EXPORT_S = 5.0
"""Interval between two exports of the policies' state, in seconds."""

BROKEN = "the new values broke the policy in charge, which was put out"


class Known(NamedTuple):
    """A policy in the words of operators."""

    label: str
    """`kind/name`."""
    version: str
    in_charge: bool


class ControlError(Exception):
    """An action was refused, or failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Controls:
    """Answers `Control` messages. A change of policies may take several boundaries; its answer waits."""

    def __init__(
        self,
        scheduler: Scheduler,
        loader: Loader,
        recorder: Recorder,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._scheduler = scheduler
        self._loader = loader
        self._recorder = recorder
        self.tables: Callable[[], dict[str, int]] = dict
        """Sizes of what the loop remembers of sequences, for the operator's report."""
        self._next_export = 0.0
        self._changing: tuple[int, SwapTicket, dict[str, Any]] | None = None
        self._methods: dict[str, Callable[[Control], dict[str, Any] | None]] = {
            "policies": lambda message: self._policies(),
            "builtin": lambda message: describe_builtin(str(message.params["kind"]), self._loader),
            "swap": self._swap,
            "set": self._set,
            "pause": lambda message: self._pause(True),
            "resume": lambda message: self._pause(False),
            "places": self._places,
            "dump": lambda message: self._scheduler.dump() | {"tables": self.tables()},
            "fence": lambda message: {},
        }

    def answer(self, message: Control) -> Reply | None:
        """Carry it out; None when the answer comes later through `replies`."""
        method = self._methods.get(message.method)
        try:
            if method is None:
                raise ControlError("unknown-method", f"the engine knows no action {message.method!r}")
            result = method(message)
        except Quarantined as error:
            return Reply(message.ticket, {"policy": error.policy}, error=str(error), code=error.code)
        except (ControlError, RegistryError) as error:
            return Reply(message.ticket, error=str(error), code=getattr(error, "code", "refused"))
        except ParamError as error:
            return Reply(message.ticket, error=str(error), code="bad-params")
        except SwapBusy as error:
            return Reply(message.ticket, error=str(error), code="busy")
        except Fault as fault:
            return Reply(message.ticket, error=f"{fault.kind}: {fault.message}", code=fault.code)
        return None if result is None else Reply(message.ticket, result)

    def replies(self) -> list[Reply]:
        """Answers to changes that are over now."""
        if self._changing is None or not self._changing[1].over:
            return []
        number, ticket, extra = self._changing
        self._changing = None
        if not ticket.ok:
            if ticket.changes and ticket.trace:  # one that was in charge has an exit record instead
                names = {kind: ticket.wanted.name(kind) for kind in ticket.changes}
                log.warning("policy.refused", candidates=names, problem=ticket.error, traceback=ticket.trace)
            return [Reply(number, error=_refusal(ticket), code=ticket.code or "refused")]
        self._recorder.generation += 1
        names = {kind: ticket.wanted.name(kind) for kind in KINDS}
        before = {kind: ticket.previous.name(kind) for kind in KINDS}
        result = {
            "generation": self._recorder.generation,
            "current": names,
            "previous": before,
            "versions": {kind: self._loader.version(ticket.wanted.get(kind)) for kind in KINDS},
            "step": ticket.step,
            **extra,
        }
        return [Reply(number, result)]

    def exported(self, now: float) -> PolicyState | None:
        """State of the policies in charge, every EXPORT_S seconds, for the engine that may follow this one."""
        if now < self._next_export:
            return None
        self._next_export = now + EXPORT_S
        state = self._scheduler.export_states()
        return PolicyState(state) if state else None

    def ejections(self) -> list[Ejected]:
        """Policies put out since the last call."""
        return [self._ejected(exit_) for exit_ in self._scheduler.take_exits()]

    def known_as(self, kind: Kind, policy: Policy) -> Known:
        """How a policy is known to operators, and whether it is in charge."""
        in_charge = self._scheduler.policies.get(kind) is policy
        return Known(self._loader.label(kind, policy), self._loader.version(policy), in_charge)

    def blamed(self, blame: Blame[Known]) -> list[Ejected]:
        """Put a policy out for what it left behind; one that has left already goes into quarantine all the same."""
        policy, version, in_charge = blame.known_as
        step = self._scheduler.ledger.step
        if not in_charge:
            return [Ejected(policy, blame.code, blame.message, step, blame.trace, version=version, in_charge=False)]
        with self._scheduler.guard.armed():
            self._scheduler.advice.eject(Fault(blame.kind, blame.code, blame.message, blame.trace))
        return self.ejections()

    def _ejected(self, exit_: Exit) -> Ejected:
        self._recorder.generation += 1
        return Ejected(
            policy=f"{exit_.kind}/{exit_.name}",
            code=exit_.code,
            message=exit_.message,
            step=exit_.step,
            traceback=exit_.traceback,
            snapshot=exit_.snapshot,
            dump=exit_.dump,
            exported=exit_.exported,
            with_it=list(exit_.with_it),
            decisions=exit_.decisions,
            version="" if exit_.policy is None else self._loader.version(exit_.policy),
        )

    # ---- methods

    def _policies(self) -> dict[str, Any]:
        policies = self._scheduler.policies
        about = self._scheduler.advice.about
        rows = [
            describe_policy(kind, policies.name(kind), policies.get(kind), about(kind), self._loader)
            for kind in KINDS
        ]
        return {
            "policies": rows,
            "discipline": policies.discipline,
            "generation": self._recorder.generation,
            "in_force": self._in_force(),
        }

    def _in_force(self) -> dict[str, Any]:
        ledger = self._scheduler.ledger
        limits = ledger.limits
        return {
            **self._scheduler.advice.in_force(),
            "max_running": ledger.max_running,
            "max_step_tokens": limits.max_step_tokens,
            "kv_blocks": limits.blocks,
            "prefix_reuse": limits.prefix_cache,
            "host_blocks": limits.swap_blocks,
        }

    def _swap(self, message: Control) -> dict[str, Any] | None:
        kind, name = str(message.params["kind"]), str(message.params["name"])
        params = cast("Mapping[str, Any]", message.params.get("params") or {})
        blocked = set(cast("list[str]", message.params.get("quarantined") or []))
        began = self._clock_ns()
        try:
            changes, names, discipline = self._scheduler.guard.load(
                lambda: self._loader.candidate(kind, name, params, blocked)
            )
        except NotLoaded as error:
            raise ControlError(error.code, f"{kind}/{name} cannot be loaded: {error}") from None
        pause_ms = round((self._clock_ns() - began) / 1e6, 3)
        ticket = self._scheduler.swap(changes, names=names, discipline=discipline)
        return self._begin(message.ticket, ticket, {"pause_ms": pause_ms})

    def _set(self, message: Control) -> dict[str, Any] | None:
        kind = cast(Kind, message.params["kind"])
        try:
            ticket = self._scheduler.set_params(kind, cast("Mapping[str, Any]", message.params["params"]))
        except Fault as fault:
            raise ControlError(fault.code, f"{BROKEN}: {fault.message}") from None
        return self._begin(message.ticket, ticket, {"params": ticket.params})

    def _begin(self, number: int, ticket: SwapTicket, extra: dict[str, Any]) -> dict[str, Any] | None:
        self._changing = (number, ticket, extra)
        done = self.replies()
        if not done:
            return None
        if done[0].error is not None:
            raise ControlError(done[0].code, done[0].error)
        return done[0].result

    def _places(self, message: Control) -> dict[str, Any]:
        """How many may run at once from now on. What runs beyond it goes on; nobody comes in until it is below."""
        ledger, wanted = self._scheduler.ledger, message.params["max_running"]
        built_for = ledger.limits.max_running
        if type(wanted) is not int or not 1 <= wanted <= built_for:
            raise ControlError("bad-params", f"max_running {wanted!r} is not between 1 and {built_for} of the start")
        ledger.max_running = wanted
        return {"max_running": wanted}

    def _pause(self, paused: bool) -> dict[str, Any]:
        if paused:
            self._scheduler.pause()
        else:
            self._scheduler.resume()
        return {"paused": paused}


def _refusal(ticket: SwapTicket) -> str:
    """Why a change did not come about; one without candidates set parameters of a policy in charge."""
    if ticket.changes:
        return f"the candidate was refused: {ticket.error}"
    return f"{BROKEN}: {ticket.error}" if ticket.code else f"the new values went with the policy: {ticket.error}"
