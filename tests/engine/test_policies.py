"""The engine's loader: names to objects, never one in quarantine, and an engine that served comes up again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvyard import __version__
from kvyard.core.policy_set import Declarations
from kvyard.engine.policies import Loader, Quarantined, describe_builtin, describe_policy
from kvyard.policy.base import BUILTIN, KINDS
from kvyard.policy.params import ParamError
from kvyard.policy.registry import RegistryError
from structlog.testing import capture_logs


def test_a_discipline_with_an_operators_parameters() -> None:
    changes, names, discipline = Loader().candidate("discipline", "vllm", {"admission": {"watermark": 0.3}}, [])
    assert discipline == "vllm"
    assert names["admission"] == "vllm"
    assert changes["admission"].params.values()["watermark"] == 0.3


def test_what_is_in_quarantine_is_refused_with_the_way_out() -> None:
    for kind in ("admission", "discipline"):
        with pytest.raises(Quarantined, match="kvyard policy release admission/vllm") as refusal:
            Loader().candidate(kind, "vllm", {}, ["admission/vllm"])
        assert (refusal.value.code, refusal.value.policy) == ("quarantined", "admission/vllm")


@pytest.mark.parametrize(("kind", "name"), [("discipline", "nobodys"), ("admission", "nobodys"), ("order", "vllm")])
def test_an_unknown_name_is_refused(kind: str, name: str) -> None:
    with pytest.raises(RegistryError, match=r"no discipline|no admission|no kind"):
        Loader().candidate(kind, name, {}, [])


def test_the_first_start_refuses_what_cannot_be_used() -> None:
    with pytest.raises(RegistryError):
        Loader().at_start("nobodys", {}, [])
    with pytest.raises(ParamError):
        Loader().at_start("vllm", {"discipline": ("vllm", {"admission": {"watermark": 7}})}, [])


def test_a_later_start_comes_up_with_the_built_in_instead() -> None:
    policies = Loader().at_start("nobodys", {}, [], again=True)
    assert {policies.name(kind) for kind in ("admission", "preemption", "prefill")} == {"builtin"}
    parts = {"admission": ("nobodys", {}), "prefill": ("vllm", {"long_prefill": 64})}
    policies = Loader().at_start("kvyard", parts, [], again=True)
    assert policies.name("admission") == "builtin"
    assert policies.prefill.params.values()["long_prefill"] == 64


def test_a_quarantined_part_of_the_configured_discipline_does_not_prevent_the_start() -> None:
    policies = Loader().at_start("vllm", {}, ["admission/vllm"])
    assert policies.name("admission") == "builtin"


def test_what_is_in_quarantine_for_itself_lets_no_unknown_discipline_start() -> None:
    with pytest.raises(RegistryError, match="no discipline"):
        Loader().at_start("nobodys", {}, ["admission/other"])
    with pytest.raises(ParamError):
        Loader().at_start("vllm", {"discipline": ("vllm", {"admission": {"watermark": 7}})}, ["admission/other"])
    loader = Loader()
    assert loader.at_start("vllm", {}, ["admission/other"]).discipline == "vllm"
    assert loader.notes == []


def test_a_discipline_that_could_not_be_used_is_told() -> None:
    loader = Loader()
    with capture_logs() as lines:
        assert loader.at_start("vllm", {}, ["admission/vllm"]).discipline == "builtin"
    assert lines == [], "the front logs the note"
    (note,) = loader.notes
    assert note.startswith("the discipline vllm cannot be used: admission/vllm is in quarantine")


def test_policies_are_known_by_the_names_operators_use() -> None:
    loader = Loader()
    changes, _, _ = loader.candidate("prefill", "decode-first", {}, [])
    policy = changes["prefill"]
    assert loader.label("prefill", policy) == "prefill/decode-first"
    shown = describe_policy("prefill", "decode-first", policy, Declarations(policy).about(), loader)
    assert (shown["distribution"], shown["api"]) == ("kvyard", "1.0")
    assert [param["name"] for param in shown["params"]] == ["chunk"]


@pytest.mark.parametrize("params", [{"admission": {"watermark": 0.3}}, {"admission.watermark": 0.3}])
def test_a_disciplines_parameters_name_their_kind(params: dict[str, object]) -> None:
    changes, _, _ = Loader().candidate("discipline", "vllm", params, [])
    assert changes["admission"].params.values()["watermark"] == 0.3


@pytest.mark.parametrize("params", [{"garbage": 1}, {"aging": 77}, {"admission": 3}, {"order.x": 1}])
def test_a_disciplines_other_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ParamError, match="name the kind as in admission"):
        Loader().candidate("discipline", "vllm", params, [])


def test_the_built_ins_are_described_without_being_in_charge() -> None:
    for kind in KINDS:
        shown = describe_builtin(kind, Loader())
        assert (shown["kind"], shown["name"], shown["version"]) == (kind, BUILTIN, __version__)
        assert shown["doc"] and shown["params"] == []
    parts = describe_builtin("discipline", Loader())["parts"]
    assert {kind: part["name"] for kind, part in parts.items()} == dict.fromkeys(KINDS, BUILTIN)


def test_whose_code_is_loaded_is_told() -> None:
    told: list[str] = []

    @contextmanager
    def watch(label: str) -> Iterator[None]:
        told.append(label)
        yield
        told.append("done")

    Loader(watch).candidate("discipline", "vllm", {}, [])
    parts = [f"{kind}/vllm" for kind in KINDS]
    assert told == [word for label in ("discipline/vllm", *parts) for word in (label, "done")]


def test_a_discipline_in_quarantine_is_not_imported() -> None:
    told: list[str] = []

    @contextmanager
    def watch(label: str) -> Iterator[None]:
        told.append(label)
        yield

    with pytest.raises(RegistryError, match="kvyard policy release discipline/vllm"):
        Loader(watch).candidate("discipline", "vllm", {}, ["discipline/vllm"])
    assert Loader(watch).at_start("vllm", {}, ["discipline/vllm"]).discipline == BUILTIN
    assert told == []
