"""Link messages: what one side encodes the other decodes, and rubbish is an error with a sentence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.link.codec import (
    LinkError,
    decode_sampling,
    decode_to_engine,
    decode_to_front,
    encode,
    encode_sampling,
)
from kvyard.link.messages import Cancel, Control, Failed, Outputs, Sampling, Sequence, Stop, Submit, TokenLogprobs
from kvyard.link.record import PolicyCost, Preemption, StepRecord, Timings, Wait


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=50),
    st.integers(0, 2**63 - 1),
    st.floats(0, 2, allow_nan=False),
    st.text(max_size=20),
)
def test_a_sequence_arrives_as_it_was_sent(prompt: list[int], seed: int, temperature: float, tenant: str) -> None:
    sampling = Sampling(seed=seed, temperature=temperature, logit_bias=((5, -1.5),), stop_token_ids=(2,), index=3)
    sent = Submit(
        Sequence(
            id=1,
            request=2,
            index=3,
            arrived=5.5,
            prompt=np.asarray(prompt, np.int32).tobytes(),
            max_new=6,
            sampling=encode_sampling(sampling),
            tenant=tenant,
            deadline=None,
        )
    )
    got = decode_to_engine(encode(sent))
    assert got == sent
    assert isinstance(got, Submit)
    assert np.frombuffer(got.sequence.prompt, np.int32).tolist() == prompt
    assert decode_sampling(got.sequence.sampling) == sampling


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa4seed\xa1x", encode(Stop())])
def test_no_sampling_parameters_are_told_as_such(data: bytes) -> None:
    with pytest.raises(LinkError, match="no sampling parameters"):
        decode_sampling(data)


def test_what_is_not_asked_for_takes_no_room() -> None:
    assert encode_sampling(Sampling(seed=5)) == b"\x81\xa4seed\x05"


@pytest.mark.parametrize("message", [Cancel([1, 2]), Control(7, "swap", {"kind": "admission", "n": None})])
def test_commands_arrive(message: Cancel | Control) -> None:
    assert decode_to_engine(encode(message)) == message


def test_outputs_and_records_arrive() -> None:
    outputs = Outputs(
        step=3,
        at=1.5,
        ids=np.array([4, 5], np.int64).tobytes(),
        tokens=np.array([8, 9], np.int32).tobytes(),
        hashes=np.array([2**64 - 1, 0], np.uint64).tobytes(),
        logprobs={4: TokenLogprobs(8, -0.5, 1, [(8, -0.5)])},
        finished=[(5, "stop")],
        admitted=[(4, 1.25, 16)],
    )
    record = StepRecord(
        step=3,
        at=1.0,
        timings=Timings(1, 2, 3, 4, 5, 6),
        ids=b"",
        granted=b"",
        prompt_tokens=1,
        decode_tokens=2,
        running=3,
        waiting=4,
        swapped=0,
        blocks_used=5,
        blocks_cached=6,
        blocks_free=7,
        preempted=[Preemption(1, 2, "growth", "recompute", 30)],
        waits=[Wait(0, "slots")],
        policies=[PolicyCost("admission", "vllm", 1, 900, {"barrier": 1})],
    )
    for message in (outputs, record, Failed(1, "oom", "no memory")):
        assert decode_to_front(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91\xa5nobody"])
def test_rubbish_is_named(data: bytes) -> None:
    with pytest.raises(LinkError, match="no message that this front knows"):
        decode_to_front(data)
    with pytest.raises(LinkError, match="no message that this engine knows"):
        decode_to_engine(data)
