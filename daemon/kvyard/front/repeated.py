"""Names that come twice in one JSON object, of which decoders take the last without a word."""

from __future__ import annotations

import json
import re
from typing import Final

_KEY: Final = re.compile(rb'"(?:([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t\r\n]*+:|[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
"""Every string of a JSON text, from its first quote to its last; group 1 is the text of those that are names."""


class _Found(Exception):
    """A name came twice."""


def repeated_name(text: bytes) -> str | None:
    """The first name found twice in one object, at any depth and however it is spelt, or None.

    `text` is known to be JSON. Raises ValueError or RecursionError for what Python's own decoder cannot read.
    """
    # Only a text in which some name comes twice, perhaps in two objects or as a value, is parsed.
    seen: set[bytes] = set()
    for found in _KEY.finditer(text):
        name = found[1]
        if name is None:
            continue
        if name in seen or b"\\" in name:  # an escape may spell a name anew
            break
        seen.add(name)
    else:
        return None
    try:
        json.loads(text, object_pairs_hook=_once)
    except _Found as found_twice:
        return str(found_twice)
    return None


def _once(pairs: list[tuple[str, object]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise _Found(name)
        names.add(name)
