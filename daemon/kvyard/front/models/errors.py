"""What can go wrong with a model's files, for people."""

from __future__ import annotations


class ModelError(Exception):
    """What happened (`message`) and what to do (`hint`)."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ModelNotFound(ModelError):
    """There is no such model here."""


class PullError(ModelError):
    """A model could not be pulled."""


class BadModel(ModelError):
    """The files are not what their names say."""
