"""Bodies of the API's answers."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

Finish = Literal["stop", "length"]


class PromptTokensDetails(Struct):
    """Of the prompt's tokens, how many were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of the whole request, all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """One alternative at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, by token id; None for the first, which nothing predicts."""


class CompletionLogprobs(Struct):
    """Per token: its text, its log-probability, the alternatives by text, and where its text starts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class EncodedLogprobs(Struct):
    """`CompletionLogprobs` whose lists are JSON already: those of a prompt are the same in each of its choices."""

    tokens: Raw
    token_logprobs: Raw
    top_logprobs: Raw
    text_offset: Raw


class CompletionChoice(Struct, kw_only=True):
    """A choice of a completion, whole or the part that a chunk adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    logits_hashes: list[str] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Answer of /v1/completions and, with parts of choices, chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Alternative(Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    """A token of a message with its alternatives, the best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    """Per token of the message."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct):
    """What the assistant says."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    """A choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    logits_hashes: list[str] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    """What a chunk adds to a message; the role only in the first."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Struct, kw_only=True):
    """The part of a choice that a chunk adds."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    logits_hashes: list[str] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """Chunk of a chat completion's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct, kw_only=True):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvyard"
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """Answer of /detokenize."""

    prompt: str


class Health(Struct):
    """Answer of /health: the front lives."""

    status: Literal["ok"] = "ok"


class Readiness(Struct):
    """Answer of /ready; `reason` says why not."""

    ready: bool
    reason: str


class Version(Struct):
    """Answer of /version."""

    version: str
