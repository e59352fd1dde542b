"""Bars and sparklines: they add up, and what is not nothing shows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard_tui.glyphs import ASCII, UNICODE, Glyphs, gauge, given_environment, shares, sparkline, wants_ascii
from rich.cells import cell_len

parts = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)


@given(parts, st.integers(0, 120))
def test_shares_fill_the_bar(numbers: list[int], width: int) -> None:
    cells = shares(numbers, width)
    assert sum(cells) == (width if sum(numbers) > 0 else 0)
    assert all(cell >= 0 for cell in cells)


@given(parts, st.integers(4, 120))
def test_what_is_not_nothing_shows_and_nothing_does_not(numbers: list[int], width: int) -> None:
    for number, cell in zip(numbers, shares(numbers, width), strict=True):
        assert (cell > 0) == (number > 0)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 60))
def test_gauge_is_full_only_when_done(part: int, whole: int, width: int) -> None:
    bar = gauge(part, whole, width, "#", "-")
    assert len(bar) == width
    assert ("-" not in bar) == (part >= whole or width == 1)
    assert bar[0] == "#"


def test_gauge_of_nothing() -> None:
    assert gauge(0, 10, 4, "#", "-") == "----"
    assert gauge(1, 0, 4, "#", "-") == "----"


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=60), st.integers(0, 40))
def test_sparkline_has_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width, UNICODE)) == width


def test_sparkline_goes_from_zero_to_the_largest_with_the_newest_at_the_right() -> None:
    assert sparkline([0.0, 5.0, None, 10.0], 6, UNICODE) == "  ▁▄ ▇"
    assert sparkline([1.0, 2.0, 4.0], 2, UNICODE) == "▄▇"
    assert sparkline([0.0, 0.0], 2, UNICODE) == "▁▁"


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_sign_is_one_cell_and_signs_of_one_bar_differ(glyphs: Glyphs) -> None:
    for field in dataclasses.fields(glyphs):
        for sign in getattr(glyphs, field.name):
            assert cell_len(sign) == 1
    assert len({glyphs.used, glyphs.cached, glyphs.free}) == 3
    assert len({glyphs.full, glyphs.prefill, glyphs.empty}) == 3
    assert len({glyphs.running, glyphs.waiting, glyphs.preempted, glyphs.swapped}) == 4
    assert len({glyphs.ready, glyphs.busy, glyphs.failed, glyphs.paused, glyphs.draining, glyphs.warning}) == 6


def test_ascii_is_ascii() -> None:
    assert all(getattr(ASCII, field.name).isascii() for field in dataclasses.fields(ASCII))


@pytest.mark.parametrize(
    ("environ", "ascii_only"),
    [
        ({"LC_ALL": "C", "LANG": "C"}, True),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, True),
        ({"LC_ALL": "POSIX"}, True),
        ({"LANG": "C"}, True),
        ({"LC_ALL": "", "LC_CTYPE": "C", "LANG": "en_US.UTF-8"}, True),
        ({"LANG": "en_US.ISO-8859-1"}, True),
        ({"LANG": "de_DE@euro"}, True),
        ({"LC_ALL": "C.UTF-8"}, False),
        ({"LC_ALL": "C.utf8"}, False),
        ({"LC_CTYPE": "UTF-8", "LANG": "C"}, False),
        ({"LC_ALL": "en_US.UTF-8@euro", "LANG": "C"}, False),
        ({"LC_ALL": "", "LANG": "en_US.UTF-8"}, False),
        ({}, False),
    ],
)
def test_the_locale_decides(environ: dict[str, str], ascii_only: bool) -> None:
    assert wants_ascii(environ, "utf-8") is ascii_only


def test_without_a_locale_the_encoding_decides() -> None:
    assert wants_ascii({}, "ANSI_X3.4-1968") and wants_ascii({}, None)


def test_what_the_interpreter_made_of_the_locale_is_not_what_was_given() -> None:
    code = (
        "import os; from kvyard_tui.glyphs import given_environment, wants_ascii;"
        "print(os.environ['LC_CTYPE'], wants_ascii(given_environment(), ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"LANG": "C"}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["C.UTF-8", "True"]
    assert given_environment()["PATH"]
