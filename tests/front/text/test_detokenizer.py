"""Incremental decoding equals full decoding, for every sequence of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.text.detokenizer import Detokenizer
from kvyard.front.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def of_byte(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte that has one."""
    single = [(tokenizer.token_bytes(i), i) for i in range(tokenizer.vocab_size)]
    return {spelt[0]: i for spelt, i in single if len(spelt) == 1}


def pieces_of(tokens: list[bytes], hidden: frozenset[int] = frozenset()) -> list[str]:
    """Text after each token, and what is left at the end as the last entry."""
    detokenizer = Detokenizer(tokens.__getitem__, hidden)
    return [*(detokenizer.feed(i) for i in range(len(tokens))), detokenizer.finish()]


@given(st.lists(st.binary(max_size=6), max_size=40))
def test_joined_pieces_equal_the_full_decode(tokens: list[bytes]) -> None:
    assert "".join(pieces_of(tokens)) == b"".join(tokens).decode("utf-8", "replace")


@given(st.text(max_size=30), st.data())
def test_valid_text_cut_anywhere_never_shows_a_replacement_sign(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=12)))
    bounds = [0, *cuts, len(raw)]
    tokens = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    assert "".join(pieces_of(tokens)) == text


@given(st.text(min_size=1, max_size=20))
def test_a_character_appears_with_the_byte_that_completes_it(text: str) -> None:
    tokens = [bytes([byte]) for byte in text.encode()]
    pieces = pieces_of(tokens)
    shown = ""
    for at, piece in enumerate(pieces[:-1], 1):
        shown += piece
        assert shown == text.encode()[:at].decode("utf-8", "ignore")
    assert pieces[-1] == ""


@given(st.lists(st.binary(max_size=4), max_size=30), st.sets(st.integers(0, 29)))
def test_hidden_tokens_leave_no_trace(tokens: list[bytes], hidden: set[int]) -> None:
    seen = b"".join(token for i, token in enumerate(tokens) if i not in hidden)
    assert "".join(pieces_of(tokens, frozenset(hidden))) == seen.decode("utf-8", "replace")


@given(st.lists(st.integers(0, 49_151), max_size=60))
def test_any_ids_of_the_model_decode_alike_at_once_and_one_by_one(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    one_by_one = "".join(detokenizer.feed(i) for i in ids) + detokenizer.finish()
    assert one_by_one == tokenizer.decode(ids)
    hiding = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    assert "".join(hiding.feed(i) for i in ids) + hiding.finish() == tokenizer.decode(ids, skip_special_tokens=True)


@given(
    st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"A", b"AB", b"\xff", b""]), max_size=12)
)
def test_a_token_that_breaks_a_character_is_told_before(tokens: list[bytes]) -> None:
    """Its text begins with the U+FFFD of the bytes before it exactly then."""
    detokenizer = Detokenizer(tokens.__getitem__)
    for at, token in enumerate(tokens):
        left = b"".join(tokens[:at]).decode("utf-8", "replace")
        without = b"".join(tokens[:at]).decode("utf-8", "ignore")
        held = detokenizer.breaks(at)
        text = detokenizer.feed(at)
        if held:
            assert text.startswith("\ufffd")
            assert left.endswith("\ufffd")
            assert len(left) > len(without)
        elif token[:1].isalpha() and token[:1].isascii():
            assert text == token.decode()


@pytest.mark.parametrize(
    ("tokens", "broken"),
    [
        ((b"\xe2", b"A"), [False, True]),
        ((b"\xe2", b"\x82", b"\xac"), [False, False, False]),
        ((b"\xef\xbf", b"\xbd"), [False, False]),  # a U+FFFD that the model wrote
        ((b"\xe0", b"\x80"), [False, True]),
        ((b"\xff", b"\xfe", b"A"), [False, False, False]),
        ((b"\xf0\x9f", b"", b"\xf0\x9f"), [False, False, True]),
    ],
)
def test_which_tokens_break_a_character(tokens: tuple[bytes, ...], broken: list[bool]) -> None:
    detokenizer = Detokenizer(tokens.__getitem__)
    told = []
    for at in range(len(tokens)):
        told.append(detokenizer.breaks(at))
        detokenizer.feed(at)
    assert told == broken


@given(st.binary(max_size=12), st.lists(st.binary(max_size=4), max_size=8))
def test_a_text_that_goes_on_with_an_incomplete_character(
    tokenizer: Tokenizer, of_byte: dict[int, int], before: bytes, tokens: list[bytes]
) -> None:
    ids = [of_byte[byte] for byte in before if byte in of_byte]
    known = b"".join(tokenizer.token_bytes(i) for i in ids)
    text, begun = tokenizer.decode_so_far(ids)
    detokenizer = Detokenizer(tokens.__getitem__, begun=begun)
    rest = "".join(detokenizer.feed(i) for i in range(len(tokens))) + detokenizer.finish()
    assert text + rest == (known + b"".join(tokens)).decode("utf-8", "replace")
    assert known.endswith(begun)


def test_TEXT_02_a_long_run_of_byte_tokens_stays_whole() -> None:
    emoji = "🙂" * 12
    tokens = [bytes([byte]) for byte in emoji.encode()]
    assert len(tokens) == 48
    assert "".join(pieces_of(tokens)) == emoji
    cut = pieces_of(tokens[:46])
    assert "".join(cut) == "🙂" * 11 + "\ufffd"
    assert cut[-1] == "\ufffd"


def test_TEXT_03_bytes_that_can_never_be_valid_do_not_stop_the_rest() -> None:
    assert "".join(pieces_of([b"\xff", b"\xfe", b"A"])) == "\ufffd\ufffdA"


def test_TEXT_12_a_leading_space_is_kept_on_both_kinds_of_vocabulary(tokenizer: Tokenizer) -> None:
    for tokens in ([b" ", b" leading", b" x"], [tokenizer.token_bytes(i) for i in tokenizer.encode("  leading x")]):
        assert "".join(pieces_of(tokens)) == b"".join(tokens).decode()
        assert "".join(pieces_of(tokens)).startswith(" ")


def test_TEXT_13_nothing_is_cleaned_up_behind_the_stream() -> None:
    for tokens in ([b"    ", b"."], [b"do", b" n", b"'t"], [b" ,"]):
        assert "".join(pieces_of(tokens)) == b"".join(tokens).decode()
