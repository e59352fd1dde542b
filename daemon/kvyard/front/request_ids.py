"""Which request an operator means: by its whole id, the beginning of it, or the number that `kvyard top` shows."""

from __future__ import annotations

from collections.abc import Iterable

from kvyard.front.operations import OperationError

LEAST_PREFIX = 8
"""Fewer signs name nothing: all ids of an endpoint begin alike."""
SHOWN = 5


def find_request(text: str, known: Iterable[tuple[int, str]]) -> str | None:
    """The id of the request that `text` means among `known` (numbers and ids), None when there is none.

    A whole id comes first, then a number, then a beginning. A screen's sign for a cut is passed over. Raises
    OperationError when several requests begin like that, or when it is too little of one.
    """
    ids = dict(known)
    wanted = text.strip().removesuffix("…")
    names = dict.fromkeys(ids.values())
    if wanted in names:
        return wanted
    if wanted.isdecimal() and wanted.isascii() and len(wanted) < LEAST_PREFIX * 2 and int(wanted) in ids:
        return ids[int(wanted)]
    found = [name for name in names if name.startswith(wanted)] if wanted else []
    if found and len(wanted) < LEAST_PREFIX:
        raise OperationError(
            "ambiguous",
            f"{wanted!r} is too little of an id to name a request",
            f"give at least {LEAST_PREFIX} signs of its beginning, or the number in the first column of `kvyard top`",
        )
    if len(found) > 1:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise OperationError(
            "ambiguous",
            f"{len(found)} requests have an id that begins with {wanted!r}: {', '.join(found[:SHOWN])}{more}",
            "give more of the id, or the number in the first column of `kvyard top`",
        )
    return found[0] if found else None
