"""Prometheus metrics: `kvyard_*`, and the `vllm:` names that routers and dashboards already read.

Every series is there from the start, so that a rate over a rare event is right from its first occurrence.
Labels take known values alone; anything else counts as `other`, so no client and no policy can make series
without end. Nothing here raises into the serving path: a fault is logged once, counted, and passed over.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec

import structlog
from prometheus_client import CollectorRegistry

from kvyard import __version__
from kvyard.front.series import Series
from kvyard.front.stats import Stats
from kvyard.link.messages import EngineInfo
from kvyard.link.record import StepRecord
from kvyard.policy.base import KINDS
from kvyard.policy.faults import CODES

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

OUTCOMES: Final = ("stop", "length", "cancelled", "error")
HOWS: Final = ("recompute", "swap", "other")
WAIT_REASONS: Final = ("queued", "slots", "budget", "blocks", "chunk", "sibling", "paused", "recovering", "policy")
"""Reasons of the core; any other text is a policy's own and counts as `policy`."""
OVERRIDE_CAUSES: Final = ("alone", "needed-by-newcomer", "no-progress", "no-victim", "other")
EJECTION_CODES: Final = (*CODES, "other")
REFUSAL_CODES: Final = (
    "queue_full", "context_length_exceeded", "empty_prompt", "too_many_sequences", "model_not_found", "chat_template",
    "invalid_value", "invalid_type", "invalid_json", "missing_required_parameter", "duplicate_field",
    "unsupported_parameter", "body_too_large", "bad_request", "invalid_api_key", "starting", "draining",
    "request_timeout", "headers_too_large", "invalid_http", "not_found", "method_not_allowed", "unsupported_endpoint",
    "cors_refused", "other",
)  # fmt: skip
CUTS: Final = ("buffer", "stalled")
PARTS: Final = ("inbox", "schedule", "model", "sample", "outputs", "gap")

TTFT_BOUNDS: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BOUNDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    40,
    80,
)
E2E_BOUNDS: Final = (
    .01, .05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_BOUNDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)
POLICY_BOUNDS: Final = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
TOKEN_BOUNDS: Final = tuple(
    digit * 10**power for power in range(6) for digit in (1, 2, 5) if digit * 10**power <= 200_000
)
STEP_TOKEN_BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTION_BOUNDS: Final = (0, 1, 2, 3, 4, 5, 10, 20)

_log = structlog.get_logger("kvyard.metrics")
P = ParamSpec("P")


def _contained(method: Callable[Concatenate[Metrics, P], None]) -> Callable[Concatenate[Metrics, P], None]:
    @functools.wraps(method)
    def call(self: Metrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.fault(method.__name__)

    return call


class Metrics:
    """The series of one daemon, and the rolling statistics fed by the same events (`stats`).

    Durations are in seconds. Sequences count singly: a request with `n` 3 begins and ends three times.
    """

    def __init__(self, model_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = Stats(clock)
        self.registry = CollectorRegistry(auto_describe=False)
        """For anybody who wants prometheus_client's own exposition."""
        self._faults_logged: set[str] = set()
        self._total_blocks = 0
        self._series = Series((("model_name", model_id),))
        self._declare_state()
        self._declare_requests()
        self._declare_steps()
        self._declare_policies()
        self._declare_aliases()
        self.registry.register(self._series)

    # ---- events --------------------------------------------------------------------------------------------

    @_contained
    def engine(self, info: EngineInfo) -> None:
        """An engine serves: its limits and an empty pool."""
        self._total_blocks = info.kv_blocks
        self._engine_up.value = 1
        self._block_size.value = info.block_size
        self._kv_bytes.value = info.kv_bytes
        self._limits["running"].value = info.max_running
        self._limits["step_tokens"].value = info.max_step_tokens
        self._limits["model_len"].value = info.max_model_len
        self._generation.value = info.generation
        self._set_blocks(0, 0, info.kv_blocks)
        self._describe_engine(info)
        self.stats.engine(info)

    @_contained
    def places(self, max_running: int) -> None:
        """So many sequences may run at once from now on."""
        self._limits["running"].value = max_running

    @_contained
    def step(self, record: StepRecord) -> None:
        """A step record."""
        stats = self.stats
        stats.step(record)
        self._set_counts(record.running, record.waiting)
        self._swapped.value = record.swapped
        self._set_blocks(record.blocks_used, record.blocks_cached, record.blocks_free)
        self._generation.value = record.generation
        self._step_tokens["prompt"].inc(record.prompt_tokens)
        self._step_tokens["decode"].inc(record.decode_tokens)
        t = record.timings
        nanoseconds = (t.inbox, t.schedule, t.model, t.sample, t.outputs, t.gap)
        for cell, spent in zip(self._part_cells, nanoseconds, strict=True):
            cell.inc(spent * 1e-9)
        if tokens := record.prompt_tokens + record.decode_tokens:
            self._tokens_per_step.observe(tokens)
            self._step_seconds.observe(sum(nanoseconds[:-1]) * 1e-9)
        for _, cached in record.admitted:
            self._admissions.inc()
            self._hit_tokens.inc(cached)
        self._all_preemptions.inc(len(record.preempted))
        for event in record.preempted:
            self._preemptions[event.how].inc()
            self._preempted_tokens[event.how].inc(event.tokens)
        for cost in record.policies:
            self._policy_calls[cost.kind].inc(cost.calls)
            kind = cost.kind if cost.kind in KINDS else "other"
            self._policy_seconds[kind].observe(cost.ns * 1e-9)
            for cause, count in cost.overrides.items():
                self._overrides[kind][cause].inc(count)

    @_contained
    def counts(self, running: int, waiting: int) -> None:
        """Correct the gauges between steps: the last one was cancelled, the queue grew, the engine is gone."""
        self.stats.counts(running, waiting)
        self._set_counts(running, waiting)

    @_contained
    def queued(self, seconds: float) -> None:
        """A sequence came in for the first time, this long after its arrival."""
        self._queue_time.observe(seconds)
        self.stats.queued(seconds)

    @_contained
    def first_token(self, seconds: float) -> None:
        """A sequence's first output token, this long after its arrival. Counts the token."""
        self._ttft.observe(seconds)
        self._output_tokens.inc()
        self.stats.first_token(seconds)

    @_contained
    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` further output tokens, each this long after the one before. Counts the tokens."""
        self._itl.observe(seconds, count)
        self._output_tokens.inc(count)
        self.stats.inter_token(seconds, count)

    @_contained
    def finished(
        self,
        reason: str,
        e2e_s: float,
        prompt_tokens: int,
        output_tokens: int,
        preemptions: int,
        code: str = "",
    ) -> None:
        """A sequence ended for a reason of OUTCOMES; `code` says which error.

        `prompt_tokens` counts once per request: hand 0 for all but the first of its sequences.
        """
        outcome = reason if reason in OUTCOMES else "error"
        self._requests[outcome].inc()
        self._e2e.observe(e2e_s)
        self._prompt_tokens.inc(prompt_tokens)
        if prompt_tokens:
            self._request_prompt.observe(prompt_tokens)
        self._request_output.observe(output_tokens)
        self._request_preemptions.observe(preemptions)
        self.stats.ended(outcome, e2e_s, code or reason)

    @_contained
    def refused(self, code: str) -> None:
        """A request was not accepted."""
        self._refused[code].inc()
        self.stats.refused += 1

    @_contained
    def cut(self, reason: str) -> None:
        """A client that did not read was cut off for a reason of CUTS."""
        self._cut[reason].inc()

    @_contained
    def ejected(self, policy: str, code: str) -> None:
        """A policy (`kind/name`) was put out."""
        kind = policy.partition("/")[0]
        self._ejections[kind if kind in KINDS else "other"][code].inc()

    @_contained
    def policies(self, in_charge: dict[str, str], generation: int) -> None:
        """Who is in charge, by kind; on every change."""
        self._generation.value = generation
        self._describe_policies(in_charge)
        self.stats.in_charge(in_charge)

    @_contained
    def engine_restarted(self) -> None:
        """The engine is gone and will be replaced; its blocks are gone with it."""
        self._restarts.inc()
        self._engine_up.value = 0
        self.stats.engine_restarted()
        counts = self.stats.request_counts()
        self._set_counts(counts.running, counts.waiting)
        self._set_blocks(0, 0, self._total_blocks)

    def fault(self, where: str) -> None:
        """Call while handling an exception of the metrics themselves: counted, logged once per place."""
        self._faults.inc()
        if where not in self._faults_logged:
            self._faults_logged.add(where)
            _log.exception("metrics failed; serving is not affected", where=where)

    def render(self) -> bytes:
        """The text format 0.0.4 (CONTENT_TYPE), for a scrape. Empty when rendering itself fails."""
        try:
            self._update_reasons()
            return self._series.render()
        except Exception:
            self.fault("render")
            return b""

    # ---- declarations --------------------------------------------------------------------------------------

    def _declare_state(self) -> None:
        s = self._series
        s.info("kvyard_build_info", "Version of the daemon.", {"version": __version__})
        self._engine_up = s.value("kvyard_engine_up", "gauge", "1 while an engine serves.")
        self._restarts = s.value("kvyard_engine_restarts_total", "counter", "Engines that were replaced.")
        self._running = s.value("kvyard_sequences_running", "gauge", "Sequences that hold a slot.")
        self._waiting = s.value("kvyard_sequences_waiting", "gauge", "Sequences that wait, preempted ones included.")
        self._swapped = s.value(
            "kvyard_sequences_swapped", "gauge", "Of the waiting, those with KV in the host pool."
        )
        self._by_reason = s.values(
            "kvyard_sequences_waiting_by_reason", "gauge", "Why sequences wait; adds up to the waiting.",
            "reason", WAIT_REASONS, fallback="policy",
        )  # fmt: skip
        self._blocks = s.values(
            "kvyard_kv_blocks", "gauge", "KV blocks by state; used + cached + free is the pool.",
            "state", ("used", "cached", "free"),
        )  # fmt: skip
        self._usage = s.value("kvyard_kv_usage_ratio", "gauge", "Used share of the KV pool, 0 to 1.")
        self._block_size = s.value("kvyard_kv_block_tokens", "gauge", "Tokens per KV block.")
        self._kv_bytes = s.value("kvyard_kv_bytes", "gauge", "Bytes of the KV pool.")
        self._limits = s.values(
            "kvyard_limit", "gauge", "Limits in force.", "limit", ("running", "step_tokens", "model_len")
        )
        self._faults = s.value("kvyard_metrics_faults_total", "counter", "Faults inside the metrics themselves.")

    def _declare_requests(self) -> None:
        s = self._series
        self._requests = s.values(
            "kvyard_sequences_total", "counter", "Sequences that ended, by outcome.", "outcome", OUTCOMES
        )
        self._refused = s.values(
            "kvyard_requests_refused_total",
            "counter",
            "HTTP requests not accepted, by the code of the answer.",
            "code",
            REFUSAL_CODES,
        )
        self._cut = s.values(
            "kvyard_clients_cut_total",
            "counter",
            "Clients cut off because they did not read.",
            "reason",
            CUTS,
            fallback="stalled",
        )
        self._prompt_tokens = s.value("kvyard_prompt_tokens_total", "counter", "Prompt tokens of ended requests.")
        self._output_tokens = s.value("kvyard_output_tokens_total", "counter", "Output tokens.")
        self._queue_time = s.histogram("kvyard_queue_seconds", "Arrival to first admission.", TTFT_BOUNDS)
        self._ttft = s.histogram("kvyard_time_to_first_token_seconds", "Arrival to first token.", TTFT_BOUNDS)
        self._itl = s.histogram("kvyard_inter_token_seconds", "From one output token to the next.", ITL_BOUNDS)
        self._e2e = s.histogram("kvyard_e2e_seconds", "Arrival to end.", E2E_BOUNDS)
        self._request_prompt = s.histogram(
            "kvyard_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BOUNDS
        )
        self._request_output = s.histogram(
            "kvyard_request_output_tokens", "Output tokens of a sequence.", TOKEN_BOUNDS
        )
        self._request_preemptions = s.histogram(
            "kvyard_request_preemptions", "Preemptions of a sequence.", PREEMPTION_BOUNDS
        )

    def _declare_steps(self) -> None:
        s = self._series
        self._step_seconds = s.histogram("kvyard_step_seconds", "Duration of a step, without the gap.", STEP_BOUNDS)
        self._parts = s.values(
            "kvyard_step_part_seconds_total", "counter", "Where the steps' time went; gap is between steps.",
            "part", PARTS,
        )  # fmt: skip
        self._part_cells = list(self._parts.cells.values())
        self._tokens_per_step = s.histogram("kvyard_step_tokens", "Tokens computed in a step.", STEP_TOKEN_BOUNDS)
        self._step_tokens = s.values(
            "kvyard_computed_tokens_total", "counter", "Tokens computed in steps, recomputed ones included.",
            "phase", ("prompt", "decode"),
        )  # fmt: skip
        self._admissions = s.value(
            "kvyard_admissions_total", "counter", "Admissions, those after preemption included."
        )
        self._hit_tokens = s.value("kvyard_prefix_hit_tokens_total", "counter", "Tokens found in the prefix cache.")
        self._preemptions = s.values("kvyard_preemptions_total", "counter", "Preemptions, by way.", "how", HOWS)
        self._preempted_tokens = s.values(
            "kvyard_preempted_tokens_total", "counter", "Tokens in KV lost (recompute) or copied (swap).", "how", HOWS
        )

    def _declare_policies(self) -> None:
        s = self._series
        kinds = (*KINDS, "other")
        self._generation = s.value("kvyard_policy_generation", "gauge", "Policy changes so far.")
        self._describe_policies({})
        self._policy_calls = s.values("kvyard_policy_calls_total", "counter", "Policy calls.", "kind", kinds)
        self._policy_seconds = s.histograms(
            "kvyard_policy_seconds", "Time of a step spent in policies of a kind.", "kind", kinds, POLICY_BOUNDS
        )
        self._overrides = s.grid(
            "kvyard_policy_overrides_total", "counter", "Decisions that the core overrode.",
            ("kind", "cause"), kinds, OVERRIDE_CAUSES,
        )  # fmt: skip
        self._ejections = s.grid(
            "kvyard_policy_ejections_total", "counter", "Policies put out.", ("kind", "code"), kinds, EJECTION_CODES
        )

    def _declare_aliases(self) -> None:
        """Semantics as vLLM gives them: usage is a fraction of one despite its name."""
        self._describe_cache({})
        for name, of, words in ALIASES:
            self._series.alias(name, of, VLLM_ENGINE, words)
        self._all_preemptions = self._series.value(
            "vllm:num_preemptions_total", "counter", "Sum of kvyard_preemptions_total.", VLLM_ENGINE
        )

    # ---- details -------------------------------------------------------------------------------------------

    def _set_counts(self, running: int, waiting: int) -> None:
        self._running.value = running
        self._waiting.value = waiting

    def _set_blocks(self, used: int, cached: int, free: int) -> None:
        self._blocks["used"].value = used
        self._blocks["cached"].value = cached
        self._blocks["free"].value = free
        total = used + cached + free
        self._usage.value = used / total if total else 0.0

    def _update_reasons(self) -> None:
        """At a scrape, not at a step: only then does anybody look."""
        for cell in self._by_reason.cells.values():
            cell.value = 0
        for reason, count in self.stats.waiting.by_reason(int(self._waiting.value)).items():
            self._by_reason[reason].value += count

    def _describe_engine(self, info: EngineInfo) -> None:
        self._describe_policies(info.policies)
        self._describe_cache(
            {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.kv_blocks),
                "cache_dtype": info.dtype,
                "kv_bytes": str(info.kv_bytes),
            }
        )

    def _describe_cache(self, values: dict[str, str]) -> None:
        empty = {"block_size": "0", "num_gpu_blocks": "0", "cache_dtype": "", "kv_bytes": "0"}
        doc = "Geometry of the KV pool, as labels."
        self._series.info("vllm:cache_config_info", doc, {**empty, **values}, VLLM_ENGINE)

    def _describe_policies(self, in_charge: dict[str, str]) -> None:
        labels: dict[str, str] = {kind: in_charge.get(kind, "") for kind in KINDS}
        self._series.info("kvyard_policy_info", "Policies in charge, as labels.", labels)


ALIASES: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    ("vllm:num_requests_running", "kvyard_sequences_running", {}),
    ("vllm:num_requests_waiting", "kvyard_sequences_waiting", {}),
    ("vllm:kv_cache_usage_perc", "kvyard_kv_usage_ratio", {}),
    ("vllm:prompt_tokens_total", "kvyard_prompt_tokens_total", {}),
    ("vllm:generation_tokens_total", "kvyard_output_tokens_total", {}),
    ("vllm:prefix_cache_hits_total", "kvyard_prefix_hit_tokens_total", {}),
    ("vllm:request_success_total", "kvyard_sequences_total", {"outcome": "finished_reason", "cancelled": "abort"}),
    ("vllm:iteration_tokens_total", "kvyard_step_tokens", {}),
    ("vllm:request_prompt_tokens", "kvyard_request_prompt_tokens", {}),
    ("vllm:request_generation_tokens", "kvyard_request_output_tokens", {}),
    ("vllm:request_queue_time_seconds", "kvyard_queue_seconds", {}),
    ("vllm:time_to_first_token_seconds", "kvyard_time_to_first_token_seconds", {}),
    ("vllm:inter_token_latency_seconds", "kvyard_inter_token_seconds", {}),
    ("vllm:e2e_request_latency_seconds", "kvyard_e2e_seconds", {}),
)
"""vLLM's name, ours with the same meaning, label names and values that differ."""
VLLM_ENGINE: Final = (("engine", "0"),)
