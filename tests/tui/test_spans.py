"""Lines of toned text keep their width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvyard_tui.spans import TONES, Line, fit_line, heading, line, plain, split_line, width_of
from kvyard_tui.text import clean

spans = st.lists(st.tuples(st.text(max_size=12).map(clean), st.sampled_from(["", *TONES])), max_size=6).map(tuple)


@given(spans, st.integers(0, 60))
def test_fit_line_gives_exactly_the_width(one: Line, width: int) -> None:
    assert width_of(fit_line(one, width)) == width


@given(spans, spans, st.integers(1, 60))
def test_split_line_gives_exactly_the_width(left: Line, right: Line, width: int) -> None:
    assert width_of(split_line(left, right, width)) == width


@given(st.text(alphabet="abc ", max_size=30), st.text(alphabet="xyz ", max_size=30), st.integers(1, 90))
def test_a_heading_has_the_width(note: str, columns: str, width: int) -> None:
    assert width_of(heading("Title", width, "-", note, columns)) == width


def test_a_heading_names_what_is_below_it_at_the_right() -> None:
    assert plain(heading("Latency", 30, "-", "1 min", "p50 n")) == "Latency 1 min ---------- p50 n"


def test_a_cut_line_says_so_and_keeps_its_tone() -> None:
    assert fit_line(line(("abcdef", "bad")), 4) == (("abc…", "bad"),)
    assert fit_line(line("ab"), 4) == (("ab", ""), ("  ", ""))


def test_the_right_part_wins() -> None:
    assert plain(split_line(line("left text"), line("right"), 9)) == "lef…right"
    assert plain(split_line(line("left"), line("much too long"), 6)) == "much …"
