"""A step record as the JSON object of a `steps` event."""

from __future__ import annotations

import array
import sys
from typing import Any

import msgspec

from kvyard.link.record import PolicyCost, Preemption, StepRecord, Timings, Wait


def _fields(item: Timings | Preemption | Wait | PolicyCost) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


def _integers(code: str, data: bytes) -> list[int]:
    numbers = array.array(code, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def step_data(record: StepRecord) -> dict[str, Any]:
    """Field names as in StepRecord; `ids` and `granted` as lists, `admitted`, `resident` and `finished` as pairs."""
    data = {name: getattr(record, name) for name in record.__struct_fields__}
    data["timings"] = _fields(record.timings)
    data["ids"] = _integers("q", record.ids)
    data["granted"] = _integers("i", record.granted)
    for name in ("preempted", "waits", "policies"):
        data[name] = [_fields(item) for item in getattr(record, name)]
    return {name: msgspec.to_builtins(value) for name, value in data.items()}
