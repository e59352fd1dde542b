"""Fresh module generations: a plugin's new version is loaded into the running daemon, beside the old one.

Every load of a third-party policy imports its top-level package anew. The modules of the generation before
leave `sys.modules`, but live on for as long as an object of them does, so a policy in charge and its
successor can be of different versions. If the import fails, everything is as before.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

OURS = frozenset({"kvyard", "kvyard_policies", "kvyard_kernels", "kvyard_tui"})
"""Packages of this distribution: they change with the daemon, never under it."""


def import_generation(module: str) -> ModuleType:
    """Import `module` and the rest of its top-level package anew. Raises whatever the import raises."""
    top = module.partition(".")[0]
    importlib.invalidate_caches()
    # What is part of the interpreter or already serves the daemon is shared, not a plugin to be replaced.
    if top in OURS or top in sys.stdlib_module_names:
        return importlib.import_module(module)
    before = _members(top)
    for name in before:
        del sys.modules[name]
    try:
        return importlib.import_module(module)
    except BaseException:
        for name in _members(top):
            del sys.modules[name]
        sys.modules.update(before)
        raise


def _members(top: str) -> dict[str, ModuleType]:
    """Imported modules of a top-level package."""
    prefix = f"{top}."
    return {name: found for name, found in list(sys.modules.items()) if name == top or name.startswith(prefix)}
