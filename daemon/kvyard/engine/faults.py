"""Test hooks: make the engine fail at a named point. Off and unreachable unless KVYARD_TEST_FAULTS is set.

The variable holds a JSON list of faults, each with
    point    `schedule`, `model`, `sample` or `outputs`: where in a step
    action   `kill` (SIGKILL), `segv`, `exit` (status 3), `raise` (any exception), `fail` (an error of that
             sequence alone), `block` (sleep for ever), `sleep` (`seconds`), `hold` (until the file `until` exists)
    token    only in a step with a sequence that contains this token id
    computed only with a sequence of which so many tokens have been computed: in its decode steps, for one
    restored only with a sequence whose KV comes back from the host pool in this step
    step     only in this step
    once     a file that must not exist and is created by the fault: so it happens once over restarts

KVYARD_TEST_CONDUCT holds a JSON object of `ConductLimits`, so that starving shows within a test's time.
`kvyard.engine.scripted` has a hook for the tokens themselves.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import structlog

from kvyard.core.conduct import ConductLimits
from kvyard.core.plan import Plan

log = structlog.get_logger(__name__)

VARIABLE = "KVYARD_TEST_FAULTS"
CONDUCT_VARIABLE = "KVYARD_TEST_CONDUCT"
Point = Literal["schedule", "model", "sample", "outputs"]


class SequenceFault(Exception):
    """One sequence cannot go on; the others can."""

    def __init__(self, sequence_id: int, message: str) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """One fault to be injected."""

    point: Point
    action: Literal["kill", "segv", "exit", "raise", "fail", "block", "sleep", "hold"]
    token: int | None = None
    computed: int = 0
    restored: bool = False
    step: int | None = None
    seconds: float = 0.0
    once: str | None = None
    until: str = ""


def asked(variable: str) -> str:
    """What a hook's variable holds, which is said in the log; empty, the normal case, turns the hook off."""
    text = os.environ.get(variable, "")
    if text:
        log.warning("engine.test_hook", variable=variable)
    return text


def conduct_limits() -> ConductLimits | None:
    """The limits of conduct asked for; None, the normal case, leaves the core's own."""
    text = asked(CONDUCT_VARIABLE)
    return msgspec.json.decode(text, type=ConductLimits) if text else None


class Faults:
    """The faults of this engine."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults

    @classmethod
    def from_environment(cls) -> Faults | None:
        """The faults asked for; None, the normal case, when there are none."""
        text = asked(VARIABLE)
        return cls(msgspec.json.decode(text, type=list[Fault])) if text else None

    def at(self, point: Point, plan: Plan) -> None:
        """A point of a step is reached."""
        for fault in self._faults:
            if fault.point != point or (fault.step is not None and fault.step != plan.step):
                continue
            guilty = self._guilty(fault, plan)
            if guilty is not None and self._first_time(fault):
                self._act(fault, guilty)

    @staticmethod
    def _guilty(fault: Fault, plan: Plan) -> int | None:
        """Id of the first sequence of the step that the fault is about."""
        for sequence_id, slot, computed, granted in _present(plan, fault.restored):
            if computed < fault.computed:
                continue
            if fault.token is None or np.any(plan.tokens[slot, : computed + granted] == fault.token):
                return sequence_id
        return None

    @staticmethod
    def _first_time(fault: Fault) -> bool:
        if fault.once is None:
            return True
        try:
            Path(fault.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @staticmethod
    def _act(fault: Fault, sequence_id: int) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "raise":
                raise RuntimeError("injected fault")
            case "fail":
                raise SequenceFault(sequence_id, "injected fault")
            case "block":
                time.sleep(1e6)
            case "sleep":
                time.sleep(fault.seconds)
            case "hold":
                while not Path(fault.until).exists():
                    time.sleep(0.005)


def _present(plan: Plan, restored: bool) -> list[tuple[int, int, int, int]]:
    """Id, slot, computed and granted tokens of those who get tokens, or of those who are copied back."""
    if not restored:
        columns = (plan.ids.tolist(), plan.slots.tolist(), plan.computed.tolist(), plan.granted.tolist())
        return list(zip(*columns, strict=True))
    back = {copy.id for copy in plan.copies if copy.direction == "in"}
    return [(came.id, came.slot, came.start, 0) for came in plan.admitted if came.id in back]
