"""Continuations: deltas of tokens to text, with what belongs to each token."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.service import Delta
from kvyard.front.text.continuation import Continuation
from kvyard.front.text.stops import StopStrings
from kvyard.front.text.support import TextSupport
from kvyard.link.messages import TokenLogprobs

EOS = 2


def new(support: TextSupport, *stops: str, **options: object) -> Continuation:
    return support.continuation(StopStrings(stops), **options)  # type: ignore[arg-type] # test shorthand


def ids(support: TextSupport, text: str) -> list[int]:
    return support.tokenizer.encode(text)


def drive(continuation: Continuation, deltas: list[Delta]) -> tuple[str, bool]:
    """All text shown, and whether a stop string ended it."""
    text, stopped = "", False
    for delta in deltas:
        stopped = continuation.accept(delta) or stopped
        text += continuation.take().text
    return text, stopped


def one_by_one(tokens: list[int], finish: str) -> list[Delta]:
    deltas = [Delta(0, [token]) for token in tokens]
    deltas[-1].finish = finish  # type: ignore[assignment] # a literal in every call
    return deltas


def test_text_and_counts_without_stop_strings(support: TextSupport) -> None:
    tokens = ids(support, "The capital of France is Paris.")
    continuation = new(support)
    assert drive(continuation, one_by_one(tokens, "length")) == ("The capital of France is Paris.", False)
    assert (continuation.count, continuation.finish) == (len(tokens), "length")


def test_the_end_token_counts_and_is_not_seen(support: TextSupport) -> None:
    tokens = [*ids(support, "Hello"), EOS]
    for options in ({}, {"skip_special_tokens": False}):
        continuation = new(support, **options)
        assert drive(continuation, one_by_one(tokens, "stop"))[0] == "Hello"
        assert continuation.count == len(tokens)


def test_the_end_token_is_seen_when_asked_for(support: TextSupport) -> None:
    continuation = new(support, include_stop=True, skip_special_tokens=False)
    assert drive(continuation, one_by_one([*ids(support, "Hello"), EOS], "stop"))[0] == "Hello<|im_end|>"


def test_an_ignored_end_token_is_hidden_as_special_or_shown(support: TextSupport) -> None:
    tokens = [*ids(support, "a"), EOS, *ids(support, "b")]
    assert drive(new(support), one_by_one(tokens, "length"))[0] == "ab"
    assert drive(new(support, skip_special_tokens=False), one_by_one(tokens, "length"))[0] == "a<|im_end|>b"


def test_TEXT_09_a_special_stop_token_takes_nothing_visible_with_it(support: TextSupport) -> None:
    special = 5
    tokens = [*ids(support, "foo"), *ids(support, "bar"), special]
    continuation = new(support, stop_ids=frozenset([special]))
    for delta in one_by_one(tokens, "stop"):
        continuation.accept(delta)
    piece = continuation.take()
    assert (piece.text, piece.finish, piece.stop_reason) == ("foobar", "stop", special)


def test_TOKENIZER_06_no_end_marker_shows_whichever_ends_it(support: TextSupport) -> None:
    for marker in (0, EOS):
        continuation = new(support, stop_ids=frozenset([0]), skip_special_tokens=False)
        assert drive(continuation, one_by_one([*ids(support, "done"), marker], "stop"))[0] == "done"
        assert continuation.finish == "stop"


def test_TEXT_02_a_cut_character_is_one_replacement_sign_at_the_end(support: TextSupport) -> None:
    tokens = ids(support, "🙂")
    assert len(tokens) > 1
    whole = drive(new(support), [Delta(0, tokens[:-1], finish="length")])[0]
    stream = drive(new(support), one_by_one(tokens[:-1], "length"))[0]
    assert whole == stream == "\ufffd"


def test_a_stop_string_drops_the_rest_of_the_delta(support: TextSupport) -> None:
    tokens = ids(support, "red blue green yellow")
    continuation = new(support, "d bl")
    assert continuation.accept(Delta(0, tokens)) is True
    piece = continuation.take()
    assert (piece.text, piece.finish, piece.stop_reason) == ("re", "stop", "d bl")
    assert piece.tokens == tokens[: len(piece.tokens)]
    assert len(piece.tokens) == continuation.count < len(tokens)
    assert continuation.accept(Delta(0, tokens, finish="length")) is False
    assert continuation.take().tokens == []


def test_a_stop_string_may_be_shown(support: TextSupport) -> None:
    continuation = new(support, "Paris", include_stop=True)
    text, stopped = drive(continuation, one_by_one(ids(support, "It is Paris, yes"), "length"))
    assert (text, stopped) == ("It is Paris", True)


def test_a_stop_string_in_the_last_token_beats_the_length_limit(support: TextSupport) -> None:
    continuation = new(support, "is")
    assert drive(continuation, one_by_one(ids(support, "this"), "length")) == ("th", True)
    assert continuation.finish == "stop"


def test_held_text_comes_out_when_the_engine_ends_it(support: TextSupport) -> None:
    for finish, tail in (("length", []), ("stop", [EOS])):
        continuation = new(support, "red door")
        assert drive(continuation, one_by_one([*ids(support, "the red"), *tail], finish)) == ("the red", False)


def test_min_tokens_holds_stop_strings_back(support: TextSupport) -> None:
    tokens = ids(support, " a a a a a a")
    continuation = new(support, "a", min_tokens=4)
    text, stopped = drive(continuation, one_by_one(tokens, "length"))
    assert stopped
    assert (text, continuation.count) == (" a a a ", 4)


def test_a_stop_string_that_began_before_min_tokens_is_hidden_whole(support: TextSupport) -> None:
    tokens = ids(support, "a red door opens")
    assert [support.tokenizer.token_text(token) for token in tokens[:3]] == ["a", " red", " door"]
    for least in (2, 3):
        continuation = new(support, "red door", min_tokens=least)
        assert drive(continuation, one_by_one(tokens, "length")) == ("a ", True)
        assert continuation.count == 3
    continuation = new(support, "red door", min_tokens=4)
    assert drive(continuation, one_by_one(tokens, "length")) == ("a red door opens", False)


def test_LOGPROB_08_entries_go_with_their_tokens_not_with_the_text(support: TextSupport) -> None:
    tokens = ids(support, "a red door opens")
    continuation = new(support, "red door")
    sent: list[int] = []
    for token in tokens:
        ended = continuation.accept(Delta(0, [token], hashes=[token], logprobs=[TokenLogprobs(token, -1.0, 1)]))
        piece = continuation.take()
        assert [entry.token for entry in piece.logprobs] == piece.tokens == piece.hashes == [token]
        sent += piece.tokens
        if ended:
            break
    assert sent == tokens[: continuation.count]
    assert len(sent) < len(tokens)


def test_offsets_point_at_each_tokens_text(support: TextSupport) -> None:
    text = "The quick brown fox"
    tokens = ids(support, text)
    continuation = new(support)
    continuation.accept(Delta(0, tokens, finish="length"))
    piece = continuation.take()
    spelt = [support.tokenizer.token_text(token) for token in piece.tokens]
    assert [text[at : at + len(each)] for at, each in zip(piece.offsets, spelt, strict=True)] == spelt


def test_offsets_behind_a_character_that_stays_incomplete(support: TextSupport) -> None:
    first, plain = ids(support, "🙂")[0], ids(support, "A")[0]
    continuation = new(support)
    continuation.accept(Delta(0, [plain, first, plain, first, *ids(support, "🙂"), plain], finish="length"))
    piece = continuation.take()
    assert piece.text == "A\ufffdA\ufffd🙂A"
    spelt = [(at, support.tokenizer.token_text(token)) for at, token in zip(piece.offsets, piece.tokens, strict=True)]
    assert [at for at, text in spelt if text == "A"] == [0, 2, 5]
    assert piece.offsets[4] == 4


def test_an_error_is_kept(support: TextSupport) -> None:
    continuation = new(support)
    continuation.accept(Delta(0, ids(support, "half"), finish="error", error=("engine_killed", "why")))
    assert (continuation.finish, continuation.error) == ("error", ("engine_killed", "why"))
    assert continuation.take().text == "half"


@given(data=st.data())
def test_the_way_tokens_are_grouped_into_deltas_changes_nothing(support: TextSupport, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="abcd e", min_size=1, max_size=3), max_size=3))
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=6))), len(tokens)]
    groups = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    grouped = [Delta(0, group) for group in groups]
    grouped[-1].finish = "length"
    a, b = new(support, *stops), new(support, *stops)
    assert drive(a, one_by_one(tokens, "length")) == drive(b, grouped)
    assert (a.count, a.finish) == (b.count, b.finish)
