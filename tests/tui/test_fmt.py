"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard_tui import fmt


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0, "0 s"), (9e-6, "9 µs"), (0.0009994, "999 µs"), (0.0009996, "1.0 ms"), (0.0041, "4.1 ms"),
        (0.012, "12 ms"), (0.999, "999 ms"), (1.25, "1.25 s"), (12.34, "12.3 s"), (60, "1m00s"), (125, "2m05s"),
        (3725, "1h02m"), (172799, "47h59m"), (3 * 86400 + 7200, "3d02h"), (-1, "0 s"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert fmt.duration(seconds) == text


@given(st.floats(0, 8e7))
def test_a_duration_fits_its_column(seconds: float) -> None:
    assert len(fmt.duration(seconds)) <= 7


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"), (0, "0"), (1204, "1,204"), (99_999, "99,999"), (100_000, "100k"), (999_999, "1.0M"),
        (1_234_567, "1.2M"), (123_456_789, "123M"), (2.5e9, "2.5G"), (3e12, "3.0T"),
    ],
)  # fmt: skip
def test_count(number: float | None, text: str) -> None:
    assert fmt.count(number) == text


@given(st.integers(0, 10**15))
def test_a_count_fits_its_column(number: int) -> None:
    assert len(fmt.count(number)) <= 7


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 10, "0%"), (1, 1000, "<1%"), (5, 10, "50%"), (999, 1000, ">99%"), (10, 10, "100%"), (1, 0, "0%")],
)
def test_percent_never_hides_something(part: float, whole: float, text: str) -> None:
    assert fmt.percent(part, whole) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(5, "5 B"), (2048, "2.0 KiB"), (98_362_432, "94 MiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_size(number: int, text: str) -> None:
    assert fmt.size(number) == text


@pytest.mark.parametrize(("value", "text"), [(2.54, "2.5"), (0, "0"), (9.96, "10"), (340.4, "340"), (None, "-")])
def test_rate(value: float | None, text: str) -> None:
    assert fmt.rate(value) == text


@pytest.mark.parametrize(
    ("item", "text"), [(True, "true"), (0.1, "0.1"), (512, "512"), ("fcfs", "fcfs"), (1e-9, "1e-09")]
)
def test_value(item: object, text: str) -> None:
    assert fmt.value(item) == text


def test_ages_move_by_the_second() -> None:
    assert [fmt.age(seconds) for seconds in (-1, 0.9, 59.9, 60)] == ["0s", "0s", "59s", "1m00s"]
    assert fmt.micros(9) == "9 µs"
    assert fmt.micros(None) == fmt.MISSING
