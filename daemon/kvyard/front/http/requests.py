"""Bodies of the API's requests. Null means the same as leaving the field out, for every optional field.

The ranges are those of vLLM where OpenAI's are narrower. Defaults are applied where a field is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

Temperature = Annotated[float, Meta(ge=0.0, description="0, and anything under 1e-5, is greedy.")]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=1000.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TopK = Annotated[int, Meta(ge=-1, description="0 and -1 are off; more than the vocabulary is off, too.")]
Choices = Annotated[int, Meta(ge=1, le=128)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
MaxTokens = Annotated[int, Meta(ge=1)]
MaxTokensOrNone = Annotated[int, Meta(ge=0, description="0 is allowed together with `echo`, to score a prompt.")]
Natural = Annotated[int, Meta(ge=0)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="Lower is more urgent.")]
StopString = Annotated[str, Meta(max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=64)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$", description="A token id.")]
PromptText = Annotated[str, Meta(min_length=1)]
PromptIds = Annotated[list[TokenId], Meta(min_length=1)]
ShortText = Annotated[str, Meta(max_length=256)]


class StreamOptions(Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    """A last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk; needs `include_usage`."""


class GenerationRequest(Struct, kw_only=True):
    """What both kinds of completion have in common."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=1024)] | None = None
    seed: Seed | None = None
    user: ShortText | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_logits_hash: bool | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None
    deadline_ms: Milliseconds | None = None
    queue_timeout_ms: Milliseconds | None = None


MOST_PROMPTS: Final = 2048
"""In one request; each is at least one sequence."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    most_items: ClassVar[Mapping[str, int]] = {"prompt": MOST_PROMPTS}
    """Texts or lists in a field; told before they are made, which would take seconds for a million."""

    prompt: PromptText | Annotated[list[PromptText | TokenId | PromptIds], Meta(min_length=1)]
    max_tokens: MaxTokensOrNone | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


class ContentPart(Struct):
    """A part of a message's content; text alone is supported."""

    type: str
    text: str | None = None


class Message(Struct):
    """One turn of a conversation. Which roles there are, and in what order, is up to the model's template."""

    role: ShortText
    content: str | list[ContentPart] | None = None
    name: ShortText | None = None
    tool_calls: list[Any] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
