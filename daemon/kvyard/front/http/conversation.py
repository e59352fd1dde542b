"""Conversations: messages of a request to the prompt text of the model's chat template."""

from __future__ import annotations

from typing import Any, Protocol

from kvyard.front.http.context import Context
from kvyard.front.http.errors import invalid
from kvyard.front.http.requests import ContentPart, Message


class HasConversation(Protocol):
    """The fields that say what a chat template is applied to, and how."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


async def prompt_text(request: HasConversation, messages: list[Message], context: Context) -> str:
    """The prompt of a conversation. Raises ApiError 400."""
    plain = [_plain(message, at) for at, message in enumerate(messages)]
    variables = request.chat_template_kwargs or {}
    if "messages" in variables or "add_generation_prompt" in variables:
        raise invalid("chat_template_kwargs: messages are given by the request itself.", "chat_template_kwargs")
    go_on = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    if go_on and add_generation_prompt:
        raise invalid(
            "continue_final_message: cannot be combined with add_generation_prompt.", "continue_final_message"
        )
    if add_generation_prompt is None:
        add_generation_prompt = not go_on
    text = await context.render_chat(plain, {**variables, "add_generation_prompt": add_generation_prompt})
    return _open_end(text, str(plain[-1]["content"])) if go_on else text


def _open_end(text: str, last: str) -> str:
    """The text up to the end of the last message's content, so that the model goes on with it."""
    at = text.rfind(last.strip())
    if at < 0:
        raise invalid(
            "continue_final_message: the chat template does not show the last message as it is.",
            "continue_final_message",
        )
    return text[: at + len(last.strip())]


def _plain(message: Message, at: int) -> dict[str, object]:
    if message.tool_calls:
        raise invalid(
            f"messages[{at}].tool_calls: tools and function calls are not supported by this server.",
            f"messages[{at}].tool_calls",
            "unsupported_parameter",
        )
    if not message.content and not isinstance(message.content, str) and message.role != "assistant":
        where = f"messages[{at}].content"
        raise invalid(f"{where} is missing; a message says something.", where, "missing_required_parameter")
    plain: dict[str, object] = {"role": message.role, "content": _text(message.content, at)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(content: str | list[ContentPart] | None, at: int) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content or []):
        where = f"messages[{at}].content[{i}]"
        if part.type != "text":
            raise invalid(
                f"{where}: parts of type {part.type[:40]!r} are not supported by this server; text is.",
                where,
                "unsupported_parameter",
            )
        if part.text is None:
            raise invalid(f"{where}.text: a text part needs its text.", f"{where}.text")
        texts.append(part.text)
    return "\n".join(texts)
