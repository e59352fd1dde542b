"""Virtual time: the real core and policies, steps that take what the cost model says, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core.advice import PolicySet
from kvyard.core.conduct import ConductLimits
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    OrderKey,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Snapshot,
    nobody,
)
from kvyard.sim import disciplines, simulation
from kvyard.sim.arrivals import Arrival, read_arrivals
from kvyard.sim.simulation import UNDISTURBED, Simulation, Stalled

from tests.sim.loads import COST, MOONCAKE, crowd, limits, simulate


def test_one_request_takes_its_steps() -> None:
    run = simulate("vllm", [Arrival(2.0, 100, 3, 3)])
    seen = run.observer
    prefill = 0.01 + 100 * 0.0001 + 100 * 1e-7
    decode = 0.01 + 0.0005 + 101 * 1e-7
    assert run.steps == 3
    assert seen.first[1] == pytest.approx(2.0 + prefill)
    assert seen.finished[1] == pytest.approx(2.0 + prefill + 2 * decode + 1e-7)
    assert seen.gaps().tolist() == pytest.approx([decode, decode + 1e-7])
    assert seen.admitted[1] == 2.0


def test_the_clock_jumps_over_idle_time() -> None:
    run = simulate("vllm", [Arrival(0.0, 10, 2, 2), Arrival(1000.0, 10, 2, 2)])
    assert run.steps == 4
    assert run.observer.first[2] == pytest.approx(1000.0, abs=0.1)


def test_a_request_stops_before_what_its_client_asked_for() -> None:
    run = simulate("vllm", [Arrival(0.0, 10, 5, 500)])
    assert run.observer.tokens[1] == 5


def test_what_never_fits_is_refused_and_the_rest_is_served() -> None:
    run = simulate("vllm", [Arrival(0.0, 2000, 5, 5), Arrival(0.0, 10, 5, 5)])
    assert list(run.observer.refusals) == [1]
    assert run.observer.tokens.tolist() == [0, 0, 5]


def test_the_same_twice() -> None:
    load = crowd(60, spare=100)
    a, b = simulate("sglang", load), simulate("sglang", load)
    assert a.seconds == b.seconds
    assert (a.observer.finished[1:] == b.observer.finished[1:]).all()


@pytest.mark.parametrize("name", disciplines.names())
@pytest.mark.parametrize("spare", [0, 200])
def test_every_discipline_serves_everybody(name: str, spare: int) -> None:
    load = crowd(80, spare=spare)
    run = simulate(name, load, swap_blocks=64)
    seen = run.observer
    assert seen.tokens.tolist() == [0, *(arrival.output for arrival in load)]
    assert not np.isnan(seen.finished[1:]).any()
    assert (seen.admitted[1:] >= seen.arrived[1:]).all()
    assert (seen.first[1:] > seen.admitted[1:]).all()
    assert (seen.finished[1:] >= seen.first[1:]).all()
    assert (seen.recomputed[1:] >= 0).all()
    assert not seen.recomputed[1:][seen.preemptions[1:] == 0].any(), "only who was preempted computes twice"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), blocks=st.integers(40, 200), name=st.sampled_from(disciplines.names()))
def test_any_load_is_served(seed: int, blocks: int, name: str) -> None:
    load = crowd(25, seed=seed, gap=0.02, spare=60)
    run = simulate(name, load, blocks=blocks, swap_blocks=20)
    assert run.observer.tokens[1:].tolist() == [arrival.output for arrival in load]


def test_the_prefix_cache_saves_what_the_hashes_share() -> None:
    load = read_arrivals(MOONCAKE, until=20)
    big = {"blocks": 40_000, "max_model_len": 131_072, "max_step_tokens": 8192, "max_running": 64}
    cold, warm = simulate("vllm", load, **big), simulate("vllm", load, prefix_cache=True, **big)
    assert cold.observer.cached.sum() == 0
    assert warm.observer.cached[2:].min() >= 512 - 16, "all share the first block of 512 tokens"
    assert warm.seconds < cold.seconds


def test_preempted_tokens_are_computed_again_and_counted() -> None:
    load = [Arrival(0.0, 100, 200, 200), Arrival(0.0, 100, 200, 200)]
    run = simulate("vllm", load, blocks=25)
    seen = run.observer
    assert seen.preemptions.tolist() == [0, 0, 1]
    assert seen.recomputed[1] == 0
    # Both grow from 100 tokens in 7 blocks each until the pool's 25 are taken.
    assert 100 <= seen.recomputed[2] <= 200
    assert seen.worst_gap[2] > 5 * seen.worst_gap[1]


def test_swapped_tokens_are_not_computed_again() -> None:
    load = [Arrival(0.0, 100, 200, 200), Arrival(0.0, 100, 200, 200)]
    run = simulate("least-recompute,preemption.how=swap", load, blocks=25, swap_blocks=20)
    assert run.observer.preemptions.sum() >= 1
    assert run.observer.swaps == run.observer.preemptions.sum()
    assert run.observer.recomputed.sum() == 0


class Never(AdmissionPolicy):
    """Lets nobody in, and declares that it means it."""

    def admit(self, s: Snapshot) -> Admission:
        return nobody("never", wake=s.step + 1)


class Broken(AdmissionPolicy):
    """Fails when asked for the fifth time."""

    calls = 0

    def admit(self, s: Snapshot) -> Admission:
        self.calls += 1
        if self.calls == 5:
            raise ValueError("the fifth time")
        return Admission(s.waiting)


def test_a_load_that_is_never_served_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "STALLED_AFTER", 2.0)
    policies = PolicySet(Never(), PreemptionPolicy(), PrefillPolicy())
    with pytest.raises(Stalled, match=r"nothing was placed for 2 s.*0 running and 1 waiting.*never"):
        Simulation([Arrival(0.0, 5, 5, 5)], policies, limits(), COST).to_the_end()


def test_a_policy_that_fails_is_put_out_and_named() -> None:
    policies = PolicySet(Broken(), PreemptionPolicy(), PrefillPolicy())
    run = Simulation(crowd(20), policies, limits(), COST).to_the_end()
    assert [(left.kind, left.code) for left in run.exits] == [("admission", "raised")]
    assert run.observer.ended == 20, "the built-in went on"


class NewestFirst(AdmissionPolicy):
    """Starves those that came first."""

    def key(self, r: RequestView) -> OrderKey:
        return (-r.arrival,)


def test_starving_is_seen_as_it_is_unless_the_daemons_conduct_is_asked_for() -> None:
    load = [Arrival(0.01 * n, 20, 20, 20) for n in range(2000)]
    for conduct, codes in ((UNDISTURBED, []), (ConductLimits(), ["starving"])):
        policies = PolicySet(NewestFirst(), PreemptionPolicy(), PrefillPolicy())
        run = Simulation(load, policies, limits(), COST, conduct).to_the_end()
        assert [left.code for left in run.exits] == codes
        assert run.observer.ended == 2000


def test_the_step_time_model_learns_from_virtual_steps() -> None:
    simulation_ = Simulation(crowd(200), disciplines.make("vllm"), limits(), COST)
    simulation_.to_the_end()
    model = simulation_.scheduler.step_time
    assert model.seconds(8, 0) == pytest.approx(COST.base + 8 * COST.decode, rel=0.2)
    per_token = (model.seconds(4, 200) - model.seconds(4, 0)) / 200
    assert per_token == pytest.approx(COST.prompt, rel=0.2)


def test_progress_is_told() -> None:
    told: list[tuple[int, int, float]] = []
    policies = disciplines.make("vllm")
    Simulation(crowd(60), policies, limits(), COST).to_the_end(lambda *args: told.append(args))
    assert len(told) >= 2
    assert all(done <= total == 60 for done, total, _ in told)
    assert told == sorted(told)


def test_an_end_before_the_last() -> None:
    simulation_ = Simulation(crowd(60), disciplines.make("vllm"), limits(), COST)
    run = simulation_.until(10)
    assert 10 <= run.observer.ended < 60
