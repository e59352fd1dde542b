"""POST /v1/chat/completions: from the body to an order, and from pieces to choices."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from kvyard.front.http.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from kvyard.front.http.context import Context
from kvyard.front.http.conversation import prompt_text
from kvyard.front.http.errors import invalid
from kvyard.front.http.logprobs import LogprobFormat
from kvyard.front.http.order import Order, Prompt, make_order, refuse_hopeless, room_for, shown_of
from kvyard.front.http.requests import ChatRequest
from kvyard.front.text.continuation import Piece
from kvyard.front.text.tokenizer import Tokenizer

_ENCODER: Final = msgspec.json.Encoder()


async def understand(request: ChatRequest, order_id: str, context: Context) -> Order:
    """The order of a request. Raises ApiError."""
    context.check_model(request.model)
    shown = shown_of(request)
    if request.logprobs:
        shown.logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise invalid("top_logprobs: only allowed together with logprobs.", "top_logprobs")
    n = request.n or 1
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    refuse_hopeless(max_tokens, context.service.max_model_len)
    context.take_place(order_id, n)
    text = await prompt_text(request, request.messages, context)
    # The template writes the begin-of-text token itself where the model wants one.
    ids = await context.encode(text, "messages", add_special_tokens=bool(request.add_special_tokens))
    room = room_for(ids, max_tokens, None, context.service.max_model_len, "messages")
    context.check_ids(ids, "messages")
    return make_order(order_id, request, [Prompt(ids, text, room)], n, n, shown, context)


class ChatFormat:
    """Answers of one order."""

    def __init__(self, order: Order, tokenizer: Tokenizer) -> None:
        self._order = order
        self._logprobs = LogprobFormat(tokenizer)
        self._begun: set[int] = set()

    def opening(self, at: int) -> bytes | None:
        """JSON of the chunk that opens continuation `at` with its role, once."""
        if at in self._begun:
            return None
        first = not self._begun
        self._begun.add(at)
        choice = ChatChunkChoice(
            index=at, delta=ChatDelta(role="assistant", content=""), logprobs=None, finish_reason=None
        )
        chunk = self._chunk([choice], None)
        if first and self._order.shown.token_ids:
            chunk.prompt_token_ids = self._order.prompts[0].ids
        return _ENCODER.encode(chunk)

    def chunk(self, at: int, piece: Piece, usage: Usage | None) -> bytes:
        """JSON of the chunk that adds `piece` to continuation `at`."""
        choice = ChatChunkChoice(
            index=at,
            delta=ChatDelta(content=piece.text),
            logprobs=self._chat_logprobs(piece),
            finish_reason=piece.finish,  # type: ignore[arg-type] # errors and cancellations never get here
            stop_reason=piece.stop_reason,
        )
        self._extend(choice, piece)
        return _ENCODER.encode(self._chunk([choice], usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        """JSON of the last chunk, with the usage and no choices."""
        return _ENCODER.encode(self._chunk([], usage))

    def whole(self, chosen: list[tuple[int, Piece]], usage: Usage) -> bytes:
        """JSON of the whole answer: continuations in the order of their index."""
        order, shown = self._order, self._order.shown
        answer = ChatCompletion(
            id=order.id,
            created=order.created,
            model=order.model,
            choices=[self._choice(index, piece) for index, (_, piece) in enumerate(chosen)],
            usage=usage,
        )
        if shown.token_ids:
            answer.prompt_token_ids = order.prompts[0].ids
        entries = order.continuations[0].prompt_logprobs
        if shown.prompt_logprobs is not None and entries is not None:
            answer.prompt_logprobs = self._logprobs.prompt(entries, shown.prompt_logprobs)
        return _ENCODER.encode(answer)

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=ChatMessage(piece.text),
            logprobs=self._chat_logprobs(piece),
            finish_reason=piece.finish,  # type: ignore[arg-type] # errors and cancellations never get here
            stop_reason=piece.stop_reason,
        )
        self._extend(choice, piece)
        return choice

    def _extend(self, choice: ChatChoice | ChatChunkChoice, piece: Piece) -> None:
        if self._order.shown.token_ids:
            choice.token_ids = piece.tokens
        if self._order.shown.hashes:
            choice.logits_hashes = [f"{digest:016x}" for digest in piece.hashes]

    def _chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        wanted = self._order.shown.logprobs
        return None if wanted is None else self._logprobs.chat(piece, wanted)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        order = self._order
        return ChatChunk(
            id=order.id,
            created=order.created,
            model=order.model,
            choices=choices,
            usage=usage if order.shown.usage_chunk else UNSET,
        )
