"""A request understood: prompts as token ids, jobs for the serving side, and what the answer has to show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from kvyard.front.http.context import Context
from kvyard.front.http.errors import ApiError, invalid
from kvyard.front.http.requests import GenerationRequest
from kvyard.front.http.sampling import sampling_of, stops_of
from kvyard.front.service import Job
from kvyard.front.text.continuation import Continuation
from kvyard.link.messages import Sampling

DEFAULT_MAX_TOKENS: Final = 16
"""Of /v1/completions, as OpenAI has it; a chat without a limit gets all that remains of the window."""


MOST_SCORES: Final = 240_000
"""Log-probabilities, alternatives included, that one answer may have: about 64 bytes of JSON each, so that it stays
below 16 MB. Those of a prompt stand in each of its choices. Of a stream's output none are kept, nor counted."""
_HEAVY: Final = 2000
"""Log-probabilities whose JSON takes some milliseconds to make."""


@dataclass(slots=True)
class Prompt:
    """A prompt's ids, its text where it was given as one or is shown, and how many output tokens it may get."""

    ids: list[int]
    text: str | None
    room: int
    begun: bytes = b""
    """What stands behind the text that is shown, of a character that the output may complete."""


@dataclass(slots=True)
class Shown:
    """What an answer shows besides text."""

    logprobs: int | None = None
    """Alternatives per token; None shows no logprobs."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token, shown by token id."""
    echo: bool = False
    token_ids: bool = False
    hashes: bool = False
    stream: bool = False
    usage_chunk: bool = False
    usage_always: bool = False
    no_output: bool = False
    """The one token that was computed to score a prompt is not part of the answer."""

    @property
    def per_prompt_token(self) -> int:
        """Log-probabilities shown of each prompt token, its own and the alternatives."""
        by_id = 0 if self.prompt_logprobs is None else self.prompt_logprobs + 1
        echoed = self.logprobs + 1 if self.echo and self.logprobs is not None else 0
        return by_id + echoed


@dataclass(slots=True)
class Order:
    """All of it. Continuation `i` is number `i % n` of prompt `i // n`."""

    id: str
    created: int
    model: str
    prompts: list[Prompt]
    n: int
    keep: int
    """Choices per prompt that are shown: the best of `n`."""
    shown: Shown
    jobs: list[Job]
    """One a prompt; where no output is shown, its first continuation stands for all."""
    continuations: list[Continuation]

    @property
    def scored(self) -> bool:
        """The answer tells log-probabilities of the prompts."""
        return self.jobs[0].sampling.prompt_logprobs >= 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def heavy_prompt(self) -> bool:
        """What is said of the prompts takes long to encode."""
        return self.prompt_tokens * self.shown.per_prompt_token > _HEAVY

    @property
    def heavy(self) -> bool:
        """The answer so far takes long to encode."""
        shown = self.shown.logprobs
        output = 0 if shown is None else (shown + 1) * sum(each.count for each in self.continuations)
        return output > _HEAVY or self.heavy_prompt


def shown_of(request: GenerationRequest) -> Shown:
    """What both kinds of completion can show. Raises ApiError 400 for fields that contradict each other."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options: only allowed together with stream.", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: cannot be streamed.", "prompt_logprobs")
    include_usage = options is not None and bool(options.include_usage)
    return Shown(
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        hashes=bool(request.return_logits_hash),
        stream=bool(request.stream),
        usage_chunk=include_usage,
        usage_always=include_usage and options is not None and bool(options.continuous_usage_stats),
    )


def room_for(ids: list[int], max_tokens: int | None, default: int | None, limit: int, param: str) -> int:
    """Output tokens that a prompt may get. Raises ApiError 400 naming the window, the prompt and `max_tokens`."""
    length = len(ids)
    if length == 0:
        raise invalid(f"{param}: the prompt has no tokens; at least one is needed.", param, "empty_prompt")
    room = limit - length
    if room < 1 or (max_tokens is not None and max_tokens > room):
        wanted = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
        if max_tokens == 0:
            wanted = " and scoring it (max_tokens 0) computes one token more"
        raise ApiError(
            400,
            f"The model's window (max_model_len) is {limit} tokens; the prompt has {length}{wanted}. "
            "Shorten the prompt or ask for fewer tokens.",
            code="context_length_exceeded",
            param=param if room < 1 else "max_tokens",
        )
    if max_tokens is None:
        return room if default is None else min(default, room)
    return max(1, max_tokens)  # scores come with a token, which is then not shown


def refuse_hopeless(max_tokens: int | None, limit: int) -> None:
    """Raise ApiError 400 where no prompt at all fits beside `max_tokens`; to be told to come back would be wrong.

    A limit of 0 is an engine that is still starting.
    """
    if limit and max_tokens is not None and max_tokens >= limit:
        raise ApiError(
            400,
            f"The model's window (max_model_len) is {limit} tokens; the prompt needs at least one of them and "
            f"max_tokens is {max_tokens}. Ask for fewer tokens.",
            code="context_length_exceeded",
            param="max_tokens",
        )


def make_order(
    order_id: str,
    request: GenerationRequest,
    prompts: list[Prompt],
    n: int,
    keep: int,
    shown: Shown,
    context: Context,
) -> Order:
    """The order of a checked request. Raises ApiError 400 for what only now shows to be out of range."""
    _refuse_large_answer(prompts, n, shown)
    least_room = min(prompt.room for prompt in prompts)
    min_tokens = request.min_tokens or 0
    if min_tokens > least_room:
        raise invalid(f"min_tokens: {min_tokens} is more than the {least_room} tokens it may get.", "min_tokens")
    sampling = _sampling(request, keep < n, shown, context)
    stops, stop_ids = stops_of(request), frozenset(sampling.stop_token_ids)
    continuations = [
        context.text.continuation(
            stops,
            stop_ids=stop_ids,
            skip_special_tokens=request.skip_special_tokens is not False,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=min_tokens,
            begun=prompt.begun,
        )
        for prompt in prompts
        for _ in range(n)
    ]
    jobs = _jobs(order_id, request, prompts, 1 if shown.no_output else n, sampling, context)
    created = int(context.wall_clock())
    return Order(order_id, created, context.model_id, prompts, n, keep, shown, jobs, continuations)


def _refuse_large_answer(prompts: list[Prompt], n: int, shown: Shown) -> None:
    tokens, each = sum(len(prompt.ids) for prompt in prompts), shown.per_prompt_token
    of_prompts = tokens * each * n
    if of_prompts > MOST_SCORES:
        field = "logprobs" if shown.prompt_logprobs is None else "prompt_logprobs"
        raise invalid(
            f"{field}: {tokens} prompt tokens with {each} log-probabilities each (their own and the alternatives) in "
            f"{n} choices are {of_prompts}; {MOST_SCORES} is the most in one answer. Ask for fewer alternatives or "
            "choices, or divide the request.",
            field,
        )
    if shown.logprobs is None or shown.stream or shown.no_output:
        return
    tokens, each = sum(prompt.room for prompt in prompts), shown.logprobs + 1
    of_output = tokens * each * n
    if of_prompts + of_output > MOST_SCORES:
        with_them = f", with the {of_prompts} of the prompts {of_prompts + of_output}" if of_prompts else ""
        raise invalid(
            f"logprobs: up to {tokens} output tokens with {each} log-probabilities each (their own and the "
            f"alternatives) in {n} choices are {of_output}{with_them}; {MOST_SCORES} is the most in one answer. "
            "Lower max_tokens, ask for fewer alternatives or choices, or stream the answer.",
            "logprobs",
        )


def _sampling(request: GenerationRequest, ranked: bool, shown: Shown, context: Context) -> Sampling:
    logprobs = shown.logprobs
    of_prompt = [shown.prompt_logprobs, logprobs if shown.echo else None]
    prompt_logprobs = max((each for each in of_prompt if each is not None), default=-1)
    if logprobs is None and ranked:
        logprobs = 0  # choosing the best needs the chosen tokens' own
    return sampling_of(
        request,
        vocab_size=context.text.tokenizer.vocab_size,
        seed=request.seed or 0,
        logprobs=-1 if logprobs is None else logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _jobs(
    order_id: str, request: GenerationRequest, prompts: list[Prompt], n: int, sampling: Sampling, context: Context
) -> list[Job]:
    now = context.clock()
    deadline = None if request.deadline_ms is None else now + request.deadline_ms / 1000
    queue_timeout = None if request.queue_timeout_ms is None else request.queue_timeout_ms / 1000
    return [
        Job(
            request_id=order_id if len(prompts) == 1 else f"{order_id}-{at}",
            prompt=prompt.ids,
            max_new=prompt.room,
            sampling=sampling
            if request.seed is not None
            else msgspec.structs.replace(sampling, seed=context.entropy.getrandbits(63)),
            n=n,
            priority=request.priority or 0,
            tenant=request.user or "",
            deadline=deadline,
            queue_timeout=queue_timeout,
            cache_salt=request.cache_salt or "",
        )
        for at, prompt in enumerate(prompts)
    ]
