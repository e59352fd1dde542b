"""Puts together what `kvyard status` and the first screen show."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from kvyard.control.schema import (
    EngineStatus,
    Limits,
    ModelStatus,
    PolicyStatus,
    RequestPage,
    RequestRow,
    Status,
)
from kvyard.front.engine_states import EngineState
from kvyard.front.journal import Entry
from kvyard.front.policy_desk import PolicyDesk
from kvyard.front.serving import Serving
from kvyard.front.settings import Settings
from kvyard.front.stats import Stats
from kvyard.front.supervisor import Supervisor
from kvyard.link.messages import EngineInfo
from kvyard.policy.base import KINDS


@dataclass(slots=True)
class Sources:
    """Where a status comes from."""

    version: str
    started: float
    address: str
    model_id: str
    family: str
    settings: Settings
    serving: Serving
    supervisor: Supervisor
    stats: Stats
    desk: PolicyDesk


def build_status(s: Sources, in_force: list[dict[str, Any]], paused: bool) -> Status:
    """The whole status; `in_force` is what the engine last said of its policies."""
    info = s.serving.info
    return Status(
        version=s.version,
        uptime_s=time.monotonic() - s.started,
        ready=s.serving.ready,
        draining=s.serving.draining,
        paused=paused,
        address=s.address,
        model=_model(s, info),
        engine=_engine(s),
        requests=s.stats.request_counts(),
        kv=s.stats.kv_status(info),
        limits=Limits(
            max_running=info.max_running if info else s.settings.max_running,
            max_step_tokens=info.max_step_tokens if info else s.settings.max_step_tokens,
            kv_blocks=info.kv_blocks if info else s.settings.kv_blocks or 0,
            max_waiting=s.serving.max_waiting,
        ),
        rates=s.stats.rates(),
        latency=s.stats.latency(),
        errors=dict(s.stats.errors),
        policies=[_policy(s, policy) for policy in in_force],
        discipline=s.desk.in_charge.named,
        generation=s.desk.in_charge.generation,
        quarantine=s.desk.quarantine.active(),
        changed=s.desk.in_charge.changed,
        pid=os.getpid(),
    )


def _model(s: Sources, info: EngineInfo | None) -> ModelStatus:
    return ModelStatus(
        id=s.model_id,
        family=s.family,
        max_model_len=info.max_model_len if info else 0,
        dtype=info.dtype if info else s.settings.dtype,
        backend=info.backend if info else s.settings.device,
        device=info.device if info else "",
        deterministic=s.settings.deterministic,
    )


def _engine(s: Sources) -> EngineStatus:
    supervisor = s.supervisor
    seen = supervisor.progress()
    state = "draining" if s.serving.draining and supervisor.state is EngineState.READY else supervisor.state.value
    return EngineStatus(
        state=state,
        pid=supervisor.pid,
        restarts=supervisor.restarts,
        step=seen.step if seen is not None else 0,
        uptime_s=time.monotonic() - supervisor.ready_at if supervisor.ready_at is not None else 0.0,
        last_step_age_s=s.stats.last_step_age(),
        reason=s.serving.not_ready_reason,
    )


def _policy(s: Sources, policy: dict[str, Any]) -> PolicyStatus:
    kind, name = str(policy["kind"]), str(policy["name"])
    use = s.stats.policy(kind)
    p50, p99 = use.quantiles_us()
    return PolicyStatus(
        kind=kind,
        name=name,
        version=str(policy.get("version", "")),
        distribution=str(policy.get("distribution", "")),
        params={item["name"]: item["value"] for item in policy.get("params", [])},
        calls=use.calls,
        p50_us=p50,
        p99_us=p99,
        overrides=dict(use.overrides),
        ejections=s.desk.ejections.get(f"{kind}/{name}", 0),
        ejected={
            label.removeprefix(f"{kind}/"): times
            for label, times in s.desk.ejections.items()
            if label.startswith(f"{kind}/")
        },
    )


def placeholder_policies(info: EngineInfo | None) -> list[dict[str, Any]]:
    """What is known of the policies before the engine was asked: their names."""
    names = info.policies if info is not None else {}
    return [{"kind": kind, "name": names[kind], "params": []} for kind in KINDS if kind in names]


def request_page(s: Sources, limit: int) -> RequestPage:
    """Unfinished sequences: running first in order of admission, then waiting in order of arrival."""
    entries = sorted(s.serving.journal, key=_order)
    now = time.monotonic()
    block_size = s.serving.info.block_size if s.serving.info is not None else 1
    rows = [_row(s, entry, now, block_size) for entry in entries[:limit]]
    return RequestPage(total=len(entries), rows=rows)


def _order(entry: Entry) -> tuple[int, float, int]:
    running = entry.state == "running"
    return (0 if running else 1, entry.admitted_at or 0.0 if running else 0.0, entry.id)


def _row(s: Sources, entry: Entry, now: float, block_size: int) -> RequestRow:
    reason = "" if entry.state == "running" else entry.reason or s.stats.waiting.reason(entry.id)
    return RequestRow(
        id=entry.id,
        request_id=entry.request_id,
        state=entry.state,
        reason=reason,
        age_s=now - entry.sequence.arrived,
        priority=entry.sequence.priority,
        tenant=entry.sequence.tenant,
        prompt_tokens=entry.prompt_tokens,
        computed_tokens=entry.computed,
        output_tokens=entry.outputs,
        max_new=entry.sequence.max_new,
        blocks=-(-entry.computed // block_size) if entry.state == "running" else 0,
        preemptions=entry.preemptions,
    )
