"""Isolation: two deaths make suspects, suspects run alone, only the one that kills alone is failed."""

from __future__ import annotations

from kvyard.front.generation import LiveGeneration
from kvyard.front.isolation import CLEARED_AFTER
from kvyard.link.messages import Cancel, Reply
from kvyard.link.progress import EnginePhase

from tests.front.test_journal import record
from tests.front.yard import Yard, death, info, job, outputs


def killed(
    yard: Yard, *ids: int, returncode: int = -11, hang: str | None = None, phase: EnginePhase = EnginePhase.MODEL
) -> list[int]:
    """The engine dies with these in its step and another comes up; what that one is given."""
    yard.serving.engine_down(death(ids, returncode, hang, phase))
    yard.sent.clear()
    yard.serving.engine_up(info())
    return yard.taken()


async def ends(generation: LiveGeneration) -> list[object]:
    return [delta.error[0] if delta.error else delta.finish async for delta in generation if delta.finish]


async def test_the_guilty_one_is_found_and_it_alone_is_failed() -> None:
    yard = Yard()
    generations = {i: yard.serving.submit(job(f"r{i}")) for i in (1, 2, 3)}
    assert killed(yard, 1, 2, 3) == [1, 2, 3]
    assert killed(yard, 1, 2, 3) == [1]
    for token in range(CLEARED_AFTER):
        yard.serving.outputs(outputs({1: token}))
    # 1 did no harm: it leaves the engine before the next comes in, and its last tokens are waited for.
    assert yard.sent[0] == Cancel([1])
    (ticket,) = yard.fences()
    yard.sent.clear()
    yard.serving.replied(Reply(ticket))
    assert yard.taken() == [2]
    assert killed(yard, 2) == [3]
    assert await ends(generations[2]) == ["engine_killed"]
    yard.serving.outputs(outputs({3: 1}, finished=[(3, "stop")]))
    assert yard.taken() == [1]
    yard.serving.outputs(outputs({1: 9}, finished=[(1, "stop")]))
    assert await ends(generations[1]) == ["stop"]
    assert await ends(generations[3]) == ["stop"]


def test_new_requests_wait_while_a_suspect_runs_alone() -> None:
    yard = Yard()
    yard.serving.submit(job("a"))
    killed(yard, 1)
    assert killed(yard, 1) == [1]
    yard.serving.submit(job("b"))
    assert yard.taken() == []
    yard.serving.outputs(outputs({1: 5}, finished=[(1, "stop")]))
    assert yard.taken() == [2]


def test_kill_minus_nine_from_outside_blames_nobody() -> None:
    yard = Yard()
    for i in range(4):
        yard.serving.submit(job(f"r{i}"))
    for _ in range(9):
        assert killed(yard, 1, 2, 3, 4, returncode=-9) == [1, 2, 3, 4]
    assert yard.counts.of("finished") == []


def test_a_hang_in_a_policy_is_not_the_requests_fault() -> None:
    yard = Yard()
    yard.serving.submit(job())
    for _ in range(5):
        hang = "policy admission/stuck did not return for 1.6 s"
        assert killed(yard, 1, returncode=-9, hang=hang, phase=EnginePhase.POLICY) == [1]


def test_a_policy_that_crashes_the_engine_is_not_the_requests_fault() -> None:
    yard = Yard()
    yard.serving.submit(job())
    for _ in range(5):
        assert killed(yard, 1, returncode=-11, phase=EnginePhase.POLICY) == [1]


def test_whom_a_death_speaks_against() -> None:
    policy = EnginePhase.POLICY
    assert death((1,), -11, None, policy).policy_at_fault == "admission/x"
    assert death((1,), 3, None, policy).policy_at_fault == "admission/x"
    assert death((1,), -9, "policy admission/x did not return for 1.6 s", policy).policy_at_fault == "admission/x"
    assert death((1,), -9, "lost its link (end of file)", policy).policy_at_fault is None
    assert death((1,), -9, None, policy).policy_at_fault is None, "a kill from outside is nobody's fault"
    assert death((1,), -11, None, EnginePhase.MODEL).policy_at_fault is None


def test_a_hang_in_the_model_is() -> None:
    yard = Yard()
    yard.serving.submit(job("a"))
    yard.serving.submit(job("b"))
    hang = "step 7 stayed in model for 130.0 s"
    assert killed(yard, 1, returncode=-9, hang=hang) == [1, 2]
    assert killed(yard, 1, returncode=-9, hang=hang) == [1]
    assert killed(yard, 1, returncode=-9, hang=hang) == [2]
    assert [item[1] for item in yard.counts.of("finished")] == ["engine_killed"]


def test_a_death_between_steps_is_nobodys() -> None:
    yard = Yard()
    yard.serving.submit(job())
    for _ in range(5):
        assert killed(yard) == [1]


async def test_a_cancelled_suspect_makes_way() -> None:
    yard = Yard()
    first = yard.serving.submit(job("a"))
    yard.serving.submit(job("b"))
    killed(yard, 1, 2)
    assert killed(yard, 1, 2) == [1]
    first.cancel()
    assert yard.taken() == [2]


def test_a_death_while_a_newcomer_is_taken_in_blames_the_newcomer() -> None:
    yard = Yard()
    yard.serving.submit(job("a"))
    yard.serving.submit(job("b"))
    yard.serving.step(record(admitted=[(1, 0)]))

    def dies_in_schedule() -> list[int]:
        yard.serving.engine_down(death((), returncode=1, phase=EnginePhase.SCHEDULE))
        yard.sent.clear()
        yard.serving.engine_up(info())
        taken = yard.taken()
        if 1 in taken:
            yard.serving.step(record(admitted=[(1, 0)]))
        return taken

    assert dies_in_schedule() == [1, 2]
    assert dies_in_schedule() == [2]
    assert dies_in_schedule() == [1]
    assert [item[1] for item in yard.counts.of("finished")] == ["engine_killed"]
