"""Metrics: every series from the start, right values from events, no fault that reaches the serving path."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import kvyard
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.front import metrics as metrics_module
from kvyard.front.metrics import (
    ALIASES,
    EJECTION_CODES,
    OUTCOMES,
    OVERRIDE_CAUSES,
    REFUSAL_CODES,
    WAIT_REASONS,
    Metrics,
)
from kvyard.front.series import Histogram, Series
from kvyard.link.messages import EngineInfo
from kvyard.link.record import PolicyCost, Preemption, StepRecord, Timings, Wait
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

bounded = settings(deadline=None, max_examples=60)  # a loaded machine is slow, not wrong

Key = tuple[str, frozenset[tuple[str, str]]]
SOURCES = Path(kvyard.__file__).parent


def info(blocks: int = 100, **changes: Any) -> EngineInfo:  # noqa: ANN401 - fields of EngineInfo
    values: dict[str, Any] = {
        "pid": 1, "backend": "cpu", "device": "a CPU", "dtype": "float32", "deterministic": False,
        "kv_blocks": blocks, "block_size": 16, "kv_bytes": 4096, "max_running": 8, "max_step_tokens": 64,
        "max_model_len": 512, "vocab_size": 10, "eos_ids": [2],
        "policies": {"admission": "aging", "preemption": "last", "prefill": "vllm"}, "generation": 1,
    }  # fmt: skip
    return EngineInfo(**{**values, **changes})


def step(**changes: Any) -> StepRecord:  # noqa: ANN401 - fields of StepRecord
    values: dict[str, Any] = {
        "step": 1, "at": 1.0, "timings": Timings(1000, 2000, 3_000_000, 4000, 5000, 6000), "ids": b"", "granted": b"",
        "prompt_tokens": 30, "decode_tokens": 4, "running": 5, "waiting": 3, "swapped": 1,
        "blocks_used": 40, "blocks_cached": 10, "blocks_free": 50, "generation": 2,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


def samples(text: bytes) -> dict[Key, float]:
    """Every sample of an exposition."""
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def read(metrics: Metrics, name: str, **labels: str) -> float:
    """The one sample with these labels (model_name and engine aside)."""
    matches = [
        value
        for (found, pairs), value in samples(metrics.render()).items()
        if found == name and {k: v for k, v in pairs if k not in ("model_name", "engine")} == labels
    ]
    assert len(matches) == 1, f"{name} {labels}: {len(matches)} samples"
    return matches[0]


def counted(metrics: Metrics) -> list[float]:
    """Every counter and every bucket."""
    found: list[float] = []
    for family in metrics._series.families.values():
        for _, cell in family.cells:
            if isinstance(cell, Histogram):
                found += cell.counts
            elif family.kind == "counter":
                found.append(cell.value)
    return found


def busy(metrics: Metrics) -> None:
    """Something in every series."""
    metrics.engine(info())
    metrics.step(
        step(
            admitted=[(1, 16), (2, 0)],
            preempted=[Preemption(3, 1, "growth", "recompute", 40), Preemption(4, 1, "growth", "swap", 20)],
            finished=[(9, "stop")],
            waits=[Wait(0, "blocks"), Wait(7, "a policy's own words")],
            policies=[PolicyCost("admission", "aging", 2, 5000, {"alone": 3, "unheard-of": 1})],
        )
    )
    metrics.queued(0.2)
    metrics.first_token(0.5)
    metrics.inter_token(0.03, 2)
    for outcome in OUTCOMES:
        metrics.finished(outcome, 2.0, 30, 4, 1, "engine-lost" if outcome == "error" else "")
    for code in (*REFUSAL_CODES, "unheard-of"):
        metrics.refused(code)
    for code in (*EJECTION_CODES, "unheard-of"):
        metrics.ejected("admission/greedy", code)
    metrics.ejected("nonsense", "raised")
    metrics.policies({"admission": "fcfs"}, 3)
    metrics.engine_restarted()
    metrics.counts(1, 2)


def test_every_series_is_there_from_the_start() -> None:
    fresh, used = Metrics("m"), Metrics("m")
    busy(used)
    before, after = samples(fresh.render()), samples(used.render())
    informative = {"kvyard_policy_info", "vllm:cache_config_info"}
    assert {key for key in after if key[0] not in informative} == {key for key in before if key[0] not in informative}
    assert {key[0] for key in after} == {key[0] for key in before}
    assert used._faults.value == 0


WANTED = """
kvyard_sequences_running kvyard_sequences_waiting kvyard_sequences_waiting_by_reason kvyard_preemptions_total
kvyard_kv_blocks kvyard_prompt_tokens_total kvyard_output_tokens_total kvyard_queue_seconds_bucket
kvyard_time_to_first_token_seconds_bucket kvyard_inter_token_seconds_bucket kvyard_e2e_seconds_bucket
kvyard_step_seconds_bucket kvyard_policy_calls_total kvyard_policy_seconds_bucket kvyard_policy_overrides_total
kvyard_policy_ejections_total kvyard_engine_restarts_total kvyard_sequences_total kvyard_requests_refused_total
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
"""


def test_what_operators_need_is_there() -> None:
    assert set(WANTED.split()) <= {name for name, _ in samples(Metrics("m").render())}


def test_the_text_is_what_prometheus_client_itself_would_say() -> None:
    metrics = Metrics('odd "name"\\with\nall')
    busy(metrics)
    ours, theirs = samples(metrics.render()), samples(generate_latest(metrics.registry))
    assert ours == theirs
    kinds = [
        {family.name: family.type for family in text_string_to_metric_families(text.decode())}
        for text in (metrics.render(), generate_latest(metrics.registry))
    ]
    assert kinds[0] == kinds[1]


def test_histograms_are_cumulative_and_whole() -> None:
    metrics = Metrics("m")
    for value in (0.0, 0.001, 0.0011, 3.0, 1e9):
        metrics.queued(value)
    found = samples(metrics.render())
    buckets = sorted(
        (float(dict(labels)["le"]), value)
        for (name, labels), value in found.items()
        if name == "kvyard_queue_seconds_bucket"
    )
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert buckets[0] == (0.001, 2.0), "bounds are inclusive"
    assert buckets[-1] == (math.inf, 5.0)
    assert read(metrics, "kvyard_queue_seconds_count") == 5
    assert read(metrics, "kvyard_queue_seconds_sum") == pytest.approx(1e9 + 3.0021)


class TestSteps:
    """What a step record changes."""

    def test_gauges_show_the_newest_step(self) -> None:
        metrics = Metrics("m")
        metrics.step(step())
        metrics.step(step(running=6, waiting=0, swapped=0, blocks_used=1, blocks_cached=2, blocks_free=97))
        assert read(metrics, "kvyard_sequences_running") == 6
        assert read(metrics, "kvyard_sequences_waiting") == 0
        assert read(metrics, "vllm:num_requests_running") == 6
        assert read(metrics, "kvyard_kv_usage_ratio") == pytest.approx(0.01)
        assert read(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(0.01)

    def test_metrics_07_used_cached_and_free_are_apart_and_add_up(self) -> None:
        metrics = Metrics("m")
        metrics.engine(info(100))
        metrics.step(step(blocks_used=0, blocks_cached=60, blocks_free=40))
        states = {state: read(metrics, "kvyard_kv_blocks", state=state) for state in ("used", "cached", "free")}
        assert states == {"used": 0, "cached": 60, "free": 40}
        assert read(metrics, "vllm:kv_cache_usage_perc") == 0, "cached blocks are no usage"

    def test_counters_add_up(self) -> None:
        metrics = Metrics("m")
        preempted = [Preemption(3, 1, "growth", "recompute", 40), Preemption(4, 1, "growth", "swap", 20)]
        for _ in range(3):
            metrics.step(step(admitted=[(1, 16)], preempted=preempted))
        assert read(metrics, "kvyard_computed_tokens_total", phase="prompt") == 90
        assert read(metrics, "kvyard_computed_tokens_total", phase="decode") == 12
        assert read(metrics, "kvyard_admissions_total") == 3
        assert read(metrics, "kvyard_prefix_hit_tokens_total") == 48
        assert read(metrics, "kvyard_preemptions_total", how="recompute") == 3
        assert read(metrics, "kvyard_preempted_tokens_total", how="swap") == 60
        assert read(metrics, "vllm:num_preemptions_total") == 6
        assert read(metrics, "kvyard_step_seconds_count") == 3
        assert read(metrics, "kvyard_step_seconds_sum") == pytest.approx(3 * 3.012e-3)
        assert read(metrics, "kvyard_step_part_seconds_total", part="gap") == pytest.approx(18e-6)

    def test_a_record_without_tokens_is_no_step_but_says_what_changed(self) -> None:
        metrics = Metrics("m")
        metrics.step(step())
        metrics.step(step(prompt_tokens=0, decode_tokens=0, running=0, waiting=0, blocks_used=0, blocks_free=90))
        assert read(metrics, "kvyard_step_seconds_count") == 1
        assert read(metrics, "kvyard_step_tokens_count") == 1
        assert read(metrics, "kvyard_sequences_running") == 0
        assert read(metrics, "kvyard_kv_blocks", state="used") == 0

    def test_policies(self) -> None:
        metrics = Metrics("m")
        costs = [PolicyCost("admission", "a", 2, 5000, {"alone": 3, "odd": 1}), PolicyCost("prefill", "b", 1, 800)]
        metrics.step(step(policies=costs))
        assert read(metrics, "kvyard_policy_calls_total", kind="admission") == 2
        assert read(metrics, "kvyard_policy_overrides_total", kind="admission", cause="alone") == 3
        assert read(metrics, "kvyard_policy_overrides_total", kind="admission", cause="other") == 1
        assert read(metrics, "kvyard_policy_seconds_sum", kind="prefill") == pytest.approx(8e-7)

    def test_why_sequences_wait_adds_up_to_the_waiting(self) -> None:
        metrics = Metrics("m")
        metrics.step(step(waiting=5, waits=[Wait(0, "blocks"), Wait(8, "slots"), Wait(9, "the moon is full")]))
        reasons = {
            dict(labels)["reason"]: value
            for (name, labels), value in samples(metrics.render()).items()
            if name == "kvyard_sequences_waiting_by_reason"
        }
        assert {reason: value for reason, value in reasons.items() if value} == {"blocks": 3, "slots": 1, "policy": 1}
        metrics.step(step(waiting=0))
        assert read(metrics, "kvyard_sequences_waiting_by_reason", reason="blocks") == 0


class TestRequests:
    """What the front's events change."""

    def test_metrics_03_preemption_observes_nothing_again(self) -> None:
        metrics = Metrics("m")
        metrics.queued(0.1)
        metrics.first_token(0.2)
        twice = [Preemption(1, 2, "growth", "recompute", 10), Preemption(1, 2, "growth", "recompute", 12)]
        metrics.step(step(preempted=twice[:1]))
        metrics.step(step(preempted=twice[1:], admitted=[(1, 0)]))
        metrics.inter_token(0.3)
        metrics.finished("length", 1.0, 10, 2, 2)
        for name in ("kvyard_time_to_first_token_seconds", "kvyard_queue_seconds", "kvyard_e2e_seconds"):
            assert read(metrics, f"{name}_count") == 1
        assert read(metrics, "kvyard_preemptions_total", how="recompute") == 2
        assert read(metrics, "kvyard_request_preemptions_sum") == 2

    def test_tokens_equal_those_of_the_usage(self) -> None:
        metrics = Metrics("m")
        metrics.first_token(0.1)
        metrics.inter_token(0.01, 3)
        metrics.inter_token(0.02)
        metrics.finished("stop", 1.0, 17, 5, 0)
        assert read(metrics, "kvyard_prompt_tokens_total") == read(metrics, "vllm:prompt_tokens_total") == 17
        assert read(metrics, "kvyard_output_tokens_total") == read(metrics, "vllm:generation_tokens_total") == 5
        assert read(metrics, "kvyard_inter_token_seconds_count") == 4
        assert read(metrics, "kvyard_inter_token_seconds_sum") == pytest.approx(0.05)

    def test_outcomes(self) -> None:
        metrics = Metrics("m")
        for reason in (*OUTCOMES, "something-new"):
            metrics.finished(reason, 1.0, 1, 1, 0)
        assert read(metrics, "kvyard_sequences_total", outcome="stop") == 1
        assert read(metrics, "kvyard_sequences_total", outcome="error") == 2
        assert read(metrics, "vllm:request_success_total", finished_reason="abort") == 1

    @pytest.mark.parametrize("code", REFUSAL_CODES)
    def test_refusals_by_code(self, code: str) -> None:
        metrics = Metrics("m")
        metrics.refused(code)
        assert read(metrics, "kvyard_requests_refused_total", code=code) == 1
        assert metrics.stats.refused == 1

    def test_metrics_08_names_from_outside_make_no_series(self) -> None:
        metrics = Metrics("m")
        before = metrics.render().count(b"\n")
        for index in range(1000):
            metrics.refused(f"code-{index}")
            metrics.ejected(f"kind-{index}/x", f"code-{index}")
            metrics.finished("error", 1.0, 1, 1, 0, f"code-{index}")
            cost = PolicyCost(f"kind-{index}", f"name-{index}", 1, 1, {f"cause-{index}": 1})
            metrics.step(step(policies=[cost], waits=[Wait(index + 1, f"reason-{index}")]))
        assert metrics.render().count(b"\n") == before
        assert read(metrics, "kvyard_requests_refused_total", code="other") == 1000


class TestEngine:
    """Starts, deaths and new engines."""

    def test_a_new_engine_sets_limits_and_pool(self) -> None:
        metrics = Metrics("m")
        metrics.engine(info(77))
        assert read(metrics, "kvyard_engine_up") == 1
        assert read(metrics, "kvyard_limit", limit="running") == 8
        assert read(metrics, "kvyard_kv_blocks", state="free") == 77
        text = metrics.render().decode()
        assert re.search(r'vllm:cache_config_info\{.*block_size="16",num_gpu_blocks="77".*\} 1', text)
        assert 'admission="aging"' in text

    def test_info_series_are_replaced_not_added(self) -> None:
        metrics = Metrics("m")
        for blocks in (1, 2, 3):
            metrics.engine(info(blocks))
            metrics.policies({"admission": f"p{blocks}"}, blocks)
        text = metrics.render().decode()
        assert len(re.findall(r"^vllm:cache_config_info\{", text, re.MULTILINE)) == 1
        assert len(re.findall(r"^kvyard_policy_info\{", text, re.MULTILINE)) == 1
        assert 'admission="p3"' in text
        assert read(metrics, "kvyard_policy_generation") == 3

    def test_a_death_frees_the_pool_and_what_ran_waits(self) -> None:
        metrics = Metrics("m")
        metrics.engine(info(100))
        metrics.step(step(running=5, waiting=3))
        metrics.engine_restarted()
        assert read(metrics, "kvyard_engine_up") == 0
        assert read(metrics, "kvyard_engine_restarts_total") == 1
        assert read(metrics, "kvyard_sequences_running") == 0
        assert read(metrics, "kvyard_sequences_waiting") == 8
        assert read(metrics, "kvyard_sequences_waiting_by_reason", reason="recovering") == 8
        assert read(metrics, "kvyard_kv_blocks", state="used") == 0

    def test_metrics_09_a_second_engine_and_a_second_object_are_fine(self) -> None:
        metrics = Metrics("m")
        values = []
        for _ in range(3):
            metrics.engine(info())
            metrics.step(step())
            metrics.policies({"admission": "x"}, 1)
            values.append(read(metrics, "kvyard_computed_tokens_total", phase="prompt"))
            Metrics("m")
        assert values == [30, 60, 90]

    def test_counts_correct_the_gauges_between_steps(self) -> None:
        metrics = Metrics("m")
        metrics.step(step(running=1, waiting=1))
        metrics.counts(0, 0)
        assert read(metrics, "vllm:num_requests_running") == 0
        assert read(metrics, "vllm:num_requests_waiting") == 0


class TestMetrics10Faults:
    """METRICS-10: nothing raises into the serving path, and no counter goes back."""

    def test_METRICS_10_wrong_values_are_contained_and_counted(self) -> None:
        metrics = Metrics("m")
        calls: list[Any] = [
            lambda: metrics.step(None),  # type: ignore[arg-type] # that is the point
            lambda: metrics.engine("x"),  # type: ignore[arg-type] # as above
            lambda: metrics.first_token("soon"),  # type: ignore[arg-type] # as above
            lambda: metrics.finished("stop", None, 1, 1, 0),  # type: ignore[arg-type] # as above
            lambda: metrics.ejected(3, 4),  # type: ignore[arg-type] # as above
            lambda: metrics.policies(None, 1),  # type: ignore[arg-type] # as above
        ]
        for call in calls:
            call()
        assert read(metrics, "kvyard_metrics_faults_total") == len(calls)

    def test_a_fault_is_logged_once_per_place(self, capsys: pytest.CaptureFixture[str]) -> None:
        metrics = Metrics("m")
        for _ in range(50):
            metrics.first_token("x")  # type: ignore[arg-type] # that is the point
        told = capsys.readouterr()
        assert (told.out + told.err).count("metrics failed") == 1

    def test_a_rendering_that_fails_answers_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = Metrics("m")
        monkeypatch.setattr(metrics._series, "render", lambda: 1 / 0)
        assert metrics.render() == b""
        assert metrics._faults.value == 1

    @bounded
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["queued", "first", "inter", "finished", "step", "restart", "counts"]),
                st.floats(-5, 5) | st.just(math.nan),
                st.integers(-3, 50),
            ),
            max_size=40,
        )
    )
    def test_METRICS_10_no_counter_ever_goes_back(self, events: list[tuple[str, float, int]]) -> None:
        metrics = Metrics("m")
        before = counted(metrics)
        for what, number, count in events:
            match what:
                case "queued":
                    metrics.queued(number)
                case "first":
                    metrics.first_token(number)
                case "inter":
                    metrics.inter_token(number, max(1, count))
                case "finished":
                    metrics.finished("stop", number, count, count, max(0, count))
                case "step":
                    metrics.step(step(prompt_tokens=count, timings=Timings(count, count, count, count, count, count)))
                case "restart":
                    metrics.engine_restarted()
                case "counts":
                    metrics.counts(max(0, count), 0)
            after = counted(metrics)
            assert all(new >= old for new, old in zip(after, before, strict=True))
            before = after
        assert metrics._faults.value == 0


class TestVllmNames:
    """Aliases show the very numbers of the series they stand for."""

    @pytest.mark.parametrize(("name", "of", "words"), ALIASES, ids=[alias[0] for alias in ALIASES])
    def test_same_numbers(self, name: str, of: str, words: dict[str, str]) -> None:
        metrics = Metrics("m")
        busy(metrics)
        found = samples(metrics.render())
        ours = {
            (key.removeprefix(of), frozenset((words.get(k, k), words.get(v, v)) for k, v in labels)): value
            for (key, labels), value in found.items()
            if key in (of, f"{of}_bucket", f"{of}_count", f"{of}_sum")
        }
        theirs = {
            (key.removeprefix(name), labels - {("engine", "0")}): value
            for (key, labels), value in found.items()
            if key in (name, f"{name}_bucket", f"{name}_count", f"{name}_sum")
        }
        assert ours and ours == theirs

    def test_all_carry_the_labels_that_dashboards_filter_by(self) -> None:
        for name, labels in samples(Metrics("my-model").render()):
            assert ("model_name", "my-model") in labels
            assert (("engine", "0") in labels) == name.startswith("vllm:")


class TestKnownValues:
    """The label values follow the code that makes them."""

    def used(self, pattern: str, *folders: str) -> set[str]:
        found: set[str] = set()
        for folder in folders:
            for path in (SOURCES / folder).glob("*.py"):
                found |= set(re.findall(pattern, path.read_text(encoding="utf-8")))
        assert found, f"nothing matches {pattern}: the test has lost its object"
        return found

    def test_overrides(self) -> None:
        assert self.used(r"\.override\([^\n]*, \"([a-z-]+)\"\)", "core") <= set(OVERRIDE_CAUSES)

    def test_ejections(self) -> None:
        assert self.used(r"(?:Nonsense\(|Fault\(\w+, )\"([a-z-]+)\"", "core") <= set(EJECTION_CODES)

    def test_reasons_to_wait(self) -> None:
        pattern = r"(?:queue_reason = |queue_reason or |seq\.reason = |_state, )\"([a-z-]+)\""
        assert self.used(pattern, "core") <= set(WAIT_REASONS)

    def test_refusals(self) -> None:
        assert self.used(r"_refuse\(\s*\d+,\s*\"([a-z_-]+)\"", "front") <= set(REFUSAL_CODES)


def test_a_scrape_is_cheap_enough_for_every_50_ms() -> None:
    metrics = Metrics("m")
    busy(metrics)
    metrics.render()
    times = []
    for _ in range(50):
        began = time.perf_counter()
        metrics.render()
        times.append(time.perf_counter() - began)
    assert sorted(times)[25] < 0.0025, "5 % of a core at 20 scrapes a second; about 0.2 ms idle"


def test_a_step_is_cheap() -> None:
    metrics = Metrics("m")
    record = step(policies=[PolicyCost(kind, "x", 1, 4000) for kind in ("admission", "preemption", "prefill")])
    began = time.perf_counter()
    for _ in range(2000):
        metrics.step(record)
    each = (time.perf_counter() - began) / 2000
    assert each < 200e-6, f"{each * 1e6:.0f} us; about 10 us idle"


class TestSeries:
    """The cells and their text."""

    def test_a_name_is_declared_once(self) -> None:
        series = Series(())
        series.value("a", "gauge", "x")
        with pytest.raises(ValueError, match="twice"):
            series.value("a", "gauge", "x")

    def test_without_labels_there_are_no_braces(self) -> None:
        series = Series(())
        series.value("a_total", "counter", "what\nit is").inc(2)
        assert series.render() == b"# HELP a_total what\\nit is\n# TYPE a_total counter\na_total 2\n"

    def test_it_is_a_collector_like_any_other(self) -> None:
        registry = CollectorRegistry()
        series = Series((("x", "y"),))
        series.histogram("h", "a histogram", (1, 2)).observe(1.5)
        registry.register(series)
        assert samples(generate_latest(registry)) == samples(series.render())

    @bounded
    @given(st.lists(st.text(max_size=8), min_size=1, max_size=5, unique=True))
    def test_any_label_value_survives(self, values: list[str]) -> None:
        series = Series(())
        series.values("a", "gauge", "x", "label", values)
        found = {dict(labels)["label"] for _, labels in samples(series.render())}
        assert found == set(values)

    def test_unknown_values_need_a_fallback(self) -> None:
        known = Series(()).values("a", "gauge", "x", "label", ("p", "q"), fallback="q")
        known["nothing"].inc()
        assert known["q"].value == 1


def test_bounds_ascend() -> None:
    for name in dir(metrics_module):
        if name.endswith("_BOUNDS"):
            bounds = getattr(metrics_module, name)
            assert list(bounds) == sorted(set(bounds)), name
