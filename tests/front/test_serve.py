"""What a start tells of itself."""

from __future__ import annotations

import pytest
import structlog.testing
from kvyard.front.serve import _tell_window

from tests.front.yard import info


@pytest.mark.parametrize(
    ("asked", "window", "told"),
    [(None, 161, True), (161, 161, False), (None, 160, False), (None, 8192, False)],
)
def test_a_window_that_the_pool_lowered_is_told_with_its_numbers(asked: int | None, window: int, told: bool) -> None:
    with structlog.testing.capture_logs() as lines:
        _tell_window(asked, info(kv_blocks=10, block_size=16, max_model_len=window))
    assert [line["event"] for line in lines] == ["max_model_len.lowered"] * told
    for line in lines:
        assert (line["max_model_len"], line["kv_blocks"], line["block_size"]) == (161, 10, 16)
        assert "kv_blocks" in line["reason"]
