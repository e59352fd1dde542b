"""Text to token ids and token ids to bytes, for any model whose tokenizer the `tokenizers` library reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from encodings.utf_8 import IncrementalDecoder
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from kvyard.front.text.errors import ModelTextError
from kvyard.front.text.gguf_tokenizer import tokenizer_folder

# A pool of threads per core would take them from the engine; texts are encoded one at a time.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPACE_MARK: Final = "▁"
_HEX: Final = 16


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level vocabularies spell bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_ALPHABET: Final = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer. Encoding is thread-safe and releases the GIL; the rest belongs to one thread.

    `eos_ids` are all ids that end a text, `special_ids` those that `skip_special_tokens` hides.
    `vocab_size` is how many ids the model has; where that is not stated, one more than the tokenizer's highest.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, eos_ids: Iterable[int], config: dict[str, Any], stated: int | None = None
    ) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._added: dict[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        own = max(core.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        # Models are padded beyond their tokenizers, and tokenizers get tokens that a model has no row for.
        self.vocab_size = stated or own
        self.eos_ids = tuple(eos_ids)
        self.config = config
        """`tokenizer_config.json`: special tokens by name and the chat template, for templates to read."""
        self._byte_level = _is_byte_level(core)
        self._bytes: list[bytes | None] = [None] * max(own, self.vocab_size)
        self._longest: int | None = None

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a Hugging Face folder or a GGUF file. Raises ModelTextError, saying what is wrong with it."""
        folder = path if path.is_dir() else tokenizer_folder(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelTextError(f"{path} holds no tokenizer.json; the model cannot be served as text.")
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelTextError(f"{file} cannot be read as a tokenizer: {error}") from error
        core.no_truncation()
        core.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        return cls(core, _eos_ids(folder, config, core), config, _stated_size(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, after the begin-of-text token where the model has one and it is asked for."""
        # Unlike `encode`, the batch form releases the GIL: 400 ms for 160,000 tokens would stop every stream.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of `ids`; bytes that form no valid UTF-8 become U+FFFD. IndexError for unknown ids."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")

    def decode_so_far(self, ids: Sequence[int]) -> tuple[str, bytes]:
        """The text of `ids`, and what stands behind it of a character that other ids may complete."""
        decoder = IncrementalDecoder("replace")
        text = decoder.decode(b"".join(self.token_bytes(i) for i in ids))
        return text, decoder.buffer

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; empty for ids the vocabulary leaves out. IndexError outside it."""
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_text(self, token: int) -> str:
        """`token` alone as text, special tokens by their name."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its spelling in the vocabulary."""
        found: int | None = self._core.token_to_id(token)
        return found

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token, by which the least number of tokens of a text is known before encoding it."""
        if self._longest is None:
            self._longest = max(len(self._spell(i)) for i in range(len(self._bytes)))
        return self._longest

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.encode()
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return _from_alphabet(piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], _HEX)])
        return str(piece).replace(_SPACE_MARK, " ").encode()


def _from_alphabet(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:  # a piece that is not spelt in the byte alphabet stands for itself
        return piece.encode()


def _is_byte_level(core: tokenizers.Tokenizer) -> bool:
    """Whether tokens are spelt in the byte alphabet; otherwise with a mark for spaces and <0xNN> for bytes."""
    if core.decoder is None:
        raise ModelTextError("The tokenizer has no decoder, so its tokens cannot be turned back into text.")
    state = core.decoder.__getstate__().decode()
    if '"ByteLevel"' in state:
        return True
    if '"ByteFallback"' in state or '"Metaspace"' in state or _SPACE_MARK in state:
        return False
    raise ModelTextError(
        "The tokenizer's decoder is of a kind that is not supported; byte-level and SentencePiece BPE are."
    )


def _eos_ids(folder: Path, config: dict[str, Any], core: tokenizers.Tokenizer) -> list[int]:
    """End ids: those of the generation file, else of the model's configuration, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        stated = read_json(folder / name).get("eos_token_id")
        if isinstance(stated, int):
            return [stated]
        if isinstance(stated, list) and stated:
            return [i for i in stated if isinstance(i, int)]
    token = special_token(config, "eos_token")
    found = core.token_to_id(token) if token else None
    return [found] if found is not None else []


def _stated_size(folder: Path) -> int | None:
    """How many rows a model's embedding has, as its configuration says."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    stated = (text if isinstance(text, dict) else config).get("vocab_size")
    return stated if isinstance(stated, int) and stated > 0 else None


def special_token(config: dict[str, Any], name: str) -> str:
    """A named special token of `tokenizer_config.json`, stored as text or as an object; empty when there is none."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when there is no such file. Raises ModelTextError when it is damaged."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ModelTextError(f"{file} is damaged: {error}") from error
