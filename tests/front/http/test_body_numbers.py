"""A number of thousands of digits in a body that is read twice is the client's error."""

from __future__ import annotations

import pytest
from kvyard.front.http.body import _refuse_duplicates
from kvyard.front.http.errors import ApiError


def test_a_number_too_long_to_read_is_refused() -> None:
    body = b'{"prompt":"a","y":"prompt","zz":' + b"9" * 5000 + b"}"
    with pytest.raises(ApiError) as refusal:
        _refuse_duplicates(body, {"prompt": None, "y": None, "zz": None})  # type: ignore[dict-item]  # names alone count
    assert refusal.value.status == 400
