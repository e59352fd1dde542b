"""Text, stops and log-probabilities of given tokens: the real daemon, whole and streamed, completions and chats.

`Scripted.ask` sends a request in each of its forms; what a test looks at is the same in all of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.scripted import Choice, Scripted, Token, pieces_model, scripted, words_model
from tests.e2e.timing import limit

END = "<|im_end|>"
SECOND_END = "<|endoftext|>"
OTHER = "<|im_start|>"
"""A special token that ends nothing by itself."""
FACE = "🙂"
FACES = [bytes([byte]) for byte in (FACE * 12).encode()]
LOST = "\ufffd"
BLANK = 49_152
"""An id of the model's padding: no text."""
ORDINARY = [b"The", b" cat", b" sat", b" on", b" the", b" mat", b" and", b" then", b" it", b" ran"] * 2

WORDS: dict[str, list[Token]] = {
    "faces": [*FACES, END],
    "impossible": [b"\xe2", b"\xe2", b"A", END],
    "surrogate": [b"a", b"\xed", b"\xa0", b"\x80", b"A", END],
    "half a sign": [b"a", b"\xf0\x9f", b"\x99", END],
    "half and half": [b"a", b"\xf0\x9f", b"\xe2", END],
    "half a sign, then others": [b"a", b"\xf0\x9f", b"A", b"\xe2", b" door", END],
    "nest": [b"a", b" big", b"nest", b" door", b" opens"],
    "red blue": [b"the", b" red", b" blue", b" door", b" opens"],
    "red door": [b" a", b" ", b"re", b"d", b" door", b" opens", b" wide", END],
    "only red": [b" a", b" red", END],
    "doors": [b" a", b" red", b" door", b" opens", END],
    "foo": [b"foo", b"bar", OTHER, b"foo"],
    "ordinary": [*ORDINARY],
    "Z": [b"a", b"Z", b"Z", b"a", b"Z", b"Z", END],
    "leading": [b" ", b" leading", b" x", END],
    "signs": [b"    ", b".", b"do", b" n", b"'t", b" ,", END],
    "signs of every kind": [b"a", b"\n", b"\r", b"\x00", b"\n\n", "é".encode(), b"\\", b'"', END],
    "letters": [b"x", b"y", b"b", b"a", b"\n", b"x", END],
    "accents": [b"a", "é".encode(), b"\xf0\x9f", b"\x99", b"\x82", b"b", END],
    "nothing": [BLANK, END],
    "foo nothing bar": [b"foo", BLANK, b"bar", BLANK, END],
    "special": [b"foo", OTHER, b"bar", END, b"foo", OTHER, END],
    "END": [END],
    "second end": [b"foo", SECOND_END, b"bar", END],
    "rest": [b"\x99", b"\x82", b"A", END],
    "again": [b"a", b"a", b"b", b"a", b"b", b"a", b"c", END],
    "long": [b"a", b" door", b" opens"] * 700,
    "ten": [b" red"] * 10,
    "kills": [*FACES[:23], FACES[3], b" red", b" door", END],
}
SEVERAL: dict[str, list[list[Token]]] = {
    "two": [[b" red", b" door", END], [b" a", b" red", b" blue", b" door", END]],
    "three": [[*[b" a"] * 4, END], [*[b" red"] * 29, END], [*[b" door"] * 59, END]],
}
PIECES: dict[str, list[Token]] = {
    "impossible": [b"\xff", b"\xfe", b"A", "</s>"],
    "leading": [b" ", b" leading", b" x", "</s>"],
    "faces": [*FACES, "</s>"],
    "stop": [b" lead", b"\xf0", b"\x9f", b"\x99", b"\x82", b"in", b"g", b" x", "</s>"],
    "nothing": [b" x", 278, b"in", "</s>"],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Scripted]:
    """The default model's byte-level vocabulary."""
    folder = words_model(tmp_path_factory.mktemp("words"), default_model)
    outputs = {name: [tokens] for name, tokens in WORDS.items()} | SEVERAL
    with scripted(folder, outputs, chat=True, kills=("kills", 20)) as found:
        yield found
        idle_again(found.running)
        assert "Traceback" not in found.running.log


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A SentencePiece vocabulary, where each byte is a token; no chat template."""
    folder = pieces_model(tmp_path_factory.mktemp("pieces"))
    with scripted(folder, {name: [tokens] for name, tokens in PIECES.items()}, chat=False) as found:
        yield found
        idle_again(found.running)
        assert "Traceback" not in found.running.log


# ---- decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", ["words", "pieces"])
def test_TEXT_02_a_long_run_of_byte_tokens(request: pytest.FixtureRequest, vocabulary: str) -> None:
    daemon: Scripted = request.getfixturevalue(vocabulary)
    whole = daemon.ask("faces")
    assert (whole.text, whole.finishes, len(whole.tokens)) == (FACE * 12, ["stop"], 49)
    assert not any(LOST in text for text, _ in whole.chunks)
    cut = daemon.ask("faces", max_tokens=46)
    assert (cut.text, cut.finishes, len(cut.tokens)) == (FACE * 11 + LOST, ["length"], 46)
    assert [text for text, _ in cut.chunks if LOST in text] == [cut.chunks[-1][0]]


def test_TEXT_03_bytes_that_are_never_a_sign(words: Scripted, pieces: Scripted) -> None:
    for daemon in (pieces, words):
        told = daemon.ask("impossible")
        assert (told.text, told.finishes, len(told.tokens)) == (LOST * 2 + "A", ["stop"], 4)
    assert words.ask("surrogate").text == "a" + LOST * 3 + "A"


@pytest.mark.parametrize(("name", "text"), [("half a sign", "a" + LOST), ("half and half", "a" + LOST * 2)])
def test_TEXT_03_a_sign_that_is_left_incomplete_at_the_end(words: Scripted, name: str, text: str) -> None:
    assert words.ask(name).text == text
    assert words.ask(name, stop=["never"]).text == text
    assert words.ask(name, stop=[LOST]).text == text.partition(LOST)[0]
    assert words.ask(name, max_tokens=2).text == "a" + LOST


def test_TEXT_12_a_leading_space_stays(words: Scripted, pieces: Scripted) -> None:
    for daemon in (words, pieces):
        told = daemon.ask("leading")
        assert told.text == "  leading x"
        assert "".join(text for text, _ in told.chunks) == told.text
        assert daemon.ask("leading", max_tokens=1).text == " "


def test_TEXT_13_nothing_is_cleaned_up(words: Scripted) -> None:
    assert words.ask("signs").text == "    .do n't ,"


def test_TEXT_13_signs_that_a_stream_or_json_could_trip_over(words: Scripted) -> None:
    assert words.ask("signs of every kind").text == 'a\n\r\x00\n\né\\"'


@pytest.mark.parametrize(("vocabulary", "text"), [("words", "foobar"), ("pieces", " xin")])
def test_tokens_without_text_count_and_show_nothing(
    request: pytest.FixtureRequest, vocabulary: str, text: str
) -> None:
    daemon: Scripted = request.getfixturevalue(vocabulary)
    told = daemon.ask("nothing" if vocabulary == "pieces" else "foo nothing bar")
    assert told.text == text
    assert "" in told.spelt
    if vocabulary == "words":
        told = daemon.ask("nothing")
        assert (told.text, told.tokens, told.finishes) == ("", [BLANK, 2], ["stop"])
        answer = daemon.running.post("/detokenize", {"tokens": [BLANK]})
        assert answer.json() == {"prompt": ""}
        assert daemon.running.post("/detokenize", {"tokens": [BLANK + 3]}).status_code == 400


@pytest.mark.parametrize("stop", [FACE + " red", None])
def test_TEXT_02_a_sign_that_is_cut_by_an_engines_death(words: Scripted, stop: str | None) -> None:
    """The prompt is two tokens long: at 20 computed ones half a face is there, and a stop string has begun."""
    first = words.stream("/v1/completions", "kills", stop=stop).choices
    assert value(words.running, "kvyard_engine_restarts_total") == 1
    told = words.ask("kills", stop=stop)
    assert told.text == (FACE * 5 if stop else FACE * 6 + " red door")
    assert [choice.outcome for choice in first] == [told.outcome]
    assert first[0].offsets == told.offsets
    assert first[0].logprobs == pytest.approx(told.logprobs, abs=1e-3)


@pytest.mark.parametrize("name", ["faces", "impossible", "half a sign", "foo nothing bar", "special", "leading"])
def test_TEXT_02_03_09_12_over_the_control_socket(words: Scripted, name: str) -> None:
    prompt = words.body("/v1/completions", name)["prompt"]
    with Client(words.running.socket) as client:
        answer = client.call("generate", {"prompt": prompt, "temperature": 0, "max_tokens": 200})
    told = words.ask(name)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == (told.text, told.tokens, "stop")
    assert answer["usage"]["completion_tokens"] == len(told.tokens)


# ---- stop strings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stop", "text", "count"),
    [
        ("nest", "ne", "a big", 3),
        ("nest", "es", "a bign", 3),
        ("red blue", "d bl", "the re", 3),
        ("red blue", ["opens", "blue d"], "the red ", 4),
        ("doors", " a", "", 1),
        ("doors", ["xyz", " a red door opens"], "", 4),
    ],
)
def test_TEXT_05_the_text_ends_before_it_and_the_output_with_its_token(
    words: Scripted, name: str, stop: str | list[str], text: str, count: int
) -> None:
    told = words.ask(name, stop=stop)
    assert (told.text, len(told.tokens), told.finishes) == (text, count, ["stop"])
    assert told.stop_reason == (stop if isinstance(stop, str) else stop[1])
    with_it = words.ask(name, stop=stop, include_stop_str_in_output=True)
    assert (with_it.text, with_it.tokens) == (f"{text}{told.stop_reason}", told.tokens)


def test_TEXT_05_generation_ends_there(words: Scripted) -> None:
    made = value(words.running, "kvyard_output_tokens_total")
    told = words.ask("long", stop="door opens", max_tokens=2000)
    assert (told.text, len(told.tokens)) == ("a ", 3)
    idle_again(words.running)
    assert value(words.running, "kvyard_output_tokens_total") - made < 4000, "four requests of up to 2,000 tokens"


@pytest.mark.parametrize(("name", "text", "count"), [("red door", " a ", 5), ("only red", " a red", 3)])
def test_TEXT_05_over_three_tokens_or_never_whole(words: Scripted, name: str, text: str, count: int) -> None:
    told = words.ask(name, stop="red door")
    assert (told.text, len(told.tokens)) == (text, count)
    assert told.stop_reason == ("red door" if count == 5 else None)


@pytest.mark.parametrize(
    ("stop", "text", "reason", "count"),
    [
        (["red door", "red"], " a ", "red", 2),
        (["red", "red door"], " a ", "red", 2),
        (["door", "red door"], " a ", "red door", 3),
        ([" red door o", "door"], " a red ", "door", 3),
        (["red cat", "door o"], " a red ", "door o", 4),
        (["d"], " a re", "d", 2),
    ],
)
def test_TEXT_05_of_several_the_first_complete_and_then_the_longest(
    words: Scripted, stop: list[str], text: str, reason: str, count: int
) -> None:
    told = words.ask("doors", stop=stop)
    assert (told.text, told.stop_reason, len(told.tokens)) == (text, reason, count)


def test_TEXT_05_a_start_within_a_false_start(words: Scripted) -> None:
    assert words.ask("again", stop="abac").text == "aab"
    assert words.ask("again", stop=["ababx", "bac"]).text == "aaba"


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [("é🙂", "a", 5), ("🙂b", "aé", 6), ("🙂", "aé", 5), (LOST, "aé🙂b", 7), ("\u00e9", "a", 2)],
)
def test_TEXT_05_across_signs_of_several_bytes(words: Scripted, stop: str, text: str, count: int) -> None:
    told = words.ask("accents", stop=stop)
    assert (told.text, len(told.tokens)) == (text, count)


def test_TEXT_05_on_a_vocabulary_of_bytes(pieces: Scripted) -> None:
    told = pieces.ask("stop", stop="🙂ing")
    assert (told.text, len(told.tokens), told.stop_reason) == (" lead", 7, "🙂ing")
    assert pieces.ask("stop", stop="🙂ing y").text == " lead🙂ing x"


def test_TEXT_07_nothing_is_held_back_that_begins_no_stop_string(words: Scripted) -> None:
    told = words.ask("ordinary", stop="Z" * 200, max_tokens=20)
    assert told.text == b"".join(ORDINARY).decode()
    text = words.tokenizer.decode
    assert all(shown == text(tokens) for shown, tokens in told.chunks)
    assert told.chunks[0][0] != ""


def test_TEXT_07_what_has_been_made_has_been_sent(words: Scripted) -> None:
    """Scheduling is paused in mid-stream: the text of every token that there is arrives."""
    running, got = words.running, Choice()
    idle_again(running)
    made = value(running, "kvyard_output_tokens_total")
    over = threading.Event()

    def read() -> None:
        body = words.body("/v1/completions", "long", stop="Z" * 200, max_tokens=2000, stream=True)
        with words.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    got.add(json.loads(line.removeprefix("data: "))["choices"][0])
                if over.is_set():
                    return

    with ThreadPoolExecutor(1) as pool, Client(running.socket) as control:
        reading = pool.submit(read)
        try:
            wait_until(lambda: len(got.chunks) >= 3, limit(10), "the stream to run")
            control.call("pause")
            made = value(running, "kvyard_output_tokens_total") - made
            wait_until(lambda: len(got.tokens) == made, limit(10), f"all {made} tokens")
            assert got.text == words.tokenizer.decode(got.tokens)
        finally:
            over.set()
            control.call("resume")
        reading.result()


@pytest.mark.parametrize(
    ("most", "text"), [(2, "aZ"), (3, "aZZ"), (4, "aZZa"), (6, "aZZaZZ"), (7, "aZZaZZ"), (200, "aZZaZZ")]
)
def test_TEXT_07_what_was_held_back_comes_with_the_end(words: Scripted, most: int, text: str) -> None:
    told = words.ask("Z", stop="ZZZ", max_tokens=most)
    assert (told.text, told.finishes) == (text, ["length" if most < 7 else "stop"])
    assert told.stop_reason is None


def test_TEXT_08_an_empty_one_stops_nothing(words: Scripted) -> None:
    free = words.ask("doors")
    assert len(free.tokens) == 5
    for stop in ("", [""], None, []):
        assert words.ask("doors", stop=stop).outcome == free.outcome
    assert words.ask("doors", stop=["", "opens"]).text == " a red door "


@pytest.mark.parametrize(
    ("stop", "text", "count"), [(["a"], "xyb", 4), (["a", "b"], "xy", 3), (["\n"], "xyba", 5), (["x"], "", 1)]
)
def test_TEXT_11_single_signs(words: Scripted, stop: list[str], text: str, count: int) -> None:
    told = words.ask("letters", stop=stop)
    assert (told.text, len(told.tokens)) == (text, count)


def test_a_stop_string_does_not_count_before_min_tokens(words: Scripted) -> None:
    assert words.ask("again", stop="a", min_tokens=3).text == "aab"
    assert words.ask("red door", stop="red door", min_tokens=5).text == " a "
    assert words.ask("red door", stop="red door", min_tokens=6).text == " a red door opens wide"


# ---- special tokens and ends ---------------------------------------------------------------------------------


def test_TEXT_09_a_special_stop_token_takes_nothing_along(words: Scripted) -> None:
    (other,) = words.tokenizer.encode(OTHER)
    for fields in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False}, {"stop": ["foobarn"]}):
        told = words.ask("foo", stop_token_ids=[other], **fields)
        assert (told.text, told.finishes, told.stop_reason, len(told.tokens)) == ("foobar", ["stop"], other, 3)
    shown = words.ask("foo", stop_token_ids=[other], include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown.text == "foobar" + OTHER
    (bar,) = words.tokenizer.encode("bar")
    told = words.ask("foo", stop_token_ids=[bar])
    assert (told.text, told.stop_reason, len(told.tokens)) == ("foo", bar, 2)
    assert words.ask("foo", stop_token_ids=[bar], include_stop_str_in_output=True).text == "foobar"


@pytest.mark.parametrize(
    ("fields", "text", "count"),
    [
        ({}, "foobar", 4),
        ({"ignore_eos": True, "max_tokens": 7}, "foobarfoo", 7),
        (
            {"ignore_eos": True, "max_tokens": 7, "skip_special_tokens": False},
            f"foo{OTHER}bar{END}foo{OTHER}{END}",
            7,
        ),
        ({"skip_special_tokens": False}, f"foo{OTHER}bar", 4),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, f"foo{OTHER}bar{END}", 4),
        ({"skip_special_tokens": False, "stop": OTHER}, "foo", 2),
        ({"skip_special_tokens": False, "stop": "o<|im_start|>b"}, "fo", 3),
        ({"stop": [OTHER, "ob"]}, "fo", 3),
    ],
)
def test_TEXT_09_special_tokens_shown_and_hidden(
    words: Scripted, fields: dict[str, Any], text: str, count: int
) -> None:
    told = words.ask("special", **fields)
    assert (told.text, len(told.tokens)) == (text, count)


def test_TOKENIZER_06_either_end_ends_and_none_is_seen(words: Scripted) -> None:
    for fields in ({}, {"skip_special_tokens": False}, {"stop": ["endoftext"]}):
        told = words.ask("second end", **fields)
        assert (told.text, told.finishes, told.stop_reason, len(told.tokens)) == ("foo", ["stop"], None, 2)
    told = words.ask("second end", ignore_eos=True, max_tokens=4, skip_special_tokens=False)
    assert told.text == f"foo{SECOND_END}bar{END}"


def test_API_10_an_end_without_text_is_told_once(words: Scripted) -> None:
    told = words.ask("doors")
    assert (told.text, told.finishes, told.stop_reason) == (" a red door opens", ["stop"], None)
    told = words.ask("END")
    assert (told.text, told.finishes, len(told.tokens)) == ("", ["stop"], 1)


# ---- choices, echo, log-probabilities ------------------------------------------------------------------------


def test_API_11_choices_end_one_after_the_other(words: Scripted) -> None:
    told = words.ask_all("three", n=3)
    assert [choice.text for choice in told] == [" a" * 4, " red" * 29, " door" * 59]
    assert [len(choice.tokens) for choice in told] == [5, 30, 60]
    assert [choice.finishes for choice in told] == [["stop"]] * 3


def test_choices_have_their_own_stops(words: Scripted) -> None:
    told = words.ask_all("two", n=2, stop=["red door", "blue"])
    assert [(choice.text, choice.stop_reason) for choice in told] == [(" ", "red door"), (" a red ", "blue")]
    assert [len(choice.tokens) for choice in told] == [2, 3]


@pytest.mark.parametrize("fields", [{}, {"stop": "door"}, {"max_tokens": 2}])
def test_echo_and_its_offsets(words: Scripted, fields: dict[str, Any]) -> None:
    plain, told = words.ask("doors", **fields), words.ask("doors", echo=True, **fields)
    prompt = str(words.body("/v1/completions", "doors")["prompt"])
    assert told.text == prompt + plain.text
    first = len(told.spelt) - len(told.tokens)
    assert "".join(told.spelt[:first]) == prompt
    assert told.offsets[first:] == [len(prompt) + at for at in plain.offsets]
    assert told.logprobs[first:] == pytest.approx(plain.logprobs, abs=1e-3)
    assert told.logprobs[0] is None


@pytest.mark.parametrize(
    ("name", "shown", "alone"),
    [
        ("rest", FACE + "A", LOST * 2 + "A"),
        ("doors", LOST + " a red door opens", " a red door opens"),
        ("END", LOST, ""),
    ],
)
def test_echo_of_ids_that_end_within_a_sign(words: Scripted, name: str, shown: str, alone: str) -> None:
    """The text of an echo is that of all ids together."""
    text = str(words.body("/v1/completions", name)["prompt"])
    prompt = [*words.tokenizer.encode(text + FACE)[:-1]]
    told = words.ask(name, echo=True, prompt=prompt)
    assert told.text == text + shown == words.tokenizer.decode([*prompt, *told.tokens[:-1]])
    assert words.whole("/v1/completions", name, prompt=prompt).choices[0].text == alone
    scored = words.running.complete(prompt, echo=True, max_tokens=0, logprobs=0)["choices"][0]
    assert scored["text"] == text + LOST
    assert scored["logprobs"]["text_offset"] == told.offsets[: len(prompt)]


def test_an_echoed_prompt_holds_no_stop_string(words: Scripted) -> None:
    prompt = str(words.body("/v1/completions", "doors")["prompt"])
    told = words.ask("doors", echo=True, stop=["Once", prompt[-1] + " a", "opens"])
    assert (told.text, told.stop_reason) == (prompt + " a red door ", "opens")


@pytest.mark.parametrize(("stop", "most"), [("door", 3), (None, 5), (["opens"], 4)])
def test_an_end_with_the_last_token_allowed_is_a_stop(words: Scripted, stop: str | None, most: int) -> None:
    told = words.ask("doors", stop=stop, max_tokens=most)
    assert (told.finishes, len(told.tokens)) == (["stop"], most)


def test_LOGPROB_08_an_entry_for_each_token_however_its_text_is_held_back(words: Scripted) -> None:
    told = words.ask("red door", stop="red door")
    assert told.spelt == [" a", " ", "re", "d", " door"]
    assert told.tokens == [words.tokenizer.encode(text)[0] for text in told.spelt]
    assert [len(tokens) for _, tokens in told.chunks].count(0) <= 1
    late = words.ask("only red", stop="red door")
    assert (late.text, late.spelt) == (" a red", [" a", " red", END])


def test_LOGPROB_08_offsets_are_where_the_text_is(words: Scripted) -> None:
    told = words.ask("half a sign, then others")
    assert told.text == f"a{LOST}A{LOST} door"
    assert told.offsets == [0, 1, 2, 3, 4, 9]
    assert words.ask("accents").offsets == [0, 1, 2, 2, 2, 3, 4]
    assert words.ask("special", ignore_eos=True, max_tokens=7).offsets == [0, 3, 3, 6, 6, 9, 9]


def test_a_hook_is_told_in_the_log(words: Scripted) -> None:
    for variable in ("KVYARD_TEST_SCRIPT", "KVYARD_TEST_FAULTS"):
        assert any("engine.test_hook" in line and variable in line for line in words.running.log.splitlines())


def test_penalties_count_the_tokens_that_came(words: Scripted) -> None:
    """Behind the script the model chooses between two words, of which it was made to say one ten times."""
    red, blue = words.tokenizer.encode(" red blue")
    between = {"logit_bias": {str(red): 100, str(blue): 90}, "max_tokens": 11}
    assert words.ask("ten", **between).tokens == [red] * 11
    assert words.ask("ten", **between, presence_penalty=2).tokens == [red] * 11
    assert words.ask("ten", **between, frequency_penalty=2).tokens == [*[red] * 10, blue]


# ---- bodies and templates, where the model chooses -----------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "schema", "fixed"),
    [
        ("/v1/completions", "CompletionRequest", {"prompt": "Once upon a time"}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [{"role": "user", "content": "Say a word."}]}),
    ],
)
def test_API_03_null_is_left_out(words: Scripted, path: str, schema: str, fixed: dict[str, Any]) -> None:
    """Each optional field there is. Two make it greedy, and a chat has two limits: so one of each may be null."""
    chats = "messages" in fixed
    plain = {**fixed, "max_tokens": 2, "temperature": 0, "top_p": 0} | ({"max_completion_tokens": 2} if chats else {})
    described = words.running.get("/openapi.json").json()["components"]["schemas"][schema]
    optional = sorted(set(described["properties"]) - set(described["required"]))
    assert {"stop", "seed", "logit_bias", "stream_options", "prompt_logprobs", "max_tokens"} < set(optional)

    def answered(body: dict[str, Any]) -> str:
        answer = words.http.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)
        (choice,) = answer.json()["choices"]
        return str(choice["message"]["content"] if chats else choice["text"])

    expected = answered(plain)
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(optional, pool.map(answered, [{**plain, name: None} for name in optional]), strict=True))
    if not chats:
        assert found.pop("max_tokens").startswith(expected)
    assert found == dict.fromkeys(found, expected)
    assert answered({**fixed, **dict.fromkeys(optional), "max_tokens": 2, "top_p": 0}) == expected


def test_API_14_what_a_template_refuses_is_quoted(words: Scripted, pieces: Scripted) -> None:
    def refused(daemon: Scripted, *roles: str) -> str:
        messages = [{"role": role, "content": "a"} for role in roles]
        answer = daemon.running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "chat_template"
        return str(answer.json()["error"]["message"])

    assert "There is no system in this model." in refused(words, "system", "user")
    assert "User and assistant take turns." in refused(words, "user", "user")
    assert "User and assistant take turns." in refused(words, "wizard")
    assert "no chat template" in refused(pieces, "user")
