"""Serving: what is accepted, what streams get, and what survives an engine's death."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.generation import LiveGeneration
from kvyard.front.service import Delta, Refusal
from kvyard.link.codec import ToEngine, decode_sampling
from kvyard.link.messages import Cancel, Failed, Reply, Sampling, Submit
from kvyard.link.progress import EnginePhase
from structlog.testing import capture_logs

from tests.front.yard import Yard, death, info, job, outputs


async def read(generation: LiveGeneration) -> list[Delta]:
    return [delta async for delta in generation]


async def test_a_stream_gets_its_tokens_and_one_finish() -> None:
    yard = Yard()
    generation = yard.serving.submit(job(max_new=3))
    assert yard.taken() == [1]
    yard.serving.outputs(outputs({1: 11}, at=0.5, admitted=[(1, 0.25, 16)]))
    yard.serving.outputs(outputs({1: 12}, at=0.75))
    yard.serving.outputs(outputs({1: 13}, at=1.5, finished=[(1, "length")]))
    deltas = await read(generation)
    assert [token for delta in deltas for token in delta.tokens] == [11, 12, 13]
    assert [delta.finish for delta in deltas if delta.finish] == ["length"]
    assert generation.cached_tokens == 16
    assert yard.counts.of("queued") == [(0.25,)]
    assert yard.counts.of("first") == [(0.5,)]
    assert yard.counts.of("inter") == [(0.25, 1), (0.75, 1)]
    assert yard.counts.of("finished") == [("length", "", 3, 3, 0)]
    assert len(yard.serving.journal) == 0


async def test_a_waiting_reader_is_woken_by_each_token() -> None:
    yard = Yard()
    generation = yard.serving.submit(job())
    reader = asyncio.ensure_future(read(generation))
    for token in range(5):
        await asyncio.sleep(0)
        yard.serving.outputs(outputs({1: token}, finished=[(1, "length")] if token == 4 else []))
        await asyncio.sleep(0.001)
    deltas = await reader
    assert len(deltas) == 5
    assert [delta.tokens for delta in deltas] == [[0], [1], [2], [3], [4]]


async def test_continuations_have_their_own_index_id_and_finish() -> None:
    yard = Yard()
    generation = yard.serving.submit(job(n=3))
    submitted = [message.sequence for message in yard.sent if isinstance(message, Submit)]
    assert [(s.id, s.request, s.index) for s in submitted] == [(1, 1, 0), (2, 1, 1), (3, 1, 2)]
    yard.serving.outputs(outputs({3: 5, 1: 6}, finished=[(3, "stop")]))
    yard.serving.outputs(outputs({1: 7, 2: 8}, finished=[(1, "length"), (2, "length")]))
    deltas = await read(generation)
    by_index = {i: [t for d in deltas if d.index == i for t in d.tokens] for i in range(3)}
    assert by_index == {0: [6, 7], 1: [8], 2: [5]}
    assert sorted((d.index, d.finish) for d in deltas if d.finish) == [(0, "length"), (1, "length"), (2, "stop")]


def test_one_sequence_of_a_job_tells_what_is_said_of_its_prompt() -> None:
    yard = Yard()
    yard.serving.submit(job(n=3, sampling=Sampling(seed=7, logprobs=1, prompt_logprobs=2)))
    submitted = [message.sequence for message in yard.sent if isinstance(message, Submit)]
    assert [sequence.scored for sequence in submitted] == [True, False, False]
    samplings = [decode_sampling(sequence.sampling) for sequence in submitted]
    assert [sampling.prompt_logprobs for sampling in samplings] == [2, -1, -1]
    assert [(sampling.seed, sampling.logprobs, sampling.index) for sampling in samplings] == [
        (7, 1, index) for index in range(3)
    ]


@pytest.mark.parametrize(
    ("prompt", "max_new", "code"), [(0, 5, "empty_prompt"), (60, 41, "context_length_exceeded"), (101, 0, "context")]
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: int, max_new: int, code: str) -> None:
    yard = Yard()
    with pytest.raises(Refusal) as refusal:
        yard.serving.submit(job(prompt=prompt, max_new=max_new))
    assert refusal.value.status == 400
    assert refusal.value.code.startswith(code)
    if prompt:
        assert all(str(number) in refusal.value.message for number in (100, prompt, max_new))
    assert yard.taken() == []
    assert yard.counts.of("refused") == [(refusal.value.code,)]


def test_the_last_legal_length_is_accepted() -> None:
    yard = Yard()
    yard.serving.submit(job(prompt=60, max_new=40))
    assert yard.taken() == [1]


def test_CAPACITY_05_a_full_queue_is_refused_at_once_with_retry_after() -> None:
    yard = Yard(max_waiting=16)
    results = []
    for number in range(100):
        try:
            yard.serving.submit(job(f"r{number}"))
            results.append(200)
        except Refusal as refusal:
            assert refusal.retry_after is not None
            assert refusal.retry_after >= 1
            results.append(refusal.status)
    assert results.count(200) == 20
    assert results.count(429) == 80


def test_CAPACITY_07_a_job_is_taken_whole_or_not_at_all() -> None:
    yard = Yard(max_waiting=4)
    accepted = 0
    for _ in range(4):
        try:
            yard.serving.submit(job(n=4))
            accepted += 1
        except Refusal:
            pass
    assert accepted == 2
    assert len(yard.serving.journal) == 8


def test_waiting_prompt_tokens_are_bounded_too() -> None:
    yard = Yard(max_waiting_tokens=100)
    yard.serving.submit(job(prompt=60))
    yard.serving.submit(job(prompt=60))
    with pytest.raises(Refusal, match="120 prompt tokens wait and 100 is the most"):
        yard.serving.submit(job(prompt=1))
    yard.serving.outputs(outputs({}, admitted=[(1, 0.0, 0)]))
    yard.serving.submit(job(prompt=1))


def test_before_the_first_engine_requests_are_told_to_come_again() -> None:
    yard = Yard(up=False)
    assert not yard.serving.ready
    assert "starting" in yard.serving.not_ready_reason
    with pytest.raises(Refusal) as refusal:
        yard.serving.submit(job())
    assert (refusal.value.status, refusal.value.code) == (503, "starting")


async def test_a_cancelled_client_frees_everything_and_nothing_more_is_delivered() -> None:
    yard = Yard()
    generation = yard.serving.submit(job(n=2))
    yard.serving.outputs(outputs({1: 5, 2: 6}))
    yard.sent.clear()
    generation.cancel()
    generation.cancel()
    assert yard.sent == [Cancel([1]), Cancel([2])]
    yard.serving.outputs(outputs({1: 7, 2: 8}, finished=[(1, "length")]))
    assert await read(generation) == []
    assert [item[0] for item in yard.counts.of("finished")] == ["cancelled", "cancelled"]


async def test_a_stop_string_ends_one_continuation_alone() -> None:
    yard = Yard()
    generation = yard.serving.submit(job(n=2))
    yard.sent.clear()
    generation.stop(0)
    assert yard.sent == [Cancel([1])]
    yard.serving.outputs(outputs({2: 9}, finished=[(2, "length")]))
    deltas = await read(generation)
    assert [(delta.index, delta.finish) for delta in deltas] == [(1, "length")]


async def test_a_failed_sequence_tells_its_client() -> None:
    yard = Yard()
    generation = yard.serving.submit(job())
    yard.serving.outputs(outputs({1: 5}))
    yard.serving.failed(Failed(1, "model_error", "no numbers"))
    deltas = await read(generation)
    assert deltas[-1].finish == "error"
    assert deltas[-1].error == ("model_error", "no numbers")
    assert yard.counts.of("finished") == [("error", "model_error", 3, 1, 0)]


async def test_queue_timeout_and_deadline_end_in_a_clear_error() -> None:
    yard = Yard()
    late = yard.serving.submit(job("a", queue_timeout=2.0))
    served = yard.serving.submit(job("b", queue_timeout=2.0))
    doomed = yard.serving.submit(job("c", deadline=5.0))
    yard.serving.outputs(outputs({2: 1, 3: 1}, admitted=[(2, 1.0, 0), (3, 1.0, 0)]))
    yard.now = 3.0
    yard.serving.sweep()
    yard.now = 6.0
    yard.serving.sweep()
    yard.serving.outputs(outputs({2: 2}, finished=[(2, "length")]))
    ends = [(await read(generation))[-1] for generation in (late, served, doomed)]
    assert [end.error[0] if end.error else end.finish for end in ends] == ["queue_timeout", "length", "deadline"]


def test_refusals_for_a_full_queue_are_logged_once_a_second() -> None:
    yard = Yard(max_waiting=0)
    for _ in range(4):
        yard.serving.submit(job())
    with capture_logs() as lines:
        for tenth in range(25):
            yard.now = tenth / 10
            with pytest.raises(Refusal):
                yard.serving.submit(job())
            yard.serving.sweep()
        yard.now = 9.0
        yard.serving.sweep()
        yard.serving.sweep()
    assert [(line["event"], line["log_level"], line["status"], line["count"]) for line in lines] == [
        ("requests.refused", "info", 429, count) for count in (1, 10, 10, 4)
    ]
    assert "4 is the most" in lines[0]["last"]


def test_draining_refuses_what_comes_and_tells_when_the_last_is_done() -> None:
    yard = Yard()
    idle: list[int] = []
    yard.serving.idle = lambda: idle.append(1)
    yard.serving.submit(job())
    yard.serving.draining = True
    with pytest.raises(Refusal) as refusal:
        yard.serving.submit(job())
    assert (refusal.value.status, refusal.value.code) == (503, "draining")
    assert refusal.value.message == "the daemon takes no new requests for now"
    assert yard.serving.not_ready_reason.endswith("takes nothing new until `kvyard resume`")
    yard.serving.leaving = True
    with pytest.raises(Refusal, match="shutting down"):
        yard.serving.submit(job())
    assert yard.serving.not_ready_reason.endswith("takes nothing new")
    assert not yard.serving.ready
    assert idle == []
    yard.serving.outputs(outputs({1: 1}, finished=[(1, "stop")]))
    assert idle == [1]


# ---- the engine dies


async def test_every_stream_goes_on_behind_the_tokens_already_sent() -> None:
    yard = Yard()
    generations = [yard.serving.submit(job(f"r{i}", max_new=4)) for i in range(3)]
    yard.serving.outputs(outputs({1: 10, 2: 20}))
    yard.serving.outputs(outputs({1: 11}))
    yard.sent.clear()
    yard.serving.engine_down(death((1, 2), -9))
    assert not yard.serving.ready
    assert "restarts" in yard.serving.not_ready_reason
    late = yard.serving.submit(job("late"))
    assert yard.sent == []
    yard.serving.engine_up(info(pid=2))
    again = {m.sequence.id: m.sequence for m in yard.sent if isinstance(m, Submit)}
    emitted = {i: np.frombuffer(s.emitted, np.int32).tolist() for i, s in again.items()}
    assert emitted == {1: [10, 11], 2: [20], 3: [], 4: []}
    yard.serving.outputs(outputs({1: 12, 2: 21, 3: 30, 4: 40}))
    last: list[tuple[int, str]] = [(i, "length") for i in (1, 2, 3, 4)]
    yard.serving.outputs(outputs({1: 13, 2: 22, 3: 31, 4: 41}, finished=last))  # type: ignore[arg-type]
    texts = [[t for d in await read(g) for t in d.tokens] for g in [*generations, late]]
    assert texts == [[10, 11, 12, 13], [20, 21, 22], [30, 31], [40, 41]]
    assert len(yard.counts.of("first")) == 4


@given(st.data())
def test_nothing_is_lost_and_nothing_repeated_over_random_deaths(data: st.DataObject) -> None:
    yard = Yard(max_waiting=100)
    lengths = {i + 1: data.draw(st.integers(1, 6), label="length") for i in range(5)}
    generations = {i: yard.serving.submit(job(f"r{i}", max_new=n)) for i, n in lengths.items()}
    engine: dict[int, int] = {}
    deaths = 0
    for _ in range(200):
        for message in yard.sent:
            if isinstance(message, Submit):
                engine[message.sequence.id] = len(message.sequence.emitted) // 4
            elif isinstance(message, Cancel):
                for sequence_id in message.ids:
                    engine.pop(sequence_id, None)
        tickets = yard.fences()
        yard.sent.clear()
        for ticket in tickets:
            yard.serving.replied(Reply(ticket))
        if not len(yard.serving.journal):
            break
        if deaths < 20 and data.draw(st.integers(0, 3), label="dies") == 0:
            deaths += 1
            yard.serving.engine_down(death(tuple(engine), -9))
            engine.clear()
            yard.serving.engine_up(info())
            continue
        step = {i: 100 * i + made for i, made in engine.items()}
        for i in step:
            engine[i] += 1
        ended = [i for i in step if engine[i] == lengths[i]]
        yard.serving.outputs(outputs(step, finished=[(i, "length") for i in ended]))
        for i in ended:
            del engine[i]
    for i, generation in generations.items():
        tokens = [t for d in asyncio.run(read(generation)) for t in d.tokens]
        assert tokens == [100 * i + made for made in range(lengths[i])]


def test_what_was_asked_of_a_dead_engine_is_answered() -> None:
    yard = Yard()
    replies: list[Reply] = []
    yard.serving.control("policies", {}, replies.append)
    yard.serving.engine_down(death(()))
    yard.serving.control("policies", {}, replies.append)
    assert [reply.code for reply in replies] == ["engine-lost", "no-engine"]
    assert "ask again when `kvyard status` says ready" in str(replies[0].error)
    assert yard.serving.tables()["engine_calls"] == 0


@pytest.mark.parametrize("asked", [{"kind": "admission", "name": "x"}, {"kind": "discipline", "name": "theirs"}])
def test_a_candidate_that_took_the_engine_down_is_named(asked: dict[str, object]) -> None:
    yard = Yard()
    replies: list[Reply] = []
    for hang, code in ((None, "crashed"), ("policy admission/x could not be loaded for 7.1 s", "hung")):
        yard.serving.control("swap", asked, replies.append)
        yard.serving.engine_down(death((), hang=hang, phase=EnginePhase.CANDIDATE), "admission/x")
        assert replies[-1].code == code
        assert str(replies[-1].error).startswith("admission/x took the engine down: ")
        yard.serving.engine_up(info())


OTHER_CALLS: list[tuple[str, dict[str, object]]] = [
    ("policies", {}),
    ("builtin", {"kind": "admission"}),
    ("set", {"kind": "admission", "params": {"x": 1}}),
    ("pause", {}),
    ("resume", {}),
    ("dump", {}),
    ("swap", {"kind": "prefill", "name": "x"}),
    ("swap", {"kind": "admission", "name": "xx"}),
]


def test_only_the_call_for_the_candidate_is_told_of_it() -> None:
    yard = Yard()
    answers: dict[int, Reply] = {}
    the_one: tuple[str, dict[str, object]] = ("swap", {"kind": "admission", "name": "x"})
    asked = [*OTHER_CALLS[:4], the_one, *OTHER_CALLS[4:]]
    for number, (method, params) in enumerate(asked):
        yard.serving.control(method, params, partial(answers.__setitem__, number))
    yard.serving.engine_down(death((), phase=EnginePhase.CANDIDATE), "admission/x")
    codes = [answers[number].code for number in range(len(asked))]
    assert codes == ["engine-lost"] * 4 + ["crashed"] + ["engine-lost"] * 4
    others = [answer for number, answer in answers.items() if number != 4]
    assert not any("admission/x" in str(answer.error) or "quarantine" in str(answer.error) for answer in others)


def test_no_call_is_blamed_for_a_policy_in_charge() -> None:
    yard = Yard()
    replies: list[Reply] = []
    yard.serving.control("swap", {"kind": "admission", "name": "x"}, replies.append)
    yard.serving.engine_down(death((), phase=EnginePhase.POLICY))
    assert [reply.code for reply in replies] == ["engine-lost"]


async def test_an_operators_cancel_is_told_and_counts_as_cancelled() -> None:
    yard = Yard()
    generation = yard.serving.submit(job("mine", n=2))
    assert yard.serving.cancel_request("mine") == 2
    ends = [delta.error for delta in await read(generation)]
    assert ends == [("cancelled", "the request was cancelled by an operator")] * 2
    assert [item[0] for item in yard.counts.of("finished")] == ["cancelled", "cancelled"]
    assert yard.serving.cancel_request("mine") == 0


@pytest.mark.parametrize("priority", [2**31, 2**63, 2**70, -(2**31) - 1])
def test_a_number_that_cannot_travel_is_refused_and_leaves_nothing(priority: int) -> None:
    yard = Yard()
    with pytest.raises(Refusal, match="is not between"):
        yard.serving.submit(job(priority=priority))
    assert len(yard.serving.journal) == 0


async def test_what_cannot_be_passed_on_fails_alone() -> None:
    yard = Yard()
    bad = yard.serving.submit(job("bad"))
    good = yard.serving.submit(job("good"))
    entry = yard.serving.journal.get(1)
    assert entry is not None
    entry.sequence.tenant = 7  # type: ignore[assignment]  # as if a check had been forgotten
    sent = yard.serving._send

    def send(message: ToEngine) -> None:
        if isinstance(message, Submit) and message.sequence.id == 1:
            raise OverflowError("Integer value out of range")
        sent(message)

    yard.serving._send = send
    yard.serving.engine_down(death(()))
    yard.sent.clear()
    yard.serving.engine_up(info())
    assert yard.taken() == [2]
    assert [delta.error[0] for delta in await read(bad) if delta.error] == ["bad_request"]
    yard.serving.outputs(outputs({2: 1}, finished=[(2, "stop")]))
    assert [delta.finish for delta in await read(good)] == ["stop"]


def test_more_at_once_than_are_ever_taken_is_the_requests_fault() -> None:
    yard = Yard(max_waiting=8)
    with pytest.raises(
        Refusal, match="13 sequences in one request are more than the daemon ever takes: 12"
    ) as refusal:
        yard.serving.submit(job(n=13))
    assert refusal.value.status == 400


def test_gauges_are_right_while_no_engine_tells() -> None:
    yard = Yard()
    generations = [yard.serving.submit(job(f"r{i}")) for i in range(3)]
    yard.serving.engine_down(death((1, 2)))
    assert yard.counts.of("counts")[-1] == (0, 3)
    for generation in generations:
        generation.cancel()
    assert yard.counts.of("counts")[-1] == (0, 0)


def test_a_stalled_engine_is_not_ready() -> None:
    yard = Yard()
    assert yard.serving.ready
    yard.serving.stalled = lambda: 86.0
    assert not yard.serving.ready
    assert yard.serving.not_ready_reason == "the engine has been in one step for 86 s"


def test_a_control_value_that_cannot_travel_is_answered() -> None:
    yard = Yard()

    def send(message: ToEngine) -> None:
        raise OverflowError("Integer value out of range")

    yard.serving._send = send
    replies: list[Reply] = []
    yard.serving.control("set", {"params": {"aging": 2**64}}, replies.append)
    assert [reply.code for reply in replies] == ["bad-params"]


def test_a_paused_daemon_is_not_ready_and_says_why() -> None:
    yard = Yard()
    assert yard.serving.ready
    yard.serving.paused = True
    assert not yard.serving.ready
    assert yard.serving.not_ready_reason.startswith("paused: ")
    yard.serving.submit(job())
    assert yard.taken() == [1], "requests are taken, and wait"
    yard.serving.paused = False
    assert (yard.serving.ready, yard.serving.not_ready_reason) == (True, "")
