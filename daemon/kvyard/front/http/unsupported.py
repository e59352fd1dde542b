"""Fields of the OpenAI API and of vLLM's extensions that this server knows and does not implement.

Ignoring them would give an answer that only looks right, so they are refused, unless their value asks
for nothing (null, an empty list, the default).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvyard.front.http.errors import invalid


@dataclass(frozen=True, slots=True)
class Unsupported:
    """What is not there, in words, and the values that do not ask for it."""

    feature: str
    neutral: tuple[Any, ...] = (None,)

    def check(self, name: str, raw: bytes) -> None:
        """Raise ApiError 400 unless the value is neutral."""
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"{name}: {error}.", name, "invalid_json") from error
        if not any(value == calm and type(value) is type(calm) for calm in self.neutral):
            raise invalid(
                f"{name}: {self.feature} not supported by this server. Leave the field out.",
                name,
                "unsupported_parameter",
            )


_TOOLS: Final = "tools and function calls are"
_STRUCTURED: Final = "structured output is"

UNSUPPORTED: Final[Mapping[str, Unsupported]] = {
    "tools": Unsupported(_TOOLS, (None, [])),
    "tool_choice": Unsupported(_TOOLS, (None, "none")),
    "functions": Unsupported(_TOOLS, (None, [])),
    "function_call": Unsupported(_TOOLS, (None, "none")),
    "response_format": Unsupported(_STRUCTURED, (None, {"type": "text"})),
    "structured_outputs": Unsupported(_STRUCTURED, (None, {})),
    "guided_json": Unsupported(_STRUCTURED),
    "guided_regex": Unsupported(_STRUCTURED),
    "guided_choice": Unsupported(_STRUCTURED),
    "guided_grammar": Unsupported(_STRUCTURED),
    "guided_decoding_backend": Unsupported(_STRUCTURED),
    "guided_whitespace_pattern": Unsupported(_STRUCTURED),
    "audio": Unsupported("audio is"),
    "modalities": Unsupported("output other than text is", (None, [], ["text"])),
    "web_search_options": Unsupported("web search is"),
    "prediction": Unsupported("predicted output is"),
    "suffix": Unsupported("inserting text before a suffix is", (None, "")),
    "prompt_embeds": Unsupported("prompt embeddings are"),
    "use_beam_search": Unsupported("beam search is", (None, False)),
    "length_penalty": Unsupported("beam search is", (None, 1, 1.0)),
    "early_stopping": Unsupported("beam search is", (None, False)),
    "logits_processors": Unsupported("logits processors are", (None, [])),
    "allowed_token_ids": Unsupported("restricting output to a list of tokens is"),
    "bad_words": Unsupported("forbidding words is", (None, [])),
    "truncate_prompt_tokens": Unsupported("truncating prompts is"),
    "logprob_token_ids": Unsupported("choosing the tokens of logprobs is"),
    "return_tokens_as_token_ids": Unsupported("naming tokens by their ids is", (None, False)),
    "chat_template": Unsupported("a chat template of the request's own is"),
    "documents": Unsupported("documents for the chat template are", (None, [])),
    "mm_processor_kwargs": Unsupported("input other than text is", (None, {})),
    "best_of": Unsupported("choosing the best of several answers to a conversation is", (None, 1)),
    "echo": Unsupported("repeating a conversation in its answer is", (None, False)),
    "kv_transfer_params": Unsupported("transfer of KV between servers is", (None, {})),
}

HARMLESS: Final = frozenset(
    {
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)
"""Fields for the bookkeeping of OpenAI's own service: nothing depends on them here, so they need no log line."""
