"""Names that come twice in a JSON object."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.repeated import repeated_name

values = st.recursive(
    st.none() | st.integers() | st.text('ab\\"{}[]:,', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab\\":', max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_what_a_dictionary_can_hold_repeats_nothing(value: object) -> None:
    assert repeated_name(json.dumps(value).encode()) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"a":1,"a":2}', "a"),
        (b'{"a":1,"\\u0061":2}', "a"),
        (b'[{"b":{"a":1,"c":[{"d":1, "d" :1}]}}]', "d"),
        (b'{"":1,"":2}', ""),
        (b'{"a":{"a":{"a":1}}}', None),
        (b'{"a":"a\\":1,\\"a","b":"a"}', None),
        (b'[{"a":1},{"a":1}]', None),
    ],
)
def test_names_are_compared_within_their_object(text: bytes, name: str | None) -> None:
    assert repeated_name(text) == name


def test_many_names_are_compared_in_one_pass() -> None:
    names = ",".join(f'"n{at}":0' for at in range(50_000))
    began = time.perf_counter()
    assert repeated_name(f'{{{names},"n49999":0}}'.encode()) == "n49999"
    assert time.perf_counter() - began < 5, "comparing each with each would take a minute"
