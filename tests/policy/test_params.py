"""Typed parameters: declared once, checked, shown, changed as a whole."""

from __future__ import annotations

from typing import Any

import pytest
from kvyard.policy import AdmissionPolicy, ParamError, PolicyParams, live, restart
from kvyard.policy.params import Value


class Example(PolicyParams):
    """One of each type."""

    share: float = live(0.25, ge=0, le=1, unit="of all blocks", doc="A share.")
    count: int = live(3, ge=1)
    on: bool = live(True)
    mode: str = restart("fast", choices=("fast", "slow"))
    free: float = live(0.0)


class Further(Example):
    """Inherits and adds."""

    extra: int = live(0)


def test_defaults_and_values() -> None:
    params = Example()
    assert params.values() == {"share": 0.25, "count": 3, "on": True, "mode": "fast", "free": 0.0}
    assert (params.share, params.count, params.on, params.mode) == (0.25, 3, True, "fast")
    assert Further(extra=5).values()["extra"] == 5
    assert "extra" not in Example.specs


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"shares": 1}, "no parameter 'shares'; this policy has: share, count, on, mode, free"),
        ({"share": "0.5"}, "share takes a number"),
        ({"share": True}, "share takes a number"),
        ({"share": 1.5}, "at most 1"),
        ({"share": float("nan")}, "share takes a finite number"),
        ({"free": float("nan")}, "free takes a finite number"),
        ({"free": float("inf")}, "free takes a finite number"),
        ({"free": 10**400}, "free must be at most 1,000,000,000,000"),
        ({"count": 2**63}, "count must be at most 1,000,000,000,000"),
        ({"count": 10**5000}, "count must be at most 1,000,000,000,000"),
        ({"count": 0}, "at least 1"),
        ({"count": 2.0}, "count takes a integer"),
        ({"on": 1}, "on takes a boolean"),
        ({"mode": "medium"}, "mode is one of fast, slow"),
        ({"mode": None}, "mode takes a string"),
    ],
)
def test_refusals_name_the_parameter_and_what_it_takes(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamError) as caught:
        Example(**values)
    assert words.replace("a integer", "a") in str(caught.value) or words in str(caught.value)


def test_a_whole_number_is_a_number() -> None:
    params = Example(share=1)
    assert params.values()["share"] == 1.0
    assert type(params.share) is float


def test_values_never_change_in_place() -> None:
    params = Example()
    with pytest.raises(AttributeError):
        params.share = 0.5
    changed = params.changed({"share": 0.5})
    assert (params.share, changed.share) == (0.25, 0.5)
    assert changed.count == 3


def test_a_restart_parameter_is_fixed_while_loaded() -> None:
    with pytest.raises(ParamError, match="mode is fixed while the policy is loaded"):
        Example().changed({"mode": "slow", "share": 0.5})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ({"share": "0.5"}, {"share": 0.5}),
        ({"count": "7"}, {"count": 7}),
        ({"on": "no"}, {"on": False}),
        ({"on": "TRUE"}, {"on": True}),
        ({"mode": "slow"}, {"mode": "slow"}),
    ],
)
def test_texts_of_the_command_line(text: dict[str, str], value: dict[str, Value]) -> None:
    assert Example.parse(text) == value


@pytest.mark.parametrize("text", [{"count": "many"}, {"on": "maybe"}, {"share": "1,5"}])
def test_texts_that_are_no_values(text: dict[str, str]) -> None:
    with pytest.raises(ParamError):
        Example.parse(text)


def test_the_description_has_everything_an_operator_needs() -> None:
    (share,) = [entry for entry in Example(share=0.5).describe() if entry["name"] == "share"]
    assert share == {
        "name": "share",
        "type": "number",
        "value": 0.5,
        "default": 0.25,
        "change": "live",
        "ge": 0,
        "le": 1,
        "choices": None,
        "unit": "of all blocks",
        "doc": "A share.",
    }


def test_a_type_that_cannot_be_shown_is_a_mistake_of_the_author() -> None:
    with pytest.raises(TypeError, match="annotate it as int, float, bool or str"):

        class Wrong(PolicyParams):
            items: list[int] = live(3)  # type: ignore[assignment]


def test_a_policy_takes_its_parameters_by_name_and_changes_them_as_a_whole() -> None:
    class Mine(AdmissionPolicy):
        class Params(Example):
            """As they are."""

    policy = Mine(count=9)
    with pytest.raises(ParamError):
        policy.set_params({"count": 5, "share": 7.0})
    assert policy.params.values()["count"] == 9
    policy.set_params({"count": 5})
    assert policy.params.values()["count"] == 5
