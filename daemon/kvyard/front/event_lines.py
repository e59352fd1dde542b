"""Events as lines of the daemon's own log, for whoever reads it after the daemon is gone."""

from __future__ import annotations

from typing import Final

import structlog

from kvyard.control.schema import Event

log = structlog.get_logger(__name__)

OWN_LINES: Final = frozenset({"control", "restart", "reload"})
"""Kinds that are logged where they happen, with more than the event has."""
LEFT_OUT: Final = frozenset({"number", "kind", "snapshot", "dump"})
_HEADING: Final = "Traceback (most recent call last):\n"


def write_event(event: Event) -> None:
    """Log an event with its plain values; an exit record with where its policy failed."""
    kind = str(event.data["kind"])
    if kind in OWN_LINES:
        return
    plain = (str, int, float)
    data = {name: v for name, v in event.data.items() if name not in LEFT_OUT and isinstance(v, plain) and v != ""}
    if "traceback" in data:
        # A traceback of the daemon itself is a defect, and is looked for by its heading.
        data["traceback"] = str(data["traceback"]).replace(_HEADING, "")
    if kind == "ejected":
        log.error("policy.ejected", **data)
    elif kind == "error":
        log.error("event.error", **data)
    elif data.get("left"):
        log.warning(f"event.{kind}", **data)
    else:
        log.info(f"event.{kind}", **data)
