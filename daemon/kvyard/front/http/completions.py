"""POST /v1/completions: from the body to an order, and from pieces to choices."""

from __future__ import annotations

from typing import Final, cast

import msgspec
from msgspec import UNSET

from kvyard.front.http.answers import Completion, CompletionChoice, CompletionLogprobs, EncodedLogprobs, Usage
from kvyard.front.http.context import Context
from kvyard.front.http.errors import invalid
from kvyard.front.http.logprobs import LogprobFormat
from kvyard.front.http.order import (
    DEFAULT_MAX_TOKENS,
    Order,
    Prompt,
    Shown,
    make_order,
    refuse_hopeless,
    room_for,
    shown_of,
)
from kvyard.front.http.requests import MOST_PROMPTS, CompletionRequest
from kvyard.front.text.continuation import Piece
from kvyard.front.text.tokenizer import Tokenizer
from kvyard.link.messages import TokenLogprobs

_ENCODER: Final = msgspec.json.Encoder()

Given = list[str] | list[list[int]]
"""Prompts as texts or as token ids."""


async def understand(request: CompletionRequest, order_id: str, context: Context) -> Order:
    """The order of a request. Raises ApiError."""
    context.check_model(request.model)
    shown = shown_of(request)
    shown.logprobs = request.logprobs
    shown.echo = bool(request.echo)
    keep = request.n or 1
    n = _candidates(request, keep)
    max_tokens = request.max_tokens
    if max_tokens == 0:
        if not shown.echo:
            raise invalid("max_tokens: 0 is allowed only together with echo.", "max_tokens")
        if request.min_tokens:
            raise invalid(f"min_tokens: {request.min_tokens} is more than the 0 tokens of max_tokens.", "min_tokens")
        shown.no_output = True
    given = prompts_of(request.prompt)
    _refuse_hopeless(given, max_tokens, context.service.max_model_len)
    context.take_place(order_id, len(given) * (1 if shown.no_output else n))
    prompts = [await _prompt(each, request, max_tokens, context) for each in given]
    return make_order(order_id, request, prompts, n, keep, shown, context)


def prompts_of(prompt: str | list[str | int | list[int]]) -> Given:
    """Prompts as a list, all of one kind. Raises ApiError 400 for a mixture or nothing."""
    if isinstance(prompt, str):
        return [prompt]
    if len(prompt) > MOST_PROMPTS and not isinstance(prompt[0], int):
        raise invalid(f"prompt: {len(prompt)} prompts; {MOST_PROMPTS} is the most in one request.", "prompt")
    kinds = set(map(type, prompt))  # one quick pass: there may be millions of ids
    if kinds == {int}:
        return cast("list[list[int]]", [prompt])
    if len(kinds) == 1:
        return cast(Given, prompt)
    raise invalid("prompt: texts, token ids and lists of token ids cannot be mixed.", "prompt", "invalid_type")


def _refuse_hopeless(given: Given, max_tokens: int | None, limit: int) -> None:
    """Raise ApiError 400 for what can never fit, as far as it is known before a place is taken and text tokenized."""
    refuse_hopeless(max_tokens, limit)
    for each in given:
        if limit and not isinstance(each, str):
            room_for(each, max_tokens, DEFAULT_MAX_TOKENS, limit, "prompt")


def _candidates(request: CompletionRequest, keep: int) -> int:
    best_of = request.best_of or keep
    if best_of < keep:
        raise invalid(f"best_of: {best_of} is less than n, which is {keep}.", "best_of")
    if best_of > keep and request.stream:
        raise invalid("best_of: the best can only be chosen at the end, so it cannot be streamed.", "best_of")
    return best_of


async def _prompt(
    given: str | list[int], request: CompletionRequest, max_tokens: int | None, context: Context
) -> Prompt:
    if isinstance(given, str):
        text, ids = (
            given,
            await context.encode(given, "prompt", add_special_tokens=request.add_special_tokens is not False),
        )
    else:
        text, ids = None, given
    room = room_for(ids, max_tokens, DEFAULT_MAX_TOKENS, context.service.max_model_len, "prompt")
    context.check_ids(ids, "prompt")
    begun = b""
    if text is None and request.echo:
        tokenizer = context.text.tokenizer
        text, begun = (tokenizer.decode(ids), b"") if max_tokens == 0 else tokenizer.decode_so_far(ids)
    return Prompt(ids, text, room, begun)


class CompletionFormat:
    """Answers of one order."""

    def __init__(self, order: Order, tokenizer: Tokenizer) -> None:
        self._order = order
        self._logprobs = LogprobFormat(tokenizer)
        self._begun: set[int] = set()
        self._scores: dict[int, msgspec.Raw] = {}
        """JSON of the log-probabilities of each prompt, made once for all its choices."""
        self._scored_echoes: dict[int, EncodedLogprobs] = {}

    def chunk(self, at: int, piece: Piece, usage: Usage | None) -> bytes:
        """JSON of the chunk that adds `piece` to continuation `at`."""
        choice = self._choice(at, at, piece, first=at not in self._begun)
        self._begun.add(at)
        return self._envelope([choice], usage if self._order.shown.usage_chunk else UNSET)

    def opening(self, at: int) -> bytes | None:
        """A completion's stream needs no chunk before the first text."""
        return None

    def usage_chunk(self, usage: Usage) -> bytes:
        """JSON of the last chunk, with the usage and no choices."""
        return self._envelope([], usage)

    def whole(self, chosen: list[tuple[int, Piece]], usage: Usage) -> bytes:
        """JSON of the whole answer: continuations in the order of their index."""
        choices = [self._choice(index, at, piece, first=True) for index, (at, piece) in enumerate(chosen)]
        return self._envelope(choices, usage)

    def _envelope(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        order = self._order
        return _ENCODER.encode(
            Completion(id=order.id, created=order.created, model=order.model, choices=choices, usage=usage)
        )

    def _choice(self, index: int, at: int, piece: Piece, *, first: bool) -> CompletionChoice:
        order, shown = self._order, self._order.shown
        if shown.no_output:
            piece = Piece(finish="length" if piece.finish else None)
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=None if shown.logprobs is None else self._logprobs.completion(piece, shown.logprobs),
            finish_reason=piece.finish,  # type: ignore[arg-type] # errors and cancellations never get here
            stop_reason=piece.stop_reason,
        )
        if shown.token_ids:
            choice.token_ids = piece.tokens
        if shown.hashes:
            choice.logits_hashes = [f"{digest:016x}" for digest in piece.hashes]
        if shown.echo and choice.logprobs is not None:
            before = len(self._prompt_text(at // order.n))
            choice.logprobs.text_offset = [before + offset for offset in choice.logprobs.text_offset]
        if first:
            self._add_prompt(choice, at // order.n, order.continuations[at].prompt_logprobs, shown)
        return choice

    def _prompt_text(self, number: int) -> str:
        """The text that an echo shows: as it was given, or decoded."""
        return self._order.prompts[number].text or ""

    def _add_prompt(
        self, choice: CompletionChoice, number: int, entries: list[TokenLogprobs | None] | None, shown: Shown
    ) -> None:
        """What an answer says of the prompt stands in a choice's first part."""
        prompt = self._order.prompts[number]
        if shown.token_ids:
            choice.prompt_token_ids = prompt.ids
        if shown.prompt_logprobs is not None and entries is not None:
            if number not in self._scores:
                scores = self._logprobs.prompt(entries, shown.prompt_logprobs)
                self._scores[number] = msgspec.Raw(_ENCODER.encode(scores))
            choice.prompt_logprobs = self._scores[number]  # type: ignore[assignment] # encoded already
        if not shown.echo:
            return
        text = self._prompt_text(number)
        choice.text = text + choice.text
        if choice.logprobs is not None and shown.logprobs is not None:
            if number not in self._scored_echoes:
                scored: list[TokenLogprobs | None] = [None] * len(prompt.ids) if entries is None else entries
                echoed = self._logprobs.echoed(prompt.ids, scored, shown.logprobs, text)
                self._scored_echoes[number] = _encoded(echoed)
            joined = _joined(self._scored_echoes[number], _encoded(choice.logprobs))
            choice.logprobs = joined  # type: ignore[assignment] # encoded already


def _encoded(lists: CompletionLogprobs) -> EncodedLogprobs:
    each = (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)
    return EncodedLogprobs(*(msgspec.Raw(_ENCODER.encode(values)) for values in each))


def _joined(prompt: EncodedLogprobs, output: EncodedLogprobs) -> EncodedLogprobs:
    return EncodedLogprobs(
        _chained(prompt.tokens, output.tokens),
        _chained(prompt.token_logprobs, output.token_logprobs),
        _chained(prompt.top_logprobs, output.top_logprobs),
        _chained(prompt.text_offset, output.text_offset),
    )


def _chained(first: msgspec.Raw, second: msgspec.Raw) -> msgspec.Raw:
    """One JSON array of the items of two."""
    items = [inner for each in (first, second) if (inner := bytes(each)[1:-1])]
    return msgspec.Raw(b"[%s]" % b",".join(items))
