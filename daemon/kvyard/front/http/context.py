"""What the endpoints share: the serving side, the model's text side, clocks and randomness."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvyard.front.http.errors import ApiError, from_refusal, invalid
from kvyard.front.service import Refusal, Service
from kvyard.front.text.errors import ChatTemplateError
from kvyard.front.text.support import PromptTooLong, TextSupport


@dataclass(frozen=True, slots=True)
class Context:
    """Surroundings of a request."""

    service: Service
    text: TextSupport
    model_id: str
    clock: Callable[[], float]
    """CLOCK_MONOTONIC seconds."""
    wall_clock: Callable[[], float]
    """Seconds since the epoch."""
    entropy: random.Random
    """Source of ids and of the seeds of requests without one."""
    _ahead: dict[str, int] = field(default_factory=dict)
    """Sequences of requests that have their place and are not submitted yet."""

    def new_id(self, prefix: str) -> str:
        """An id that no other request has or had."""
        return f"{prefix}-{self.entropy.getrandbits(128):032x}"

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served; no name means the served one."""
        if name is not None and name != self.model_id:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {self.model_id!r} is.",
                code="model_not_found",
                param="model",
            )

    def take_place(self, order_id: str, sequences: int) -> None:
        """Keep a place for that many sequences until `leave_place`. Raises ApiError 429 or 503 where there is none.

        To be called before any tokenising, so that a burst is turned away while it still costs nothing.
        """
        try:
            self.service.check_room(sequences, sum(self._ahead.values()))
        except Refusal as refusal:
            raise from_refusal(refusal) from refusal
        self._ahead[order_id] = sequences

    def leave_place(self, order_id: str) -> None:
        """The request was submitted, or has failed. Safe where no place was taken."""
        self._ahead.pop(order_id, None)

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise ApiError 400 unless all ids are the model's."""
        vocab_size = self.text.tokenizer.vocab_size
        if ids and max(ids) >= vocab_size:
            raise invalid(f"{param}: {max(ids)} is no token id; the model has the ids 0 to {vocab_size - 1}.", param)

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises ApiError 400 when it cannot fit the model's window."""
        limit = self.service.max_model_len
        try:
            return await self.text.encode(text, limit=limit, add_special_tokens=add_special_tokens)
        except PromptTooLong as error:
            raise ApiError(
                400,
                f"The model's window (max_model_len) is {limit} tokens and the prompt, {len(text)} characters long, "
                f"has at least {error.least}. Shorten the prompt.",
                code="context_length_exceeded",
                param=param,
            ) from error

    async def render_chat(self, messages: list[dict[str, object]], variables: Mapping[str, object]) -> str:
        """The prompt text of a conversation. Raises ApiError 400 with the template's own words."""
        try:
            return await self.text.render_chat(messages, variables)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages", "chat_template") from error
