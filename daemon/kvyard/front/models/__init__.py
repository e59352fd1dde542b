"""The model store: catalogue, download, lookup and inspection."""

from kvyard.front.models.catalogue import CATALOGUE, DEFAULT, Entry
from kvyard.front.models.store import Listed, ModelNotFound, ModelRef, ModelStore, default_folder
from kvyard.front.models.wheels import Progress, PullError

__all__ = [
    "CATALOGUE",
    "DEFAULT",
    "Entry",
    "Listed",
    "ModelNotFound",
    "ModelRef",
    "ModelStore",
    "Progress",
    "PullError",
    "default_folder",
]
