"""A serving side without an engine process: what the engine would send is written by the test."""

from __future__ import annotations

import signal

import numpy as np
from kvyard.front.engine_child import EngineDeath
from kvyard.front.service import Job
from kvyard.front.serving import Serving
from kvyard.link.codec import ToEngine
from kvyard.link.messages import Control, EngineInfo, FinishReason, Outputs, Sampling, Submit
from kvyard.link.progress import EnginePhase, Progress


def info(**changes: object) -> EngineInfo:
    """What an engine of 4 places and a context of 100 tokens says of itself."""
    values: dict[str, object] = {
        "pid": 1,
        "backend": "cpu",
        "device": "a CPU",
        "dtype": "float32",
        "deterministic": True,
        "kv_blocks": 64,
        "block_size": 16,
        "kv_bytes": 1 << 20,
        "max_running": 4,
        "max_step_tokens": 64,
        "max_model_len": 100,
        "vocab_size": 1000,
        "eos_ids": [2],
        "policies": {"admission": "vllm"},
        "generation": 0,
    }
    return EngineInfo(**{**values, **changes})  # type: ignore[arg-type]  # keywords checked by msgspec


def job(request_id: str = "r", prompt: int = 3, max_new: int = 5, **changes: object) -> Job:
    values: dict[str, object] = {
        "request_id": request_id,
        "prompt": list(range(prompt)),
        "max_new": max_new,
        "sampling": Sampling(seed=7),
    }
    return Job(**{**values, **changes})  # type: ignore[arg-type]


def outputs(
    tokens: dict[int, int],
    *,
    step: int = 1,
    at: float = 1.0,
    finished: list[tuple[int, FinishReason]] | None = None,
    admitted: list[tuple[int, float, int]] | None = None,
) -> Outputs:
    return Outputs(
        step=step,
        at=at,
        ids=np.array(list(tokens), np.int64).tobytes(),
        tokens=np.array(list(tokens.values()), np.int32).tobytes(),
        finished=finished or [],
        admitted=admitted or [],
    )


def death(
    ids: tuple[int, ...],
    returncode: int = -signal.SIGSEGV,
    hang: str | None = None,
    phase: EnginePhase = EnginePhase.MODEL,
) -> EngineDeath:
    """An engine that died in that phase with these sequences in its step."""
    seen = Progress(1, phase, 0, 5, 0, "admission/x", ids)
    return EngineDeath(returncode, seen, ready=True, oom=False, hang=hang, stack="")


class Counts:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def queued(self, seconds: float) -> None:
        self.seen.append(("queued", seconds))

    def first_token(self, seconds: float) -> None:
        self.seen.append(("first", seconds))

    def inter_token(self, seconds: float, count: int = 1) -> None:
        self.seen.append(("inter", seconds, count))

    def finished(
        self, reason: str, e2e_s: float, prompt_tokens: int, output_tokens: int, preemptions: int, code: str = ""
    ) -> None:
        self.seen.append(("finished", reason, code, prompt_tokens, output_tokens, preemptions))

    def counts(self, running: int, waiting: int) -> None:
        self.seen.append(("counts", running, waiting))

    def refused(self, code: str) -> None:
        self.seen.append(("refused", code))

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [item[1:] for item in self.seen if item[0] == kind]


class Yard:
    """A `Serving` whose engine is the test."""

    def __init__(self, *, max_waiting: int = 8, max_waiting_tokens: int = 1000, up: bool = True) -> None:
        self.sent: list[ToEngine] = []
        self.counts = Counts()
        self.now = 0.0
        self.serving = Serving(
            self.sent.append,
            self.counts,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            clock=lambda: self.now,
        )
        if up:
            self.serving.engine_up(info())

    def taken(self) -> list[int]:
        """Ids that the engine was given since the last call."""
        ids = [message.sequence.id for message in self.sent if isinstance(message, Submit)]
        self.sent.clear()
        return ids

    def fences(self) -> list[int]:
        """Tickets of fences that the engine was asked for."""
        return [message.ticket for message in self.sent if isinstance(message, Control)]
