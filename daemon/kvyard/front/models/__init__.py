"""The model store: catalogue, download, lookup and inspection."""

from __future__ import annotations

from pathlib import Path

from kvyard.front.models.catalogue import CATALOGUE, DEFAULT, Entry
from kvyard.front.models.errors import BadModel, ModelError, ModelNotFound, PullError
from kvyard.front.models.progress import console_progress
from kvyard.front.models.store import Listed, ModelRef, ModelStore, default_folder
from kvyard.front.models.wheels import Progress

__all__ = [
    "CATALOGUE",
    "DEFAULT",
    "BadModel",
    "Entry",
    "Listed",
    "ModelError",
    "ModelNotFound",
    "ModelRef",
    "ModelStore",
    "Progress",
    "PullError",
    "console_progress",
    "default_folder",
    "resolve_or_pull",
]


def resolve_or_pull(name: str, folder: Path | None = None) -> ModelRef:
    """The model behind a name or path; one of the catalogue is pulled if missing, with progress on stderr.

    Raises ModelError.
    """
    store = ModelStore(folder)
    entry = store.catalogue.get(name)
    if entry is None or store.is_pulled(entry):
        return store.resolve(name)
    with console_progress(name) as progress:
        return store.pull(name, progress)
