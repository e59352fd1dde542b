"""Disciplines by name, with changed parameters."""

from __future__ import annotations

import pytest
from kvyard.policy.params import ParamError
from kvyard.policy.registry import RegistryError
from kvyard.sim import disciplines

WANTED = {
    "deadline", "dynamic-window", "fair-share", "itl-target", "kvyard", "least-recompute", "lightllm-peak",
    "lmdeploy-turns", "orca", "output-length", "recompute-or-swap", "sarathi", "sglang", "static", "tgi",
    "trtllm-max-utilization", "trtllm-no-evict", "vllm", "vllm-priority",
}  # fmt: skip


def test_all_disciplines_are_installed() -> None:
    assert set(disciplines.names()) >= WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_each_can_be_made_and_names_its_source(name: str) -> None:
    policies = disciplines.make(name)
    assert policies.discipline == name
    for policy in (policies.admission, policies.preemption, policies.prefill):
        assert type(policy).__doc__, "operators are shown what it does"
        for row in policy.params.describe():
            assert row["change"] in ("live", "restart")


def test_each_call_makes_new_objects() -> None:
    assert disciplines.make("sglang").admission is not disciplines.make("sglang").admission


def test_the_built_in_too() -> None:
    assert disciplines.make("builtin").discipline == "builtin"


def test_parameters_in_the_text() -> None:
    name, changes, parts = disciplines.parse(
        "sglang,admission.conservativeness=0.5,prefill.mixed=yes,prefill.chunk=64"
    )
    assert name == "sglang"
    assert changes == {"admission": {"conservativeness": 0.5}, "prefill": {"mixed": True, "chunk": 64}}
    policies = disciplines.make(name, changes)
    assert policies.prefill.params.values() == {"chunk": 64, "mixed": True}
    assert parts == {}
    assert disciplines.parse("vllm") == ("vllm", {}, {})


def test_a_single_policy_stands_in_for_the_disciplines_own() -> None:
    text = "sarathi,admission.aging=0.5,admission=aging"
    policies = disciplines.make(*disciplines.parse(text))
    assert policies.names["admission"] == "aging"
    assert type(policies.admission) is type(disciplines.make("kvyard").admission)
    default = type(policies.admission).Params().values()
    assert policies.admission.params.values() == {**default, "aging": 0.5}, "and none of sarathi's"
    assert policies.names["prefill"] == disciplines.make("sarathi").names["prefill"]
    assert policies.prefill.params.values()["chunk"] == 512, "the rest is the discipline's"
    assert policies.discipline is None, "this is no named discipline any more"


def test_a_single_policy_beside_the_built_ins() -> None:
    policies = disciplines.make(*disciplines.parse("builtin,prefill=decode-first,prefill.chunk=64"))
    builtin = disciplines.make("builtin")
    assert policies.prefill.params.values()["chunk"] == 64
    assert type(policies.admission) is type(builtin.admission)


def test_a_discipline_keeps_its_own_parameters() -> None:
    changed = disciplines.make("sarathi", {"prefill": {"chunk": 64}})
    assert changed.admission.params.values()["watermark"] == 0.01
    assert changed.prefill.params.values()["chunk"] == 64


def test_what_is_offered_is_taken_where_it_is_known_and_not_set() -> None:
    offered: disciplines.Changes = {
        "admission": {"order": "priority", "nobody_knows": 1},
        "preemption": {"order": "priority"},
        "prefill": {"long_prefill": 9},
    }
    policies = disciplines.make("vllm", {"preemption": {"order": "fcfs"}}, offered=offered)
    assert policies.admission.params.values()["order"] == "priority"
    assert policies.preemption.params.values()["order"] == "fcfs"
    assert policies.prefill.params.values() == {"long_prefill": 9}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("none", RegistryError, "no discipline"),
        ("vllm,watermark=1", RegistryError, "is no parameter"),
        ("vllm,admission.watermark", RegistryError, "is no parameter"),
        ("vllm,eviction.order=fcfs", RegistryError, "is no parameter"),
        ("vllm,admission.watermark=much", ParamError, "takes a number"),
        ("vllm,admission.watermark=2", ParamError, "at most 0.5"),
        (
            "vllm,admission.colour=red",
            ParamError,
            "admission vllm: there is no parameter 'colour'; this policy has: w",
        ),
        ("vllm,watermark=1", RegistryError, "vllm has admission.watermark, admission.order, .*prefill.long_prefill"),
        ("vllm,admission=none", RegistryError, "no admission policy 'none'; installed are: aging"),
        ("vllm,admission=", RegistryError, "is no parameter and no policy"),
        ("builtin,admission.watermark=0.1", RegistryError, "the admission policy of builtin has no parameters"),
    ],
)
def test_errors(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        disciplines.make(*disciplines.parse(text))
