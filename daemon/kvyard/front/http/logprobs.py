"""Log-probabilities in the forms of OpenAI's two APIs and of vLLM's `prompt_logprobs`.

JSON knows no infinities, and clients' types no null here: what has no chance gets OpenAI's -9999.
"""

from __future__ import annotations

import math
from typing import Final

from kvyard.front.http.answers import (
    Alternative,
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from kvyard.front.text.continuation import Piece
from kvyard.front.text.detokenizer import Detokenizer
from kvyard.front.text.tokenizer import Tokenizer
from kvyard.link.messages import TokenLogprobs

IMPOSSIBLE: Final = -9999.0


def finite(value: float) -> float:
    """A log-probability that JSON can carry."""
    return value if math.isfinite(value) else IMPOSSIBLE


class LogprobFormat:
    """Formats log-probabilities with one model's token texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def completion(self, piece: Piece, wanted: int) -> CompletionLogprobs:
        """Of a piece of a completion; with `wanted` 0 no alternatives, not even the token itself."""
        entries = piece.logprobs
        return CompletionLogprobs(
            [self._tokenizer.token_text(entry.token) for entry in entries],
            [finite(entry.logprob) for entry in entries],
            [self._by_text(entry, wanted) for entry in entries],
            piece.offsets[: len(entries)],
        )

    def echoed(
        self, ids: list[int], entries: list[TokenLogprobs | None], wanted: int, text: str
    ) -> CompletionLogprobs:
        """Of an echoed prompt, whose first token has none."""
        return CompletionLogprobs(
            [self._tokenizer.token_text(token) for token in ids],
            [None if entry is None else finite(entry.logprob) for entry in entries],
            [None if entry is None else self._by_text(entry, wanted) for entry in entries],
            self._offsets(ids, text),
        )

    def chat(self, piece: Piece, wanted: int) -> ChatLogprobs:
        """Of a piece of a message."""
        return ChatLogprobs([self._chat_entry(entry, wanted) for entry in piece.logprobs])

    def prompt(self, entries: list[TokenLogprobs | None], wanted: int) -> PromptLogprobs:
        """Of a prompt by token id: the prompt's own token first, then the alternatives."""
        return [None if entry is None else self._by_id(entry, wanted) for entry in entries]

    def _by_text(self, entry: TokenLogprobs, wanted: int) -> dict[str, float]:
        named: dict[str, float] = {}
        if not wanted:
            return named
        chosen = self._tokenizer.token_text(entry.token)
        for token, logprob in entry.top[:wanted]:
            name = chosen if token == entry.token else self._name(token, {chosen, *named})
            named[name] = finite(logprob)
        named.setdefault(chosen, finite(entry.logprob))
        return named

    def _name(self, token: int, taken: set[str]) -> str:
        # Parts of characters all read U+FFFD, and a special token may read like plain text: each keeps its own entry.
        text = self._tokenizer.token_text(token)
        if text in taken:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(token))
        return f"token_id:{token}" if text in taken else text

    def _by_id(self, entry: TokenLogprobs, wanted: int) -> dict[str, PromptLogprob]:
        text = self._tokenizer.token_text
        own = PromptLogprob(finite(entry.logprob), entry.rank, text(entry.token))
        top = {
            str(token): PromptLogprob(finite(logprob), rank, text(token))
            for rank, (token, logprob) in enumerate(entry.top[:wanted], 1)
        }
        return {str(entry.token): own} | top

    def _chat_entry(self, entry: TokenLogprobs, wanted: int) -> ChatLogprob:
        own = self._alternative(entry.token, entry.logprob)
        top = [self._alternative(token, logprob) for token, logprob in entry.top[:wanted]]
        return ChatLogprob(own.token, own.logprob, own.bytes, top)

    def _alternative(self, token: int, logprob: float) -> Alternative:
        return Alternative(
            self._tokenizer.token_text(token), finite(logprob), list(self._tokenizer.token_bytes(token))
        )

    def _offsets(self, ids: list[int], text: str) -> list[int]:
        """Where each prompt token starts in the echoed text; a token that was put before it takes no room."""
        tokenizer = self._tokenizer
        detokenizer = Detokenizer(tokenizer.token_bytes)
        offsets: list[int] = []
        at = 0
        for token in ids:
            offsets.append(at + detokenizer.breaks(token))
            at += len(detokenizer.feed(token))
        added = max(at - len(text), 0)
        return [max(offset - added, 0) for offset in offsets]
