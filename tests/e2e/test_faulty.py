"""Every fault that a policy can have, on the live daemon under eight running and twenty waiting requests."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.faults import FLAGS, HARD_S, WALL_S, WANTED, Fault, Yard, try_fault, yard_of
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import Result, Wish, run_each, wishes
from tests.e2e.test_plugin import install
from tests.e2e.timing import limit

FAULTY = Path(__file__).parents[2] / "plugins" / "faulty"

QUICK = [
    Fault("raises", ("raised",)),
    Fault("garbage", ("nonsense",)),
    Fault("unknown", ("unknown",)),
    Fault("finished", ("finished",)),
    Fault("nobody", ("stalled",)),
    Fault("sleeps", ("timeout",), most_s=WALL_S),
    Fault("catches", ("timeout",), most_s=HARD_S),
    Fault("blocks-signal", ("tampered",)),
    Fault("thread", ("spawned",)),
    Fault("file", ("forbidden",)),
    Fault("memory", ("memory",)),
    Fault("memory-in-pieces", ("memory",)),
    Fault("overcommits", ("over-committed",)),
]
"""A representative of each way to fail."""
OTHERS = [
    Fault("none", ("not-a-decision",)),
    Fault("duplicates", ("duplicate",)),
    Fault("victims-raise", ("raised",), kind="preemption"),
    Fault("negative", ("nonsense",), kind="prefill"),
    Fault("shape", ("nonsense",), kind="prefill"),
    Fault("over-budget", ("over-budget",), kind="prefill"),
    Fault("everybody", ()),  # no preemption policy that comes with kvyard lets it put out others
    Fault("starves", ("stalled", "starving")),
    Fault("loops", ("timeout",)),
    Fault("suppresses", ("timeout",)),
    Fault("finally", ("timeout",)),
    Fault("regex", ("timeout",)),
    Fault("replaces-handler", ("tampered",)),
    Fault("stops-timer", ("tampered",)),
    Fault("fork", ("spawned",)),
    Fault("command", ("spawned",)),
    Fault("socket", ("forbidden",)),
    Fault("module", ("tampered",)),
    Fault("memory-until-it-fails", ("memory",)),
    Fault("memory-mapped", ("memory",)),
    Fault("recursion", ("tampered",)),
    Fault("collector", ("tampered",)),
    Fault("freezes", ("tampered",)),
    Fault("traces", ("tampered",)),
    Fault("profiles", ("tampered",)),
    Fault("switch-interval", ("tampered",)),
    Fault("pipe", ("tampered",)),
    Fault("environment", ("tampered",)),
    Fault("writes", ("raised",)),
]
THRASHING = [
    Fault("everybody", ("thrashing",), beside="obliging"),
    Fault("same-victim", ("thrashing",), kind="preemption"),
    Fault("cycle", ("thrashing",), kind="preemption"),
]
DEADLY = [
    ("c-loop", "hung"),
    ("segfault", "crashed"),
    ("exit", "crashed"),
    ("blocks-and-loops", "hung"),
]

CANDIDATES = [
    ("crashes-in-construction", "crashed"),
    ("crashes-in-adoption", "crashed"),
    ("stuck-in-construction", "hung"),
]
"""Take the engine down before they are in charge of anything."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty-site")
    install(FAULTY, folder)
    return folder


@pytest.fixture(scope="module")
def running(site: Path, default_model: Path) -> Iterator[DaemonProcess]:
    with daemon(*FLAGS, model=default_model, env={"PYTHONPATH": str(site)}) as process:
        yield process


@pytest.fixture(scope="module")
def solo(running: DaemonProcess) -> list[Result]:
    return run_each(running.base, WANTED)


@pytest.fixture(scope="module")
def yard(running: DaemonProcess, solo: list[Result]) -> Iterator[Yard]:
    with yard_of(running, solo) as connected:
        yield connected


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_PLUGIN_06_no_client_notices(yard: Yard, fault: Fault) -> None:
    record = try_fault(yard, fault)
    if record is not None and fault.name == "garbage":
        assert record["snapshot"]["running"] == 8
        assert record["decisions"][-1]["call"] == "admit"


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: fault.name)
def test_PLUGIN_06_no_client_notices_the_others_either(yard: Yard, fault: Fault) -> None:
    try_fault(yard, fault)
    assert not Path("/tmp/kvyard-faulty").exists()


def left_behind(yard: Yard, name: str, code: str, *, leave: bool = False) -> dict[str, Any]:
    """Its exit record, after a load that it leaves something behind in; `leave`: another takes over before."""
    before = len(yard.ejections())
    try:
        yard.swap("admission", f"faulty-{name}")
        yard.load()
        if leave:
            yard.swap("discipline", "vllm")
            yard.load()
        # What a policy leaves is collected when policies change, in the next idle moment.
        generation = yard.swap("prefill", "vllm")["generation"]
        wait_until(lambda: len(yard.ejections()) > before, 20, "the exit record")
        (record,) = yard.ejections()[before:]
        assert (record["policy"], record["code"]) == (f"admission/faulty-{name}", code)
        assert "code that it left behind" in record["message"]
        assert "leftovers.py" in record["traceback"]
        status = yard.client.call("status")
        assert [entry["policy"] for entry in status["quarantine"]] == [f"admission/faulty-{name}"]
        assert status["engine"]["restarts"] == 0
        if leave:
            assert yard.in_charge()["admission"] == "vllm", "another was in charge, and is"
            assert status["generation"] == generation
        else:
            assert yard.in_charge()["admission"] == "builtin"
        yard.load()
        return record
    finally:
        yard.restore()


def test_what_a_policy_leaves_behind_is_ended_and_it_is_put_out(yard: Yard) -> None:
    record = left_behind(yard, "leaves-loops", "timeout")
    spent = re.search(r"ended after (\d+) ms of CPU time and (\d+) ms by the clock", record["message"])
    assert spent is not None
    assert float(spent[1]) / 1e3 < HARD_S * 3, "CPU time, on whatever machine"
    assert float(spent[2]) / 1e3 < limit(HARD_S) * 3
    left_behind(yard, "ends-in-loop", "timeout", leave=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("leaves-sleeps", "timeout"), ("leaves-files", "forbidden")])
def test_what_a_policy_leaves_behind_may_do_no_more_than_it(yard: Yard, name: str, code: str) -> None:
    left_behind(yard, name, code)
    assert not Path("/tmp/kvyard-faulty").exists()


def test_a_faulty_part_takes_its_discipline_with_it(yard: Yard) -> None:
    before = len(yard.ejections())
    try:
        yard.swap("discipline", "faulty")
        yard.load()
        (record,) = yard.ejections()[before:]
        assert (record["policy"], record["code"]) == ("admission/faulty-raises", "raised")
        assert set(yard.in_charge().values()) == {"builtin"}
    finally:
        yard.restore()


@pytest.mark.parametrize(("name", "says"), [("import", "not on this machine"), ("constructor", "no such table")])
def test_a_candidate_that_cannot_be_made_changes_nothing(yard: Yard, name: str, says: str) -> None:
    before = yard.in_charge()
    with pytest.raises(ControlError, match=says):
        yard.swap("admission", f"faulty-{name}")
    assert yard.in_charge() == before


def test_PLUGIN_07_a_refused_candidate_then_twenty_swaps_under_load(yard: Yard) -> None:
    """A constructor that raises leaves the old one in charge; then twenty changes; 28 of 28 are served in order."""
    before, exits = yard.in_charge(), len(yard.ejections())
    made: list[dict[str, Any]] = []
    names = itertools.cycle(("vllm", "sarathi", "vllm-priority", "kvyard", "vllm"))
    under_load = 0

    def refused() -> None:
        with pytest.raises(ControlError, match="no such table"):
            yard.swap("admission", "faulty-constructor")
        assert yard.in_charge() == before
        swaps()

    def swaps() -> None:
        made.extend([yard.swap("discipline", next(names)) for _ in range(5)])

    try:
        # A busy machine may be done with the requests before the last changes of a round are made.
        for changes in (refused, *[swaps] * 11):
            since = max(yard.steps, default=0)
            yard.load(changes)
            # All of these disciplines admit equals in the order of arrival.
            steps = [step for number, step in sorted(yard.steps.items()) if number > since]
            first = list(dict.fromkeys(id for step in steps for id, _ in step["admitted"]))
            assert first == sorted(first)
            assert len(first) == len(WANTED)
            under_load += sum(result["step"] < steps[-1]["step"] for result in made[-5:])
            if under_load >= 20:
                break
        assert under_load >= 20, "the changes were made while they were served"
        assert len(yard.ejections()) == exits
        generations = [result["generation"] for result in made]
        assert generations == list(range(generations[0], generations[0] + len(made)))
    finally:
        yard.restore()


def test_a_candidate_that_fails_while_it_takes_over_changes_nothing(yard: Yard) -> None:
    before, exits = yard.in_charge(), len(yard.ejections())

    def refused() -> None:
        with pytest.raises(ControlError, match=r"adopt\(\) raised KeyError"):
            yard.swap("admission", "faulty-adopt")

    yard.load(refused)
    assert yard.in_charge() == before
    assert len(yard.ejections()) == exits


@pytest.mark.slow
def test_a_policy_that_cannot_tell_its_state_is_put_out(yard: Yard) -> None:
    before = len(yard.ejections())
    try:
        yard.swap("admission", "faulty-export")
        wait_until(lambda: (yard.load(), yard.ejections()[before:])[1], 60, "the next export")
        (record,) = yard.ejections()[before:]
        assert (record["policy"], record["code"]) == ("admission/faulty-export", "raised")
    finally:
        yard.restore()


@pytest.mark.parametrize("discipline", ["static", "dynamic-window"])
def test_waiting_on_purpose_puts_nobody_out(yard: Yard, discipline: str) -> None:
    before = len(yard.ejections())
    try:
        yard.swap("discipline", discipline)
        yard.load()
        assert yard.ejections()[before:] == []
        assert yard.client.call("status")["discipline"] == discipline
    finally:
        yard.restore()


def deadly(
    site: Path,
    default_model: Path,
    solo: list[Result],
    faults: list[tuple[str, str]],
    candidates: list[tuple[str, str]],
) -> None:
    """Each of them takes its engine down; all on one daemon."""
    with (
        daemon(*FLAGS, model=default_model, env={"PYTHONPATH": str(site)}) as running,
        yard_of(running, solo) as yard,
    ):
        for number, (name, code) in enumerate(faults, 1):
            yard.swap("admission", f"faulty-{name}")
            yard.load()
            wait_until(partial(told, yard, number), 10, "the exit record")
            record = yard.ejections()[-1]
            assert (record["policy"], record["code"]) == (f"admission/faulty-{name}", code)
            check_back_soon(yard)
            if code == "hung":
                assert "deadly.py" in record["traceback"], "the stack names the place"
            status = yard.client.call("status")
            assert status["engine"]["restarts"] == number
            assert yard.in_charge()["admission"] == "builtin"
            assert [entry["policy"] for entry in status["quarantine"]] == [f"admission/faulty-{name}"]
            with pytest.raises(ControlError, match="quarantine"):
                yard.swap("admission", f"faulty-{name}")
            assert value(running, "kvyard_policy_ejections_total", kind="admission", code=code) >= 1
            yard.restore()
        deadly_candidates(yard, candidates)
        idle_again(running)


def deadly_candidates(yard: Yard, faults: list[tuple[str, str]]) -> None:
    """The change is answered with what happened, what was in charge stays so, and no client notices."""
    before, told_before = yard.in_charge(), len(yard.ejections())

    def refused() -> None:
        for name, code in faults:
            with another_operator(yard) as other:
                other.look_on()
                with pytest.raises(ControlError, match=f"admission/faulty-{name} took the engine down") as refusal:
                    yard.swap("admission", f"faulty-{name}")
                other.look_on()
            assert refusal.value.code == code
            assert {refused.code for refused in other.refusals} <= {"engine-lost", "no-engine"}
            assert other.refusals or code != "hung", "for seconds nobody was answered"
            messages = [refused.message for refused in other.refusals]
            assert not any(name in message for message in messages), "that is the answer to the change alone"
            wait_until(lambda: yard.client.call("status")["ready"], 30, "the next engine")

    yard.load(refused)
    records = yard.ejections()[told_before:]
    assert [(r["policy"], r["code"]) for r in records] == [(f"admission/faulty-{n}", code) for n, code in faults]
    assert yard.in_charge() == before
    for name, _ in faults:
        with pytest.raises(ControlError, match="quarantine"):
            yard.swap("admission", f"faulty-{name}")


@dataclass
class Onlooker:
    """An operator who looks at the policies all the while."""

    looks: int = 0
    refusals: list[ControlError] = field(default_factory=list)

    def look_on(self) -> None:
        """Wait until he has looked once more, and was answered."""
        before = self.looks
        wait_until(lambda: self.looks > before, 60, "another look")


@contextmanager
def another_operator(yard: Yard) -> Iterator[Onlooker]:
    """Somebody else looks on."""
    onlooker = Onlooker()
    over = threading.Event()

    def look() -> None:
        with Client(yard.running.socket, timeout=60) as client:
            while not over.wait(0.02):
                try:
                    client.call("policy.show")
                except ControlError as error:
                    onlooker.refusals.append(error)
                onlooker.looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield onlooker
    finally:
        over.set()
        thread.join()


def told(yard: Yard, count: int) -> bool:
    """So many exit records are there."""
    return len(yard.ejections()) == count


def check_back_soon(yard: Yard) -> None:
    """From the fault to a new engine that serves in five seconds: a hang, its detection and the start."""
    events = yard.client.call("events", {"limit": 20})
    at = {event["data"]["kind"]: event["at"] for event in events}
    hang = re.search(r"did not return for ([0-9.]+) s", yard.ejections()[-1]["message"])
    away = at["engine"] - at["ejected"] + (float(hang[1]) if hang else 0.0)
    assert 0 < away < limit(5)


@pytest.mark.timeout(180)
def test_what_takes_the_engine_down_is_known_and_put_away(
    site: Path, default_model: Path, solo: list[Result]
) -> None:
    deadly(site, default_model, solo, DEADLY[:2], CANDIDATES[:1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_other_ways_to_take_the_engine_down(site: Path, default_model: Path, solo: list[Result]) -> None:
    deadly(site, default_model, solo, DEADLY[2:], CANDIDATES[1:])


@pytest.mark.slow
def test_a_candidate_that_is_never_done_with_being_made_changes_nothing(yard: Yard) -> None:
    before, exits = yard.in_charge(), len(yard.ejections())

    def refused() -> None:
        with pytest.raises(ControlError, match="its import and construction did not end within"):
            yard.swap("admission", "faulty-never-constructed")

    yard.load(refused)
    assert yard.in_charge() == before
    assert len(yard.ejections()) == exits


def test_a_slow_model_is_nobodys_fault(default_model: Path, solo: list[Result]) -> None:
    faults = json.dumps([{"point": "model", "action": "sleep", "seconds": 0.8, "step": step} for step in (5, 9, 14)])
    with (
        daemon(*FLAGS, model=default_model, env={"KVYARD_TEST_FAULTS": faults}) as running,
        yard_of(running, solo) as yard,
    ):
        yard.load()
        assert yard.ejections() == []
        assert yard.client.call("status")["discipline"] == "kvyard"


@pytest.fixture(scope="module")
def strict(site: Path, quick_model_folder: Path) -> Iterator[DaemonProcess]:
    """A daemon with lower limits of conduct, so that bad conduct shows within a test's time. One block each of 16."""
    flags = ("--deterministic", "--dtype", "float32", "--kv-blocks", "8")
    conduct = {"overtakes": 40, "thrashes": 3}
    env = {"PYTHONPATH": str(site), "KVYARD_TEST_CONDUCT": json.dumps(conduct)}
    size = ("--max-running", "8", "--max-step-tokens", "64")
    with daemon(*flags, *size, model=quick_model_folder, env=env) as running:
        yield running


def quick_wishes(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Wish]:
    """Wishes for the quick model, which knows few tokens."""
    made = wishes(count, seed=92, prompt=prompt, output=output)
    return [Wish(tuple(token % 250 for token in wish.prompt), wish.max_tokens) for wish in made]


@pytest.fixture(scope="module")
def crowd(strict: DaemonProcess) -> Iterator[Yard]:
    """Eight run and twenty wait, and two need the whole pool at their ends."""
    wanted = quick_wishes(28, prompt=(8, 12), output=(40, 40))
    with yard_of(strict, run_each(strict.base, wanted), wanted) as yard:
        yield yard


@pytest.mark.parametrize("fault", THRASHING, ids=lambda fault: fault.name)
def test_who_lets_nobody_get_anywhere_is_put_out(crowd: Yard, fault: Fault) -> None:
    record = try_fault(crowd, fault)
    assert record is not None
    evidence = re.search(r"sequence (\d+) gave way to later ones (\d+) times", record["message"])
    assert evidence is not None
    assert int(evidence[2]) == 4
    gave_way = [
        step["step"]
        for step in crowd.steps.values()
        if any(taken["id"] == int(evidence[1]) for taken in step["preempted"])
    ]
    assert len(gave_way) >= 4, "as the step records say"
    assert record["step"] in gave_way


def test_who_starves_one_request_is_put_out_and_it_is_served(strict: DaemonProcess) -> None:
    """Passed over by more others than the limit of conduct (lowered for the test), it then comes in."""
    # The others take more than twice the 64 steps that lie between two looks at who starves.
    wanted = quick_wishes(150, prompt=(4, 8), output=(7, 9))
    with yard_of(strict, run_each(strict.base, wanted), wanted) as yard:
        before = len(yard.ejections())
        yard.swap("admission", "faulty-starves")
        yard.client.call("policy.set", {"kind": "admission", "params": {"running": 0, "waiting": 100}})
        yard.load()
        (record,) = yard.ejections()[before:]
        assert (record["policy"], record["code"]) == ("admission/faulty-starves", "starving")
        starved = re.search(r"sequence (\d+) was passed over by (\d+) others", record["message"])
        assert starved is not None
        assert int(starved[2]) > 40
        assert yard.in_charge()["admission"] == "builtin"
        came_in = [step["step"] for step in yard.steps.values() if int(starved[1]) in dict(step["admitted"])]
        assert len(came_in) == 1
        assert record["step"] <= came_in[0] <= record["step"] + 20, "served as soon as places are free"
        assert value(strict, "kvyard_policy_ejections_total", kind="admission", code="starving") == 1
        yard.restore()
