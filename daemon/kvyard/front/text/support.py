"""The text side of a served model as the APIs use it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvyard.front.text.chat import ChatTemplate, find_template
from kvyard.front.text.continuation import Continuation
from kvyard.front.text.errors import ChatTemplateError
from kvyard.front.text.stops import StopStrings
from kvyard.front.text.tokenizer import Tokenizer

_INLINE_CHARS: Final = 2_000
"""Texts up to this length are encoded in the event loop (under 1 ms); a thread's hand-over costs more."""


class PromptTooLong(Exception):
    """The text cannot fit, known from its size alone. `least` is the fewest tokens it can have."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the prompt has at least {least} tokens")
        self.least = least


class TextSupport:
    """Tokenizer and chat template, with encoding that never blocks the event loop."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        # One thread: a burst of huge prompts must not take the cores from the engine.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, path: Path) -> TextSupport:
        """From a Hugging Face folder or a GGUF file. Raises ModelTextError."""
        tokenizer = Tokenizer.load(path)
        source = find_template(path, tokenizer.config)
        return cls(tokenizer, ChatTemplate(source, tokenizer.config) if source else None)

    async def encode(self, text: str, *, limit: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises PromptTooLong, without encoding, when it must exceed `limit` tokens."""
        if len(text) <= min(_INLINE_CHARS, limit):
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_long, text, limit, add_special_tokens)

    def _encode_long(self, text: str, limit: int, add_special_tokens: bool) -> list[int]:
        least = -(-len(text) // self.tokenizer.longest_token)
        if least > limit:
            raise PromptTooLong(least)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def render_chat(self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text of a conversation. Raises ChatTemplateError."""
        if self.chat is None:
            raise ChatTemplateError(
                "The served model has no chat template, so it cannot take conversations. "
                "Use /v1/completions with a prompt in the form the model was trained on."
            )
        template = self.chat
        if sum(len(str(message.get("content", ""))) for message in messages) <= _INLINE_CHARS:
            return template.render(messages, variables or {})
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: template.render(messages, variables or {}))

    def continuation(
        self,
        stops: StopStrings,
        *,
        stop_ids: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        begun: bytes = b"",
    ) -> Continuation:
        """The text of one continuation; `stop_ids` are the token ids that end it in the engine.

        `begun` are the bytes of a character that the prompt left incomplete, where both are shown as one text.
        """
        return Continuation(
            self.tokenizer,
            stops,
            stop_ids=stop_ids,
            hidden=self.tokenizer.special_ids if skip_special_tokens else frozenset(),
            include_stop=include_stop,
            min_tokens=min_tokens,
            begun=begun,
        )

    def close(self) -> None:
        """End the encoding thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
