"""Text from outside: nothing that steers a terminal gets through, and widths are what is drawn."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard_tui.text import MAX_MARKS, clean, fit, to_ascii, wrap
from rich.cells import cell_len


@given(st.text(alphabet=st.characters(codec=None), max_size=200))
def test_no_control_sign_gets_through(text: str) -> None:
    safe = clean(text)
    assert not any(unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in safe)


@given(st.text(max_size=100))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@given(st.text(max_size=100))
def test_the_width_is_the_sum_of_its_signs(text: str) -> None:
    safe = clean(text)
    assert cell_len(safe) == sum(cell_len(sign) for sign in safe)


@given(st.text(max_size=60), st.integers(0, 50), st.booleans())
def test_fit_gives_exactly_the_width(text: str, width: int, right: bool) -> None:
    assert cell_len(fit(clean(text), width, right=right)) == width


@given(st.text(max_size=120), st.integers(8, 40), st.integers(1, 4))
def test_wrap_keeps_within_the_box(text: str, width: int, most: int) -> None:
    lines = wrap(clean(text), width, most)
    assert len(lines) <= most
    assert all(cell_len(line) <= width for line in lines)


@given(st.lists(st.text(alphabet="abcdef", min_size=1, max_size=7), min_size=1, max_size=12))
def test_wrap_with_room_loses_no_word(words: list[str]) -> None:
    assert " ".join(wrap(" ".join(words), 8, 100)).split() == words


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;evil title\x07name", "name"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0~\x1b\\six", "six"),
        ("\x9b2Jgone", "gone"),
        ("a\tb\nc\rd", "a b c d"),
        ("x\u202egnp.exe", "xgnp.exe"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f468\U0001f469\U0001f467"),
        ("\U0001f44d\U0001f3fd", "\U0001f44d"),
        ("\u2764\ufe0f", "\u2764"),
        ("\U0001f1e9\U0001f1ea", "DE"),
        ("e\u0301", "\u00e9"),
        ("\u0301x", "x"),
        ("\ud800", "\ufffd"),
        ("\x1b", ""),
        ("[bold]not markup[/bold]", "[bold]not markup[/bold]"),
    ],
)
def test_known_cases(text: str, safe: str) -> None:
    assert clean(text) == safe


def test_marks_are_bounded() -> None:
    heap = clean("q" + "\u0303\u0304" * 30)
    assert len(heap) == 1 + MAX_MARKS


def test_a_long_text_is_bounded() -> None:
    assert len(clean("x" * 100_000)) == 4096


def test_wide_signs_are_never_cut_in_half() -> None:
    assert fit("\u6f22\u5b57\u6f22", 4) == "\u6f22 …"
    assert fit("\u6f22", 1) == "…"
    assert fit("ab", 5, right=True) == "   ab"
    assert fit("abc", 0) == ""


@given(st.text(max_size=60))
def test_ascii_keeps_the_width(text: str) -> None:
    plain = to_ascii(clean(text))
    assert plain.isascii() and len(plain) == cell_len(clean(text))


def test_ascii_keeps_likenesses() -> None:
    assert to_ascii("caf\u00e9 9 \u00b5s cut\u2026") == "cafe 9 us cut~"
    assert to_ascii("\u6f22") == "??"
