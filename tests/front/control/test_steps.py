"""A step record as JSON."""

from __future__ import annotations

import json

import msgspec
from kvyard.front.control.steps import step_data
from kvyard.link.record import StepRecord

from tests.control.desk import record


def test_every_field_is_there_under_its_name() -> None:
    assert list(step_data(record())) == list(StepRecord.__struct_fields__)


def test_columns_become_lists_and_parts_become_objects() -> None:
    data = step_data(record(step=5, sequences=3))
    assert data["ids"] == [1, 2, 3]
    assert data["granted"] == [1, 2, 3]
    assert data["timings"]["model"] == 5_000_000
    assert data["preempted"] == [{"id": 9, "by": 1, "cause": "growth", "how": "recompute", "tokens": 40}]
    assert data["waits"][1] == {"id": 11, "reason": "slots", "wake": 99}
    assert data["policies"][0]["overrides"] == {"capacity": 1}
    assert data["admitted"] == [[1, 16]] or data["admitted"] == [(1, 16)]


def test_negative_ids_and_large_ones_survive() -> None:
    step = record()
    step.ids = (2**62).to_bytes(8, "little") + (-1).to_bytes(8, "little", signed=True)
    assert step_data(step)["ids"] == [2**62, -1]


def test_it_is_plain_json() -> None:
    data = step_data(record())
    assert json.loads(json.dumps(data)) == json.loads(msgspec.json.encode(data))
