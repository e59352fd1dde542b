"""Figures: percentiles, goodput, and the same numbers from the requests as in the totals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kvyard.sim import figures
from kvyard.sim.arrivals import Arrival
from kvyard.sim.cost import Objective

from tests.sim.loads import crowd, simulate

EASY, HARD = Objective(ttft=1e9, tpot=1e9), Objective(ttft=0.0, tpot=1e9)


def test_percentiles() -> None:
    found = figures.percentiles(np.array([np.nan, *range(1, 102)], float))
    assert found == {"p50": 51.0, "p95": 96.0, "p99": 100.0, "mean": 51.0}
    assert figures.percentiles(np.array([np.nan])) == {"p50": None, "p95": None, "p99": None, "mean": None}


def test_totals_follow_from_the_requests() -> None:
    load = crowd(80)
    run = simulate("vllm", load)
    totals, single = figures.totals(run, EASY, 64), figures.requests(run)
    assert totals["requests"] == totals["finished"] == len(single) == 80
    assert totals["output_tokens"] == sum(one["output_tokens"] for one in single)
    assert totals["preemptions"] == sum(one["preemptions"] for one in single)
    assert totals["recomputed_tokens"] == sum(one["recomputed_tokens"] for one in single)
    for name in ("queue_s", "ttft_s", "e2e_s"):
        assert totals[name]["p50"] == pytest.approx(np.percentile([one[name] for one in single], 50))
        assert totals[name]["p99"] >= totals[name]["p95"] >= totals[name]["p50"]
    for one, arrival in zip(single, load, strict=True):
        assert one["arrival_s"] == arrival.at
        assert one["queue_s"] <= one["ttft_s"] <= one["e2e_s"]
        if arrival.output > 1:
            assert one["tpot_s"] * (arrival.output - 1) == pytest.approx(one["e2e_s"] - one["ttft_s"])
            assert one["worst_itl_s"] >= one["tpot_s"] - 1e-12
        else:
            assert one["tpot_s"] is None and one["worst_itl_s"] is None


def test_goodput_is_what_meets_the_objective() -> None:
    run = simulate("vllm", crowd(50))
    assert figures.totals(run, EASY, 64)["goodput"]["share"] == 1.0
    assert figures.totals(run, HARD, 64)["goodput"]["requests_per_s"] == 0.0
    ttft = figures.totals(run, EASY, 64)["ttft_s"]["p50"]
    half = figures.totals(run, Objective(ttft=ttft, tpot=1e9), 64)["goodput"]
    assert half["share"] == pytest.approx(0.5, abs=0.02)
    assert half["requests_per_s"] == pytest.approx(25 / run.seconds, rel=0.1)


def test_an_answer_of_one_token_has_no_time_per_token_and_can_be_good() -> None:
    run = simulate("vllm", [Arrival(0.0, 10, 1, 1)])
    totals = figures.totals(run, Objective(ttft=1.0, tpot=0.0), 64)
    assert totals["goodput"]["share"] == 1.0
    assert totals["itl_s"]["p50"] is None


def test_refused_requests_have_no_times_and_are_not_good() -> None:
    run = simulate("vllm", [Arrival(0.0, 5000, 5, 5), Arrival(0.0, 5, 5, 5)])
    totals, single = figures.totals(run, EASY, 64), figures.requests(run)
    assert totals["refused"] == 1 and totals["finished"] == 1
    assert totals["goodput"]["share"] == 0.5
    assert single[0]["refused"] and single[0]["ttft_s"] is None
    assert single[1]["refused"] is None


def test_means_over_time() -> None:
    run = simulate("static", [Arrival(0.0, 10, 11, 11)])
    totals = figures.totals(run, EASY, 64)
    assert totals["mean_running"] < 1.0, "after its last step nothing runs"
    assert totals["mean_running"] == pytest.approx(10 / 11, rel=0.1)
    assert 0 < totals["mean_kv_use"] <= 2 / 64
    assert not math.isnan(totals["mean_waiting"])
