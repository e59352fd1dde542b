"""Chat templates: a conversation to the prompt text that the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from kvyard.front.text.errors import ChatTemplateError, ModelTextError
from kvyard.front.text.tokenizer import special_token

_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON as it is; jinja's own filter would escape it for HTML."""
    text = msgspec.json.encode(value)
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


class ChatTemplate:
    """A model's chat template, rendered in a sandbox that cannot change what it is given."""

    def __init__(self, source: str, config: dict[str, Any], now: Callable[[], datetime] = datetime.now) -> None:
        """`config` is the content of tokenizer_config.json, `now` the clock of `strftime_now`.

        Raises ModelTextError when the template cannot be compiled.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._tokens = {name: special_token(config, name) for name in _TOKEN_NAMES}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelTextError(f"The model's chat template cannot be compiled: {error}") from error

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, object] | None = None) -> str:
        """The prompt of a conversation; `variables` are the template's own, `add_generation_prompt` among them.

        Raises ChatTemplateError with the template's own words when it refuses it.
        """
        given = {"add_generation_prompt": True, **(variables or {})}
        try:
            return self._template.render({**self._tokens, **given, "messages": messages})
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template refused the conversation: {error}") from error
        except Exception as error:
            # Whatever else template code raises over odd input (types, missing keys, recursion) is about that input.
            raise ChatTemplateError(
                f"The model's chat template cannot render the conversation: {type(error).__name__}: {error}"
            ) from error


def find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The source of a folder's chat template: its own file, else `chat_template` of the configuration."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    stated = config.get("chat_template")
    if isinstance(stated, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None
