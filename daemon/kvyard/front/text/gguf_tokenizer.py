"""A Hugging Face tokenizer folder from the metadata of a GGUF file.

The result is what the model's own repository would hold (`tokenizer.json`, `tokenizer_config.json`,
`generation_config.json`), so that everything behind it knows one format. It is written once into the
cache and reused by later starts, which then never open the GGUF for its text side.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from kvyard.front.text.errors import ModelTextError
from kvyard.front.text.gguf_metadata import read_metadata
from kvyard.front.text.pretokenizers import SPLITTINGS, Json

log = structlog.get_logger()

_FORMAT: Final = 1
"""Part of the cache key; raised when the conversion below changes its output."""

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def cache_root() -> Path:
    """Folder for derived files: KVYARD_CACHE_DIR, else kvyard's folder in the user's cache."""
    own = os.environ.get("KVYARD_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvyard"


def tokenizer_folder(gguf: Path) -> Path:
    """The tokenizer folder of a GGUF file, converted now or by an earlier start.

    Raises ModelTextError when the vocabulary is of a kind that cannot be rebuilt exactly.
    """
    target = cache_root() / "tokenizers" / _cache_name(gguf)
    if (target / "tokenizer.json").is_file():
        return target
    files = convert(read_metadata(gguf), gguf.name)
    try:
        return _store(files, target)
    except OSError as error:
        log.warning("tokenizer cache cannot be written, converting again at every start", reason=str(error))
        return _store(files, Path(tempfile.mkdtemp(prefix="kvyard-")) / target.name)


def _cache_name(gguf: Path) -> str:
    stat = gguf.stat()
    identity = f"{_FORMAT}\0{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return f"{gguf.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _store(files: dict[str, Json], target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        for name, content in files.items():
            (draft / name).write_bytes(msgspec.json.encode(content))
        draft.chmod(0o755)
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        # Another start may have been quicker; a rename onto its whole folder fails, and its files are as good.
        if not (target / "tokenizer.json").is_file():
            raise
    return target


def convert(meta: dict[str, Any], name: str) -> dict[str, Json]:
    """File name to JSON content of the tokenizer folder for GGUF metadata `meta` of the file `name`."""
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelTextError(f"{name} holds no vocabulary (tokenizer.ggml.tokens); it cannot be served as text.")
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(meta, tokens, name)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(meta, tokens)
    else:
        raise ModelTextError(
            f"{name} has a tokenizer of kind {kind!r}; byte-level BPE (gpt2) and SentencePiece BPE (llama) can be "
            "rebuilt. Use the model's Hugging Face folder, which holds a tokenizer.json, instead."
        )
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _config(meta, tokens),
        "generation_config.json": {"eos_token_id": _end_ids(meta)},
    }


def _byte_level_bpe(meta: dict[str, Any], tokens: list[str], name: str) -> Json:
    pre = meta.get("tokenizer.ggml.pre")
    splitting = SPLITTINGS.get(str(pre))
    if splitting is None:
        raise ModelTextError(
            f"{name} names the pre-tokenizer {pre!r}, which is not known here; guessing would change token ids. "
            f"Known: {', '.join(sorted(SPLITTINGS))}. Use the model's Hugging Face folder instead."
        )
    bos = _bos_id(meta) if meta.get("tokenizer.ggml.add_bos_token", splitting.ignore_merges) else None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": _added(meta, tokens),
        "normalizer": splitting.normalizer,
        "pre_tokenizer": splitting.pre_tokenizer,
        "post_processor": _prefixed(tokens, bos) if bos is not None else byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": meta.get("tokenizer.ggml.merges", []),
            "ignore_merges": splitting.ignore_merges,
        },
    }


def _sentencepiece_bpe(meta: dict[str, Any], tokens: list[str]) -> Json:
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    bos = _bos_id(meta) if meta.get("tokenizer.ggml.add_bos_token", True) else None
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "version": "1.0",
        "added_tokens": _added(meta, tokens),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces] if prefix else [spaces],
        },
        "post_processor": _prefixed(tokens, bos) if bos is not None else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges_by_score(tokens, meta.get("tokenizer.ggml.scores", [])),
        },
    }


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """SentencePiece stores no merges: a pair may merge when its union is a token, the best score first."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=False):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in rank and right in rank:
                merges.append((-score, rank[left], rank[right], left, right))
    merges.sort()
    return [[left, right] for _, _, _, left, right in merges]


def _added(meta: dict[str, Any], tokens: list[str]) -> list[Json]:
    kinds = meta.get("tokenizer.ggml.token_type", [])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], **flags, "special": kind == _CONTROL}
        for i, kind in enumerate(kinds[: len(tokens)])
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _prefixed(tokens: list[str], bos: int) -> Json:
    """A post-processor that puts the begin-of-text token before every text."""
    token = tokens[bos]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def _bos_id(meta: dict[str, Any]) -> int | None:
    bos = meta.get("tokenizer.ggml.bos_token_id")
    return bos if isinstance(bos, int) else None


def _end_ids(meta: dict[str, Any]) -> list[int]:
    found = (meta.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return list(dict.fromkeys(i for i in found if isinstance(i, int)))


def _config(meta: dict[str, Any], tokens: list[str]) -> Json:
    bos, ends = _bos_id(meta), _end_ids(meta)
    return {
        "bos_token": tokens[bos] if bos is not None else None,
        "eos_token": tokens[ends[0]] if ends else None,
        "chat_template": meta.get("tokenizer.chat_template"),
    }
