"""How a GGUF's `tokenizer.ggml.pre` splits text before byte-pair merging.

Each entry restates, in the JSON of the `tokenizers` library, what the model's own tokenizer.json says:
the reference is the original tokenizer, not another engine's approximation of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _PUNCTUATION_AND_SPACE
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _PUNCTUATION_AND_SPACE
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """Pre-tokenizer and what goes with it in the same family of vocabularies."""

    pre_tokenizer: Json
    normalizer: Json | None = None
    ignore_merges: bool = False
    """A piece that is a whole token is taken as it is, without replaying its merges."""


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _by_regex(pattern: str, *, nfc: bool = False, ignore_merges: bool = False) -> Splitting:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    sequence = {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}
    return Splitting(sequence, {"type": "NFC"} if nfc else None, ignore_merges)


_GPT2: Final = Splitting(_byte_level(use_regex=True))
_DIGITS_GPT2: Final = Splitting(
    {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    }
)
_LLAMA3_SPLITTING: Final = _by_regex(_LLAMA3, ignore_merges=True)

SPLITTINGS: Final[dict[str, Splitting]] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3_SPLITTING,
    "llama3": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    "smaug-bpe": _LLAMA3_SPLITTING,
    "dbrx": _by_regex(_LLAMA3),
    "qwen2": _by_regex(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _by_regex(_QWEN2, nfc=True),
    "stablelm2": _by_regex(_QWEN2),
    "tekken": _by_regex(_TEKKEN, ignore_merges=True),
}
