"""A small random model that the daemon serves many times as fast as a real one, for cases of many steps."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from tests.engine.tiny import LLAMA, random_tensors, write_folder

CONTEXT = 4096
"""Tokens of a sequence."""
VOCABULARY = 258
"""One token per byte, and two special ones."""
END = 257


def quick_model(folder: Path) -> Path:
    """Write it as a Hugging Face folder."""
    settings = LLAMA | {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": END}
    write_folder(folder, settings, random_tensors(settings, seed=3))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<begin>", "<end>"])
    return core
