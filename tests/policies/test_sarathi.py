"""Sarathi: a step's work is bounded, and decodes never wait."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import run_all
from tests.policies.cores import arrive, core

LOAD = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(load=LOAD, chunk=st.integers(1, 40))
def test_a_step_exceeds_the_chunk_by_decodes_alone_and_every_decode_is_in_it(
    load: list[tuple[int, int]], chunk: int
) -> None:
    scheduler = core(f"sarathi,prefill.chunk={chunk}", blocks=200)
    arrive(scheduler, *((id, prompt, output) for id, (prompt, output) in enumerate(load, 1)))
    decoding: set[int] = set()
    for log in run_all(scheduler):
        assert log.overrides == {} or chunk <= len(decoding) or chunk == 1
        assert decoding <= set(log.scheduled), "no decode waits for a prompt"
        prompts = sum(tokens for id, tokens in log.scheduled.items() if id not in decoding)
        assert prompts <= max(0, chunk - len(decoding))
        decoding |= set(log.sampled)
        decoding -= {id for id, _ in log.finished}


def test_two_prompts_share_a_chunk() -> None:
    scheduler = core("sarathi,prefill.chunk=16")
    arrive(scheduler, (1, 10, 3), (2, 20, 3))
    granted = [log.scheduled for log in run_all(scheduler)]
    assert granted[:3] == [{1: 10, 2: 6}, {1: 1, 2: 14}, {1: 1, 2: 1}]


def test_a_batch_has_its_own_size_beside_the_places() -> None:
    scheduler = core("sarathi,admission.batch=3", blocks=200)
    arrive(scheduler, *((id, 4, 6) for id in range(1, 8)))
    logs = list(run_all(scheduler))
    assert max(len(log.scheduled) for log in logs) == 3
    assert {id for log in logs for id, _ in log.finished} == set(range(1, 8))


def test_by_default_128_run_at_most() -> None:
    policies = core("sarathi").policies
    assert policies.admission.params.batch == 128  # type: ignore[attr-defined]  # the vllm policy's own parameters
