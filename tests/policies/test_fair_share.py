"""Fair share by virtual token counters: the bound, the lift, and nobody forgotten or remembered for ever."""

from __future__ import annotations

import pytest
from kvyard.core.scheduler import Scheduler
from kvyard.policy import learning
from kvyard_policies import fair_share
from kvyard_policies.fair_share import FairShareAdmission
from kvyard_policies.passed_over import LOOK_EVERY, PASSES

from tests.core.harness import run_all, run_step, spec
from tests.policies.cores import arrive, core, scheduled, steps

WEIGHTS = (1.0, 2.0)


def policy(scheduler: Scheduler) -> FairShareAdmission:
    admission = scheduler.policies.admission
    assert isinstance(admission, FairShareAdmission)
    return admission


def cost(prompt: int, output: int) -> float:
    return WEIGHTS[0] * prompt + WEIGHTS[1] * output


def test_tenants_that_always_wait_are_served_alike() -> None:
    """The paper's bound: twice the larger of a prompt and all output that fits, here checked in every step."""
    scheduler = core("fair-share", blocks=60, max_running=2)
    shapes = {"long": (30, 20), "short": (3, 4), "chatty": (5, 40)}
    requests: dict[int, tuple[str, int, int]] = {}
    for number in range(150):
        for tenant, (prompt, output) in shapes.items():
            count = {"long": 1, "short": 8, "chatty": 1}[tenant]
            for _ in range(count):
                id = len(requests) + 1
                requests[id] = (tenant, prompt, output)
                scheduler.add(spec(id, prompt, output, tenant=tenant, arrived=float(number)))
    served = dict.fromkeys(shapes, 0.0)
    waiting = {tenant: {id for id, row in requests.items() if row[0] == tenant} for tenant in shapes}
    bound = 2 * max(WEIGHTS[0] * 30, WEIGHTS[1] * 2 * 40)  # two places, outputs of at most 40
    compared = 0
    for number in range(2000):
        log = run_step(scheduler, now=float(number), check=False)
        for id in log.cached:
            served[requests[id][0]] += cost(requests[id][1], 0)
            waiting[requests[id][0]].discard(id)
        for id in log.sampled:
            served[requests[id][0]] += cost(0, 1)
        if all(waiting.values()):
            compared += 1
            assert max(served.values()) - min(served.values()) <= bound
    assert compared > 100
    assert max(served.values()) > 4 * bound, "the bound is small against what was served"


def test_a_crowd_does_not_keep_another_tenant_out() -> None:
    scheduler = core("fair-share", max_running=1)
    arrive(scheduler, *((id, 4, 2) for id in range(1, 500)), tenant="crowd")
    steps(scheduler, 6)
    arrive(scheduler, (500, 4, 2), tenant="lone")
    order = [id for number in range(8) for id in run_step(scheduler, now=float(number)).cached]
    assert 500 in order[:2]


def test_idling_saves_nothing_up() -> None:
    """Who comes back is lifted to the others: it does not take the machine for what it did not use."""
    scheduler = core("fair-share", max_running=1)
    arrive(scheduler, (1, 4, 2), tenant="lazy")
    run_all(scheduler)
    arrive(scheduler, *((id, 4, 2) for id in range(2, 60)), tenant="busy")
    steps(scheduler, 40)
    arrive(scheduler, *((id, 4, 2) for id in range(60, 100)), tenant="lazy")
    order = [id for number in range(40) for id in run_step(scheduler, now=float(number)).cached]
    lazy = sum(id >= 60 for id in order)
    assert abs(2 * lazy - len(order)) <= 2


def test_a_debt_is_not_forgiven_by_waiting_anew() -> None:
    scheduler = core("fair-share", max_running=1)
    arrive(scheduler, (1, 60, 60), tenant="heavy")
    arrive(scheduler, *((id, 4, 2) for id in range(2, 60)), tenant="light")
    while scheduler.running == 0 or 1 in {row.id for row in scheduler.request_rows(1)}:
        run_step(scheduler)
    arrive(scheduler, (100, 4, 2), tenant="heavy")
    order = [id for number in range(30) for id in run_step(scheduler, now=float(number)).cached]
    assert 100 not in order, "180 weighted tokens are 22 requests of the other"


def test_weights_change_what_counts() -> None:
    orders = []
    for weights in ("admission.prompt_weight=1,admission.output_weight=0", "admission.prompt_weight=0"):
        scheduler = core(f"fair-share,{weights}", max_running=1)
        arrive(scheduler, *((id, 40, 1) for id in range(1, 20)), tenant="reads")
        arrive(scheduler, *((id, 1, 10) for id in range(20, 60)), tenant="writes")
        order = [id for number in range(60) for id in run_step(scheduler, now=float(number)).cached]
        orders.append(sum(id < 20 for id in order) / len(order))
    assert orders[0] < 0.25 < 0.75 < orders[1]


def test_a_tenants_own_requests_keep_their_order() -> None:
    scheduler = core("fair-share", max_running=2)
    for id in range(1, 41):
        scheduler.add(spec(id, 1 + id % 7, 3, tenant="ab"[id % 2]))
    order = [id for log in run_all(scheduler) for id in log.cached]
    assert [id for id in order if id % 2] == sorted(id for id in order if id % 2)
    assert [id for id in order if not id % 2] == sorted(id for id in order if not id % 2)


def test_every_tenants_first_is_seen_behind_a_long_line() -> None:
    scheduler = core("fair-share", max_running=1)
    arrive(scheduler, *((id, 4, 2) for id in range(1, 3 * fair_share.WINDOW)), tenant="crowd")
    for number in range(50):
        arrive(scheduler, (1000 + number, 4, 2), tenant=f"t{number}")
    order = [id for number in range(140) for id in run_step(scheduler, now=float(number)).cached]
    assert sum(id >= 1000 for id in order) == 50


def test_preempted_requests_are_charged_once() -> None:
    scheduler = core("fair-share", blocks=12, max_running=4)
    arrive(scheduler, *((id, 8, 12) for id in range(1, 7)), tenant="one")
    logs = run_all(scheduler)
    assert any(log.preempted for log in logs)
    arrive(scheduler, (9, 1, 1), tenant="one")
    run_all(scheduler)
    assert policy(scheduler)._served["one"] <= 6 * cost(8, 12) + cost(1, 1)
    assert policy(scheduler)._served["one"] >= 6 * cost(8, 12) - cost(0, 1)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "MANY_TENANTS", 20)
    monkeypatch.setattr(fair_share, "WINDOW", 16)
    monkeypatch.setattr(learning, "LOOKED_AT", 16)
    scheduler = core("fair-share", max_running=2)
    for id in range(1, 400):
        scheduler.add(spec(id, 2, 1 + id % 3, tenant=f"tenant {id}"))
    for number in range(600):
        log = run_step(scheduler, now=float(number))
        running = [id for id in log.scheduled if id % 5 == 0]
        scheduler.cancel(running)
    assert len(policy(scheduler)._served) <= 40
    assert len(policy(scheduler)._progress) <= 4 * 2 + 16 + 2


def test_state_survives_a_restart() -> None:
    scheduler = core("fair-share", max_running=1)
    arrive(scheduler, (1, 4, 30), tenant="served")
    run_all(scheduler)
    arrive(scheduler, (2, 1, 1), tenant="light")
    run_all(scheduler)
    state = policy(scheduler).export_state()
    fresh = core("fair-share", max_running=1)
    policy(fresh).import_state(state)
    arrive(fresh, (3, 4, 1), tenant="served")
    arrive(fresh, (4, 4, 1), tenant="other")
    assert list(scheduled(fresh)) == [4]
    policy(fresh).import_state({"version": 99, "served": {"x": 1}})
    assert "x" not in policy(fresh)._served
    assert policy(fresh).dump()["served served"] >= 60.0  # type: ignore[operator]


def test_of_equals_the_earliest_arrival_comes_in_whatever_its_name() -> None:
    scheduler = core("fair-share", max_running=1)
    arrive(scheduler, (1, 4, 1), tenant="first")
    steps(scheduler, 1)
    arrive(scheduler, (2, 4, 1), tenant="zz")
    order: list[int] = []
    for id in range(3, 40):
        arrive(scheduler, (id, 4, 1), tenant=f"a{id}")
        order += run_step(scheduler, now=float(id)).cached
    assert order == sorted(order)


def test_without_weights_it_is_the_order_of_arrival() -> None:
    scheduler = core("fair-share,admission.prompt_weight=0,admission.output_weight=0", max_running=2)
    for id in range(1, 60):
        arrive(scheduler, (id, 1 + id % 9, 1 + id % 5), tenant="ab"[id % 7 == 0])
    order = [id for log in run_all(scheduler) for id in log.cached]
    assert order == sorted(order)


def waited(prompt: int, backlog: int, most: int = 1200) -> int:
    """One-shot tenants without end, and one who was served `prompt` tokens and asks again: who came in before it."""
    scheduler = core("fair-share", max_running=1, max_step_tokens=256, max_model_len=256)
    arrive(scheduler, (1, prompt, 1), (2, prompt, 1), tenant="old")
    next_id, came = 3, 0
    for number in range(most):
        while scheduler.waiting < backlog:
            arrive(scheduler, (next_id, 4, 1), tenant=f"t{next_id}")
            next_id += 1
        log = run_step(scheduler, now=number / 100, check=False)
        if 2 in log.cached:
            return came
        came += len(log.cached)
    return most


def test_tenants_that_come_once_do_not_keep_an_older_one_out() -> None:
    """What it owes is shared among those that wait: 10 of them, 40 tokens of prompt, 6 weighted tokens a request."""
    assert 30 <= waited(40, 10) <= 42 * 10 / 6 + 10


def test_a_debt_too_large_for_that_is_forgiven_after_enough_others() -> None:
    assert waited(250, 60) <= PASSES + 2 * LOOK_EVERY
