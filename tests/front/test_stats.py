"""Rolling windows behind `status`, on a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.front.stats import LATENCY_SPAN, MAX_REASONS, RATE_SPAN, Rate, Stats, Waiting, Window
from kvyard.link.record import PolicyCost, Preemption, StepRecord, Timings, Wait

from tests.front.test_metrics import info

bounded = settings(deadline=None, max_examples=60)  # a loaded machine is slow, not wrong


class Clock:
    """Time that moves when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def step(**changes: Any) -> StepRecord:  # noqa: ANN401 - fields of StepRecord
    values: dict[str, Any] = {
        "step": 1, "at": 1.0, "timings": Timings(0, 0, 10_000_000, 0, 0, 9_999), "ids": b"", "granted": b"",
        "prompt_tokens": 100, "decode_tokens": 4, "running": 5, "waiting": 3, "swapped": 0,
        "blocks_used": 40, "blocks_cached": 10, "blocks_free": 50,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


class TestWindow:
    """Quantiles within 5 % over a bounded time."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200))
    def test_quantiles_are_within_the_width_of_a_bin(self, values: list[float]) -> None:
        window = Window(60, 12, Clock())
        for value in values:
            window.add(value)
        (p50, p95, p99), count = window.quantiles(0.5, 0.95, 0.99)
        assert count == len(values)
        ordered = sorted(values)
        for share, found in ((0.5, p50), (0.95, p95), (0.99, p99)):
            exact = ordered[max(1, math.ceil(share * len(values))) - 1]
            assert found == pytest.approx(exact, rel=0.05)

    def test_nothing_is_none(self) -> None:
        assert Window(60, 12, Clock()).quantiles(0.5, 0.99) == ([None, None], 0)

    def test_values_leave_after_the_span(self) -> None:
        clock = Clock()
        window = Window(60, 12, clock)
        window.add(1.0)
        clock.now += 54.0
        assert window.quantiles(0.5)[1] == 1
        clock.now += 7.0
        assert window.quantiles(0.5) == ([None], 0)

    def test_a_long_silence_forgets_everything(self) -> None:
        clock = Clock()
        window = Window(60, 12, clock)
        for _ in range(12):
            window.add(1.0)
            clock.now += 5
        clock.now += 1e6
        window.add(2.0)
        (p50,), count = window.quantiles(0.5)
        assert count == 1 and p50 == pytest.approx(2.0, rel=0.05)

    @pytest.mark.parametrize("value", [0.0, -1.0, 1e-12, 1e9, 1e300])
    def test_extreme_values_fall_into_the_outer_bins(self, value: float) -> None:
        window = Window(60, 12, Clock())
        window.add(value)
        (p50,), count = window.quantiles(0.5)
        assert count == 1 and p50 is not None and 0 < p50 < 1e6

    def test_memory_does_not_grow_with_the_load(self) -> None:
        clock = Clock()
        window = Window(60, 12, clock)
        for index in range(100_000):
            window.add(0.01 + (index % 977) * 1e-4)
            clock.now += 0.01
        assert sum(len(bins) for bins in window._bins) < 12 * 200


class TestRate:
    """Amounts per second over ten seconds."""

    def test_a_steady_flow(self) -> None:
        clock = Clock()
        rate = Rate(clock)
        for _ in range(300):
            rate.add(5)
            clock.now += 0.1
        assert rate.per_second() == pytest.approx(50, rel=0.02)

    def test_it_falls_to_nothing(self) -> None:
        clock = Clock()
        rate = Rate(clock)
        clock.now += 100
        rate.add(1000)
        assert rate.per_second() == pytest.approx(1000 / RATE_SPAN)
        clock.now += RATE_SPAN + 1
        assert rate.per_second() == 0

    def test_a_young_daemon_is_not_diluted(self) -> None:
        clock = Clock()
        rate = Rate(clock)
        for _ in range(20):
            rate.add(10)
            clock.now += 0.1
        assert rate.per_second() == pytest.approx(100, rel=0.06)

    @bounded
    @given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 100)), max_size=60))
    def test_never_negative_and_never_more_than_there_was(self, events: list[tuple[float, int]]) -> None:
        clock = Clock()
        rate = Rate(clock)
        total = 0
        for wait, amount in events:
            clock.now += wait
            rate.add(amount)
            total += amount
            assert 0 <= rate.per_second() <= total + 1e-9


class TestWaiting:
    """Why sequences wait, from changes alone."""

    def test_the_queues_reason_holds_for_all_without_their_own(self) -> None:
        waiting = Waiting()
        waiting.take(step(waits=[Wait(0, "blocks"), Wait(7, "slots")]))
        assert waiting.reason(7) == "slots" and waiting.reason(8) == "blocks"
        assert waiting.by_reason(5) == {"slots": 1, "blocks": 4}

    def test_before_anything_is_said(self) -> None:
        assert Waiting().by_reason(2) == {"queued": 2}
        assert Waiting().by_reason(0) == {}

    @pytest.mark.parametrize(
        "change",
        [
            {"waits": [Wait(7, "")]},
            {"admitted": [(7, 0)]},
            {"finished": [(7, "cancelled")]},
            {"waiting": 0},
        ],
    )
    def test_whoever_waits_no_longer_has_no_reason(self, change: dict[str, Any]) -> None:
        waiting = Waiting()
        waiting.take(step(waits=[Wait(0, "blocks"), Wait(7, "slots")]))
        waiting.take(step(**change))
        assert waiting.reason(7) == "blocks"

    def test_a_cancelled_one_can_be_forgotten(self) -> None:
        waiting = Waiting()
        waiting.take(step(waits=[Wait(7, "slots")]))
        waiting.forget(7)
        waiting.forget(7)
        assert waiting.by_reason(1) == {"queued": 1}

    def test_free_texts_are_bounded(self) -> None:
        waiting = Waiting()
        waiting.take(step(waiting=1000, waits=[Wait(i + 1, f"reason {i}") for i in range(1000)]))
        found = waiting.by_reason(1000)
        assert len(found) == MAX_REASONS + 1
        assert sum(found.values()) == 1000

    @bounded
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "b"])), max_size=30),
        st.integers(0, 20),
    )
    def test_the_numbers_add_up(self, changes: list[tuple[int, str]], number: int) -> None:
        waiting = Waiting()
        for sequence, reason in changes:
            waiting.take(step(waits=[Wait(sequence, reason)]))
        assert sum(waiting.by_reason(number).values()) == number


class TestStats:
    """Parts of `Status`."""

    def test_counts(self) -> None:
        stats = Stats(Clock())
        stats.step(step(preempted=[Preemption(1, 2, "growth", "recompute", 5)], waits=[Wait(0, "blocks")]))
        for reason, code in (("stop", ""), ("length", ""), ("cancelled", ""), ("error", "engine-lost")):
            stats.ended(reason, 1.0, code)
        stats.refused += 2
        counts = stats.request_counts()
        assert (counts.running, counts.waiting, counts.waiting_by_reason) == (5, 3, {"blocks": 3})
        assert (counts.finished, counts.cancelled, counts.failed, counts.refused) == (2, 1, 1, 2)
        assert counts.preemptions == 1
        assert stats.errors == {"engine-lost": 1}

    def test_rates_and_step_times(self) -> None:
        clock = Clock()
        stats = Stats(clock)
        for _ in range(1000):
            stats.step(step())
            stats.first_token(0.1)
            stats.inter_token(0.01, 2)
            clock.now += 0.02
        rates = stats.rates()
        assert rates.prompt_tokens == pytest.approx(5000, rel=0.02)
        assert rates.output_tokens == pytest.approx(150, rel=0.02)
        assert rates.requests == 0
        assert rates.step_p50 == pytest.approx(0.01, rel=0.05)
        assert rates.step_p99 == pytest.approx(0.01, rel=0.05), "the gap is no part of a step"

    def test_latencies_of_the_last_minute(self) -> None:
        clock = Clock()
        stats = Stats(clock)
        for index in range(100):
            stats.queued(0.001 * (index + 1))
            stats.first_token(0.1)
            stats.inter_token(0.02, 10)
            stats.ended("stop", 2.0, "")
        stats.ended("cancelled", 99.0, "")
        stats.ended("error", 99.0, "x")
        latency = stats.latency()
        assert latency.queue.p50 == pytest.approx(0.05, rel=0.05)
        assert latency.queue.p99 == pytest.approx(0.099, rel=0.05)
        assert latency.itl.count == 1000
        assert latency.e2e.count == 100, "what was cut short says nothing about latency"
        clock.now += LATENCY_SPAN + 6
        assert stats.latency().ttft.count == 0 and stats.latency().ttft.p50 is None

    def test_the_pool(self) -> None:
        stats = Stats(Clock())
        assert stats.kv_status(None).total == 0
        stats.engine(info(100))
        kv = stats.kv_status(info(100))
        assert (kv.total, kv.used, kv.cached, kv.free, kv.block_size) == (100, 0, 0, 100, 16)
        stats.step(step())
        kv = stats.kv_status(info(100))
        assert kv.used + kv.cached + kv.free == kv.total

    def test_policies(self) -> None:
        clock = Clock()
        stats = Stats(clock)
        for _ in range(100):
            stats.step(step(policies=[PolicyCost("admission", "aging", 2, 10_000, {"alone": 1})]))
        use = stats.policy("admission")
        assert use.calls == 200 and use.overrides == {"alone": 100}
        p50, p99 = use.quantiles_us()
        assert p50 == pytest.approx(5.0, rel=0.05) and p99 == pytest.approx(5.0, rel=0.05)
        assert stats.policy("prefill").quantiles_us() == (None, None)

    def test_who_takes_charge_begins_with_nothing(self) -> None:
        stats = Stats(Clock())
        stats.in_charge({"admission": "slow"})
        stats.step(step(policies=[PolicyCost("admission", "slow", 3, 9_000_000, {"alone": 1})]))
        stats.in_charge({"admission": "slow"})
        assert stats.policy("admission").calls == 3
        stats.in_charge({"admission": "builtin"})
        use = stats.policy("admission")
        assert (use.calls, use.overrides, use.quantiles_us()) == (0, {}, (None, None))
        stats.step(step(policies=[PolicyCost("admission", "builtin", 2, 2_000)]))
        assert stats.policy("admission").quantiles_us()[1] == pytest.approx(1.0, rel=0.05)
        stats.step(step(policies=[PolicyCost("admission", "new", 1, 5_000)]))
        assert stats.policy("admission").calls == 1, "a record names who was asked before anybody says so"

    def test_the_age_of_the_last_step(self) -> None:
        clock = Clock()
        stats = Stats(clock)
        assert stats.last_step_age() is None
        stats.step(step(step=7))
        clock.now += 2.5
        assert stats.last_step_age() == 2.5
        assert stats.last is not None and stats.last.step == 7

    def test_a_death_makes_everybody_wait(self) -> None:
        stats = Stats(Clock())
        stats.step(step(running=5, waiting=3, waits=[Wait(0, "blocks")]))
        stats.engine_restarted()
        counts = stats.request_counts()
        assert (counts.running, counts.waiting, counts.waiting_by_reason) == (0, 8, {"recovering": 8})
        stats.engine(info())
        assert stats.request_counts().waiting_by_reason == {"queued": 8}
