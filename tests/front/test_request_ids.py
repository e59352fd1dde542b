"""What an operator types for a request: its id, the beginning, the number; never a guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.operations import OperationError
from kvyard.front.request_ids import LEAST_PREFIX, find_request

KNOWN = [
    (1, "cmpl-aaaa1111"),
    (2, "cmpl-aaaa2222"),
    (3, "cmpl-aaaa2222"),
    (4, "77777777"),
    (5, "cmpl-aaaa"),
    (6, "2"),
]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("cmpl-aaaa1111", "cmpl-aaaa1111"),
        ("cmpl-aaaa2", "cmpl-aaaa2222"),
        ("cmpl-aaaa2…", "cmpl-aaaa2222"),
        (" cmpl-aaaa1 ", "cmpl-aaaa1111"),
        ("cmpl-aaaa", "cmpl-aaaa"),
        ("1", "cmpl-aaaa1111"),
        ("3", "cmpl-aaaa2222"),
        ("2", "2"),
        ("77777777", "77777777"),
        ("9", None),
        ("²", None),
        ("9" * 5000, None),
        ("", None),
        ("…", None),
        ("cmpl-bbbb", None),
    ],
)
def test_what_is_meant(text: str, meant: str | None) -> None:
    assert find_request(text, KNOWN) == meant


def test_two_that_begin_alike_are_listed() -> None:
    with pytest.raises(OperationError, match=r"2 requests .* cmpl-xaaa1, cmpl-xaaa2") as error:
        find_request("cmpl-xaa", [(1, "cmpl-xaaa1"), (2, "cmpl-xaaa2"), (3, "cmpl-xbaa")])
    assert error.value.code == "ambiguous"


@pytest.mark.parametrize("text", ["c", "cmpl", "cmpl-aa", "cmpl-aa…"])
def test_too_little_of_an_id_is_told_as_such(text: str) -> None:
    with pytest.raises(OperationError, match="too little of an id") as error:
        find_request(text, KNOWN)
    assert "at least 8 signs" in error.value.hint


def test_many_that_begin_alike_are_counted() -> None:
    with pytest.raises(OperationError, match=r"40 requests .*id-00000004 and 35 more$"):
        find_request("id-00000", [(i, f"id-{i:08d}") for i in range(40)])


@given(st.lists(st.text("ab12", min_size=1, max_size=12), max_size=8), st.text("ab12", max_size=12))
def test_what_is_found_is_known_and_fits(names: list[str], text: str) -> None:
    known = list(enumerate(names, 1))
    try:
        found = find_request(text, known)
    except OperationError:
        alike = {name for name in names if name.startswith(text)}
        assert (len(alike) > 1 or len(text) < LEAST_PREFIX) and alike and text not in names
        return
    if found is not None:
        assert found in names
        assert (found.startswith(text) and len(text) >= LEAST_PREFIX) or found == text or (int(text), found) in known
