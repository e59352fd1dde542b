"""Encoding away from the event loop, and refusing by size alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvyard.front.text.errors import ChatTemplateError
from kvyard.front.text.support import PromptTooLong, TextSupport

from tests.front.text import gguf_files


async def test_short_and_long_texts_have_the_same_ids(support: TextSupport) -> None:
    long = "many words and 12345 numbers " * 300
    assert await support.encode("Hello", limit=100) == support.tokenizer.encode("Hello")
    assert await support.encode(long, limit=10_000) == support.tokenizer.encode(long)


async def test_API_17_what_must_be_too_long_is_not_tokenized(support: TextSupport) -> None:
    huge = "x " * 2_500_000
    start = time.perf_counter()
    with pytest.raises(PromptTooLong) as caught:
        await support.encode(huge, limit=8192)
    assert time.perf_counter() - start < 1.0  # encoding it takes many seconds
    assert 8192 < caught.value.least <= len(huge)


async def test_the_bound_never_refuses_what_fits(support: TextSupport) -> None:
    longest = max(range(support.tokenizer.vocab_size), key=lambda i: len(support.tokenizer.token_bytes(i)))
    text = support.tokenizer.token_text(longest) * 50
    ids = support.tokenizer.encode(text)
    assert await support.encode(text, limit=len(ids)) == ids


async def test_API_17_the_event_loop_goes_on_while_a_long_text_is_encoded(support: TextSupport) -> None:
    ticks = 0

    async def ticker() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(ticker())
    await support.encode("some words " * 40_000, limit=1_000_000)
    ticking.cancel()
    assert ticks >= 10  # a blocked loop ticks once, however slow the machine is


async def test_API_14_a_model_without_a_template_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVYARD_CACHE_DIR", str(tmp_path / "cache"))
    bare = TextSupport.load(gguf_files.write(tmp_path / "m.gguf", gguf_files.byte_level()))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        await bare.render_chat([{"role": "user", "content": "Hi"}])
    bare.close()


async def test_long_conversations_render_alike(support: TextSupport) -> None:
    for content in ("short", "long " * 2_000):
        assert support.chat is not None
        messages = [{"role": "user", "content": content}]
        assert await support.render_chat(messages) == support.chat.render(messages)


def test_the_text_side_is_light(default_model: Path, text_cache: Path, support: TextSupport) -> None:
    """A fresh process with the converted tokenizer: no torch, little memory."""
    script = (
        "import sys, pathlib, psutil\n"
        "from kvyard.front.text.support import TextSupport\n"
        "text = TextSupport.load(pathlib.Path(sys.argv[1]))\n"
        "assert text.tokenizer.encode('Hello')\n"
        "assert 'torch' not in sys.modules and 'gguf' not in sys.modules\n"
        "print(psutil.Process().memory_info().rss >> 20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(default_model)],
        env={"KVYARD_CACHE_DIR": str(text_cache), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) < 100
