"""What can be wrong with the text side of a model or of a request."""

from __future__ import annotations


class ModelTextError(Exception):
    """The model's tokenizer or template cannot be used; the daemon cannot start with it. The text is for people."""


class ChatTemplateError(Exception):
    """The chat template refused the conversation, or there is none; the request cannot be served as it is."""
