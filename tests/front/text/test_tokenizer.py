"""Token ids equal the reference tokenizer's; token bytes are what the ids stand for."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.text.errors import ModelTextError
from kvyard.front.text.support import TextSupport
from kvyard.front.text.tokenizer import Tokenizer

from tests.front.text import gguf_files

REFERENCE = Path(__file__).parents[2] / "data" / "greedy" / "greedy_smollm2.json"
SPACES = ["Hello", " Hello", "  Hello", "\t" * 6 + "word", "a\n\n  b", "trailing   ", ""]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVYARD_CACHE_DIR", str(tmp_path / "cache"))


def reference_items(kind: str) -> list[dict[str, object]]:
    items = json.loads(REFERENCE.read_text())["items"]
    return [item for item in items if item["kind"] == kind]


def test_prompts_of_the_reference_have_its_ids(tokenizer: Tokenizer) -> None:
    items = reference_items("text")
    assert len(items) == 16
    for item in items:
        assert tokenizer.encode(str(item["prompt"])) == item["ids"]


def test_chats_of_the_reference_have_its_ids(support: TextSupport) -> None:
    items = reference_items("chat")
    assert len(items) == 4
    assert support.chat is not None
    for item in items:
        text = support.chat.render([{"role": "user", "content": item["prompt"]}])
        assert support.tokenizer.encode(text, add_special_tokens=False) == item["ids"]


def test_outputs_of_the_reference_have_its_text(tokenizer: Tokenizer) -> None:
    for item in reference_items("text"):
        assert tokenizer.decode(item["greedy"]) == item["text"]  # type: ignore[arg-type] # a list in the file


def test_end_ids_special_ids_and_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.longest_token == max(len(tokenizer.token_bytes(i)) for i in range(49_152))
    with pytest.raises(IndexError):
        tokenizer.token_bytes(49_152)


@given(st.text(max_size=60))
def test_text_comes_back_through_ids(tokenizer: Tokenizer, text: str) -> None:
    known = {
        byte
        for token in range(49_152)
        if len(tokenizer.token_bytes(token)) == 1
        for byte in tokenizer.token_bytes(token)
    }
    if all(byte in known for byte in text.encode()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_TOKENIZER_04_runs_of_spaces(tokenizer: Tokenizer) -> None:
    for text in SPACES:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Hello") != tokenizer.encode(" Hello")
    assert tokenizer.encode("") == []


def test_TOKENIZER_05_digits_accents_and_scripts_split_as_the_model_was_trained(tokenizer: Tokenizer) -> None:
    # Digits stand alone in this vocabulary, and everything else splits as in GPT-2.
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1234567")] == list("1234567")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("I'LL I'll")] == ["I", "'", "LL", " I", "'ll"]
    for text in ("Crème brûlée \u2013 2024", "नमस्ते दुनिया", "你好\uff0c世界", "مرحبا بالعالم", "👨‍👩‍👧‍👦"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_TOKENIZER_05_a_gguf_has_the_ids_of_a_tokenizer_built_by_hand(
    default_model: Path, tokenizer: Tokenizer
) -> None:
    from kvyard.front.text.gguf_metadata import read_metadata

    meta = read_metadata(default_model)
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    by_hand = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    by_hand.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [
        *SPACES,
        "Crème brûlée \u2013 2024",
        "नमस्ते",
        "你好\uff0c世界",
        "مرحبا",
        "👨‍👩‍👧‍👦",
        "1234567",
        "I'LL",
        "a\0b",
        "x = {'a': [1, 2]}\r\n",
    ]
    for text in texts:
        assert tokenizer.encode(text) == by_hand.encode(text).ids, text


def test_TOKENIZER_02_the_begin_token_stands_once_before_a_raw_prompt(tmp_path: Path) -> None:
    fields = gguf_files.byte_level(more={"ggml.add_bos_token": True})
    made = Tokenizer.load(gguf_files.write(tmp_path / "bos.gguf", fields))
    ids = made.encode("Hello")
    assert ids == [0, made.token_id("Hello")]
    assert made.encode("Hello", add_special_tokens=False) == ids[1:]
    plain = Tokenizer.load(gguf_files.write(tmp_path / "plain.gguf", gguf_files.byte_level()))
    assert plain.encode("Hello") == ids[1:]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", " ", " w"]),
        ("smollm", ["1", "2", "3", " ", " w"]),
        ("llama-bpe", ["123", " ", " w"]),
        ("qwen2", ["1", "2", "3", " ", " w"]),
        ("tekken", ["1", "2", "3", " ", " w"]),
    ],
)
def test_each_family_splits_in_its_own_way(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    made = Tokenizer.load(gguf_files.write(tmp_path / "m.gguf", gguf_files.byte_level(pre)))
    ids = [i for i in made.encode("123  w") if i not in made.special_ids]
    assert [made.token_text(i) for i in ids] == pieces


def test_an_unknown_pre_tokenizer_is_refused_rather_than_guessed(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.byte_level("brand-new"))
    with pytest.raises(ModelTextError, match=r"brand-new.*smollm"):
        Tokenizer.load(file)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({}, "no vocabulary"), ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "t5"}, "kind 't5'")],
)
def test_other_vocabularies_are_refused_in_words(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    with pytest.raises(ModelTextError, match=words):
        Tokenizer.load(gguf_files.write(tmp_path / "m.gguf", fields))


def test_all_end_ids_of_a_gguf_are_known(tmp_path: Path) -> None:
    fields = gguf_files.byte_level(more={"ggml.eot_token_id": 2})
    assert Tokenizer.load(gguf_files.write(tmp_path / "m.gguf", fields)).eos_ids == (1, 2)


class TestSentencePiece:
    @pytest.fixture()
    def made(self, tmp_path: Path) -> Tokenizer:
        return Tokenizer.load(gguf_files.write(tmp_path / "spm.gguf", gguf_files.sentencepiece()))

    def test_merges_follow_the_scores(self, made: Tokenizer) -> None:
        assert made.encode("leading") == [1, made.token_id("▁leading")]
        assert [made.token_bytes(i) for i in made.encode("lead in")[1:]] == [b" lead", b" ", b"in"]

    def test_bytes_outside_the_vocabulary_are_spelt(self, made: Tokenizer) -> None:
        ids = made.encode("ü")[1:]
        assert [made.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xbc"]
        assert made.decode(ids) == " ü"

    def test_TEXT_12_a_continuation_keeps_its_leading_space(self, made: Tokenizer) -> None:
        pieces = [made.token_id("▁"), made.token_id("▁leading"), made.token_id("▁"), made.token_id("x")]
        assert made.decode([piece for piece in pieces if piece is not None]) == "  leading x"


class TestFolder:
    def folder(self, tmp_path: Path, **files: object) -> Path:
        core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2}, merges=[]))
        core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = tokenizers.decoders.ByteLevel()
        core.add_special_tokens(["<end>", "<turn>"])
        core.add_tokens(["<plain tag>"])
        core.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(content))
        return tmp_path

    def test_added_tokens_are_part_of_the_vocabulary(self, tmp_path: Path) -> None:
        made = Tokenizer.load(self.folder(tmp_path))
        assert (made.vocab_size, made.special_ids) == (6, frozenset({3, 4}))
        assert made.encode("ab<turn> a<plain tag>") == [0, 1, 4, 2, 0, 5]
        assert made.decode([0, 4, 2, 5]) == "a<turn> <plain tag>"
        assert made.decode([0, 4, 2, 5], skip_special_tokens=True) == "a <plain tag>"

    def test_TOKENIZER_06_several_end_ids_of_the_generation_file(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, generation_config={"eos_token_id": [3, 4]}, config={"eos_token_id": 0})
        assert Tokenizer.load(folder).eos_ids == (3, 4)

    def test_the_models_configuration_comes_next(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, config={"eos_token_id": 4}, tokenizer_config={"eos_token": "<end>"})
        assert Tokenizer.load(folder).eos_ids == (4,)

    def test_then_the_tokenizers_own_end_token(self, tmp_path: Path) -> None:
        assert Tokenizer.load(
            self.folder(tmp_path, tokenizer_config={"eos_token": {"content": "<end>"}})
        ).eos_ids == (3,)

    @pytest.mark.parametrize("config", [{"vocab_size": 8}, {"text_config": {"vocab_size": 8}, "vocab_size": 3}])
    def test_a_model_padded_beyond_its_tokenizer_has_tokens_without_text(
        self, tmp_path: Path, config: dict[str, object]
    ) -> None:
        made = Tokenizer.load(self.folder(tmp_path, config=config))
        assert made.vocab_size == 8
        assert made.decode([0, 6, 7, 1]) == "ab"
        assert made.token_text(7) == ""
        with pytest.raises(IndexError):
            made.token_bytes(8)

    def test_a_token_that_the_model_has_no_row_for_is_none_of_its_ids(self, tmp_path: Path) -> None:
        made = Tokenizer.load(self.folder(tmp_path, config={"vocab_size": 5}))
        assert made.vocab_size == 5
        assert made.encode("a<plain tag>") == [0, 5]
        assert made.decode([5]) == "<plain tag>"
        assert made.longest_token == len("<plain tag>")

    @pytest.mark.parametrize("stated", [None, 0, -1, "8"])
    def test_without_a_stated_size_it_is_the_tokenizers(self, tmp_path: Path, stated: object) -> None:
        assert Tokenizer.load(self.folder(tmp_path, config={"vocab_size": stated})).vocab_size == 6

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelTextError, match=r"no tokenizer\.json"):
            Tokenizer.load(tmp_path)

    def test_a_damaged_tokenizer_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelTextError, match="cannot be read"):
            Tokenizer.load(tmp_path)

    def test_a_damaged_configuration_is_refused(self, tmp_path: Path) -> None:
        (self.folder(tmp_path) / "tokenizer_config.json").write_text("{")
        with pytest.raises(ModelTextError, match=r"tokenizer_config\.json is damaged"):
            Tokenizer.load(tmp_path)

    def test_a_decoder_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        core = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        core.decoder = tokenizers.decoders.WordPiece()
        core.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ModelTextError, match="not supported"):
            Tokenizer.load(tmp_path)
