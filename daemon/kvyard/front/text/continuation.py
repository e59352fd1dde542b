"""One continuation from deltas of tokens to text: decoding, stop strings, and what goes with each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from kvyard.front.service import Delta, FinishReason
from kvyard.front.text.detokenizer import Detokenizer
from kvyard.front.text.stops import StopScanner, StopStrings
from kvyard.front.text.tokenizer import Tokenizer
from kvyard.link.messages import TokenLogprobs


@dataclass(slots=True)
class Piece:
    """What a continuation gained since the last time it was asked. The lists are per token."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where each token's text starts, in characters of the continuation."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or the stop token id that ended it; None for the model's own end."""


class Continuation:
    """Turns deltas into pieces. After a stop string was found it takes nothing more."""

    __slots__ = (
        "_chars",
        "_detokenizer",
        "_eos_ids",
        "_include_stop",
        "_min_tokens",
        "_pending",
        "_scanner",
        "_stop_ids",
        "count",
        "error",
        "finish",
        "prompt_logprobs",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings,
        *,
        stop_ids: frozenset[int] = frozenset(),
        hidden: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
        begun: bytes = b"",
    ) -> None:
        """`stop_ids` are the ids that end it besides the model's own end ids; tokens in `hidden` leave no text.

        `begun` are the bytes of an incomplete character that it goes on with.
        """
        self._detokenizer = Detokenizer(tokenizer.token_bytes, hidden, begun)
        self._scanner: StopScanner | None = stops.scanner() if stops else None
        self._eos_ids = tokenizer.eos_ids
        self._stop_ids = stop_ids
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pending = Piece()
        self._chars = 0
        self.count = 0
        """Tokens taken so far."""
        self.finish: FinishReason | None = None
        self.error: tuple[str, str] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def unsent(self) -> int:
        """Tokens taken and not yet asked for."""
        return len(self._pending.tokens)

    def take(self) -> Piece:
        """What was gained since the last call."""
        piece, self._pending = self._pending, Piece()
        return piece

    def accept(self, delta: Delta) -> bool:
        """Take a delta; True when a stop string ended the continuation, which the engine does not know yet."""
        if self.finish is not None:
            return False
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        last = len(delta.tokens) - 1
        for at, (token, logprobs, digest) in enumerate(zip_longest(delta.tokens, delta.logprobs, delta.hashes)):
            if at > last:
                break
            self._note(token, logprobs, digest)
            if at == last and delta.finish == "stop" and self._ends_by(token):
                break
            if self._show(self._detokenizer.feed(token)):
                return True
        if delta.finish is not None:
            self._end(delta)
        return False

    def _note(self, token: int, logprobs: TokenLogprobs | None, digest: int | None) -> None:
        pending = self._pending
        pending.tokens.append(token)
        pending.offsets.append(self._chars + self._detokenizer.breaks(token))
        if logprobs is not None:
            pending.logprobs.append(logprobs)
        if digest is not None:
            pending.hashes.append(digest)
        self.count += 1

    def _ends_by(self, token: int) -> bool:
        """Whether `token`, the last one, is an end that is not to be seen."""
        if token in self._stop_ids:
            self._pending.stop_reason = token
        elif token not in self._eos_ids:
            return False
        return not self._include_stop

    def _show(self, text: str) -> bool:
        """Add text; True when a stop string ended the continuation in it."""
        self._chars += len(text)
        if self._scanner is None:
            self._pending.text += text
            return False
        shown, stop = self._scanner.feed(text, ends=self.count >= self._min_tokens)
        self._pending.text += shown
        if stop is None:
            return False
        if self._include_stop:
            self._pending.text += stop
        self._pending.stop_reason = stop
        self.finish = self._pending.finish = "stop"
        return True

    def _end(self, delta: Delta) -> None:
        """The engine ended it: nothing that was held back is lost."""
        if self._show(self._detokenizer.finish()):
            return
        if self._scanner is not None:
            self._pending.text += self._scanner.flush()
        self.finish = self._pending.finish = delta.finish
        self.error = delta.error
