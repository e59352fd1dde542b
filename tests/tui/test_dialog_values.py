"""What a person types, and what parameters say of themselves."""

from __future__ import annotations

import pytest
from kvyard.control.client import ControlError
from kvyard.control.schema import PolicyRow, SwapResult
from kvyard_tui.dialogs.change import outcome
from kvyard_tui.dialogs.specs import Described, Spec, accepts, summary
from kvyard_tui.dialogs.swap import in_charge, option_text
from kvyard_tui.dialogs.values import parse_value, parse_values, said

from tests.tui.yard import status


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("  ", {}),
        ("a=1 b=0.5 c=true d=fcfs", {"a": 1, "b": 0.5, "c": True, "d": "fcfs"}),
        ("name='two words'", {"name": "two words"}),
        ("a=-1e-3", {"a": -0.001}),
        ("a=", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
        ("a=NaN", {"a": "NaN"}),
    ],
)
def test_values(text: str, values: dict[str, object]) -> None:
    assert parse_values(text) == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate", "write name=value, not 'rate'"),
        ("=1", "write name=value"),
        ("a='x", "not closed"),
        ("a=1 a=2", "twice"),
    ],
)
def test_values_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_values(text)


def test_a_quoted_number_is_text() -> None:
    assert parse_value('"5"') == "5"
    assert parse_value("Infinity") == "Infinity"


def test_an_error_says_what_to_do() -> None:
    assert (
        said(ControlError("busy", "another change is under way", "try again"))
        == "another change is under way. try again"
    )
    assert said(ControlError("busy", "another change is under way")) == "another change is under way"


def test_an_outcome_names_what_changed_and_only_that() -> None:
    result = SwapResult(
        True,
        7,
        {"admission": "fcfs", "prefill": "vllm"},
        {"admission": "aging", "prefill": "vllm"},
        1234,
        "on probation",
    )
    assert outcome(result) == "Done at step 1,234: generation 7. admission: aging -> fcfs. on probation"


def test_an_outcome_names_the_parameters_that_were_set() -> None:
    result = SwapResult(True, 8, {"admission": "aging"}, {"admission": "aging"}, 5, params={"aging": 3.0})
    assert outcome(result) == "Done at step 5: generation 8. aging=3"


def test_an_outcome_that_is_none_says_what_stays() -> None:
    result = SwapResult(False, 7, {"admission": "aging"}, {"admission": "aging"}, 0)
    assert outcome(result) == "Not done: the daemon gave no reason. In charge: admission aging"


def test_a_spec_says_what_it_accepts() -> None:
    spec = Spec("order", "string", choices=["fcfs", "priority"], doc="Who goes first.")
    assert accepts(spec) == "string, one of fcfs, priority. Who goes first."
    assert accepts(Spec("x", "integer", ge=0, le=9, unit="tokens")) == "integer, at least 0, at most 9, tokens"


def test_a_summary_lists_parameters_or_parts() -> None:
    assert summary(Described("admission", "x", params=[Spec("rate", value=0.5)])) == "parameters: rate=0.5"
    assert summary(Described("discipline", "x", parts={"prefill": {"name": "vllm"}})) == "parts: prefill vllm"
    assert summary(Described("prefill", "x")) == "no parameters"


def test_options_and_what_is_in_charge() -> None:
    row = PolicyRow("admission", "evil\x1b[31m", "d", "1", "1.0", False, "import\nerror")
    assert option_text(row).split() == ["admission", "evil", "!", "import", "error"]
    assert in_charge(status(), "discipline") == "vllm-aging"
    assert in_charge(status(), "prefill") == "vllm"
    changed = status()
    changed.changed = {"admission.rate": 2}
    assert in_charge(changed, "discipline") == "vllm-aging (changed: admission.rate)"
    assert in_charge(status(), "nothing") == "?"
