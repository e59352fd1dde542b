"""One request over the control socket: `kvyard generate`."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from kvyard.front.http.requests import GenerationRequest
from kvyard.front.http.sampling import sampling_of
from kvyard.front.operations import GenerateCall, OperationError
from kvyard.front.service import Job, Refusal, Service
from kvyard.front.text.errors import ChatTemplateError
from kvyard.front.text.stops import StopStrings
from kvyard.front.text.support import PromptTooLong, TextSupport

DEFAULT_MAX_TOKENS: Final = 128
"""Or what the window still holds."""


async def run_one(service: Service, text: TextSupport, asked: GenerateCall) -> AsyncIterator[Mapping[str, Any]]:
    """Deltas (`text`, `token_ids`), then `finish_reason` and `usage`. Closing the iterator cancels the request."""
    if asked.chat and not isinstance(asked.prompt, str):
        raise OperationError("bad-params", "chat takes a text prompt")
    try:
        prompt = await _prompt(service, text, asked)
        generation = service.submit(_job(asked, prompt, service.max_model_len, text.tokenizer.vocab_size))
    except Refusal as refusal:
        raise OperationError(refusal.code, refusal.message) from None
    except PromptTooLong as error:
        raise OperationError("context_length_exceeded", f"{error}; the context is {service.max_model_len}") from None
    continuation = text.continuation(StopStrings(()))
    try:
        async for delta in generation:
            continuation.accept(delta)
            piece = continuation.take()
            yield {"text": piece.text, "token_ids": piece.tokens}
        if continuation.error is not None:
            raise OperationError(*continuation.error)
        yield {
            "finish_reason": continuation.finish,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": continuation.count,
                "total_tokens": len(prompt) + continuation.count,
            },
        }
    finally:
        generation.cancel()


async def _prompt(service: Service, text: TextSupport, asked: GenerateCall) -> list[int]:
    ids = await _ids(service, text, asked)
    most = text.tokenizer.vocab_size
    if any(not 0 <= token < most for token in ids):
        raise OperationError("bad-params", f"token ids are between 0 and {most - 1}")
    return ids


async def _ids(service: Service, text: TextSupport, asked: GenerateCall) -> list[int]:
    limit = max(service.max_model_len, 1)
    if not isinstance(asked.prompt, str):
        return asked.prompt
    if not asked.chat:
        return await text.encode(asked.prompt, limit=limit)
    try:
        rendered = await text.render_chat([{"role": "user", "content": asked.prompt}])
    except ChatTemplateError as error:
        raise OperationError("chat-template", str(error)) from None
    return await text.encode(rendered, limit=limit, add_special_tokens=False)


def _job(asked: GenerateCall, prompt: list[int], window: int, vocab_size: int) -> Job:
    request = GenerationRequest(temperature=asked.temperature)
    seed = asked.seed if asked.seed is not None else secrets.randbits(63)
    return Job(
        request_id=f"gen-{uuid.uuid4().hex}",
        prompt=prompt,
        max_new=asked.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, window - len(prompt))),
        sampling=sampling_of(request, vocab_size=vocab_size, seed=seed, logprobs=-1, prompt_logprobs=-1),
        priority=asked.priority or 0,
    )
