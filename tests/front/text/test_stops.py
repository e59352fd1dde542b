"""Stop strings: found wherever they are, hidden exactly, and nothing else held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.text.stops import StopStrings

SMALL = st.text(alphabet="abc", max_size=8)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Text shown after each piece, then the flushed rest; and the stop string found."""
    scanner = StopStrings(stops).scanner()
    shown: list[str] = []
    for piece in pieces:
        text, stop = scanner.feed(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, scanner.flush()], None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The plain definition: the first character at which some stop string is complete ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, st.lists(SMALL, max_size=12))
def test_the_outcome_is_the_definition_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    shown, stop = run(stops, pieces)
    assert ("".join(shown), stop) == expected(stops, "".join(pieces))


@given(STOPS, st.lists(SMALL, max_size=12))
def test_shown_text_never_holds_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    text = "".join(run(stops, pieces)[0])
    assert not any(stop in text for stop in stops)


@given(STOPS, st.lists(SMALL, max_size=12))
def test_no_more_is_held_back_than_could_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    scanner = StopStrings(stops).scanner()
    seen = shown = ""
    for piece in pieces:
        text, stop = scanner.feed(piece)
        seen, shown = seen + piece, shown + text
        if stop is not None:
            return
        held = seen[len(shown) :]
        prefixes = [stop[:n] for stop in stops for n in range(1, len(stop))]
        longest = max((prefix for prefix in prefixes if seen.endswith(prefix)), key=len, default="")
        assert held == longest


@given(data=st.data())
def test_what_is_passed_over_is_shown_and_what_ends_later_is_found(data: st.DataObject) -> None:
    """Against a search of the whole text: the first end behind what was fed without `ends`, the longest there."""
    stops = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
    before = data.draw(st.lists(st.text("abc", max_size=4), max_size=4))
    behind = data.draw(st.lists(st.text("abc", max_size=4), max_size=4))
    scanner = StopStrings(stops).scanner()
    shown, stop = "", None
    for piece, ends in [*((piece, False) for piece in before), *((piece, True) for piece in behind)]:
        text, stop = scanner.feed(piece, ends=ends)
        shown += text
        if stop is not None:
            break
    whole, start = "".join(before + behind), len("".join(before))
    for end in range(start + 1, len(whole) + 1):
        if found := max((each for each in stops if whole[:end].endswith(each)), key=len, default=""):
            assert (shown, stop) == (whole[: end - len(found)], found)
            return
    assert (shown + scanner.flush(), stop) == (whole, None)


def test_what_is_passed_over_is_not_held_back_unless_it_goes_on() -> None:
    scanner = StopStrings(["END", "D go"]).scanner()
    assert scanner.feed("the END", ends=False) == ("the EN", None)
    assert scanner.feed(" of") == ("D of", None)
    scanner = StopStrings(["END"]).scanner()
    assert scanner.feed("the END", ends=False) == ("the END", None)


def test_TEXT_05_inside_a_token_and_across_tokens() -> None:
    assert run(["ne"], ["a ", "nest"]) == (["a ", ""], "ne")
    assert run(["d bl"], ["red", " blue"]) == (["re", ""], "d bl")


def test_TEXT_07_an_unlikely_stop_string_delays_nothing() -> None:
    pieces = [f" word{i}" for i in range(20)]
    shown, stop = run(["Z" * 200], pieces)
    assert shown[:-1] == pieces
    assert stop is None


def test_TEXT_07_the_flushed_rest_is_what_was_held() -> None:
    assert run(["ZZZ"], ["aZ", "Z"]) == (["a", "", "ZZ"], None)


def test_TEXT_08_empty_stop_strings_are_ignored() -> None:
    assert not StopStrings([""])
    assert not StopStrings([])
    assert run(["", "END"], ["some", " END"]) == (["some", " "], "END")


def test_TEXT_11_one_character_stop_strings() -> None:
    assert run(["a"], ["xxa"]) == (["xx"], "a")
    assert run(["a", "b"], ["x", "yb"]) == (["x", "y"], "b")
    assert run(["\n"], ["line", "\nnext"]) == (["line", ""], "\n")


def test_an_overlapping_start_is_not_lost() -> None:
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], "aab")
    assert run(["abab", "bc"], ["aba", "bc"])[1] == "abab"
    assert run(["abcd", "bc"], ["abc"]) == (["a"], "bc")


def test_scanners_of_one_request_do_not_share_state() -> None:
    stops = StopStrings(["xy"])
    first, second = stops.scanner(), stops.scanner()
    assert first.feed("x").text == ""
    assert second.feed("y").text == "y"
    assert first.feed("y").stop == "xy"


def test_building_a_large_set_costs_its_characters_alone() -> None:
    stops = StopStrings(["Z" * 1024 + str(i) for i in range(64)])
    assert stops.scanner().feed("Z" * 1024 + "63").stop is not None
