"""The protocol's table of methods is what the server does and what the documentation says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kvyard.control import schema
from kvyard.control.schema import METHODS
from kvyard.front.control.methods import HANDLERS, describe_protocol

DOCS = Path(__file__).parents[2] / "docs" / "control.md"


def test_every_method_has_a_handler_and_no_handler_is_unlisted() -> None:
    assert [method.name for method in METHODS] == list(HANDLERS)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_parameters_listed_are_those_taken(method: schema.Method) -> None:
    assert set(method.params) == set(HANDLERS[method.name].params.__struct_fields__)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_is_documented_with_role_and_parameters(method: schema.Method) -> None:
    head = f"| `{method.name}` | {method.role} |"
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(head)]
    assert len(rows) == 1, f"{method.name} has {len(rows)} rows in docs/control.md"
    for name in method.params:
        assert f"`{name}`" in rows[0], f"docs/control.md does not name {name} of {method.name}"


def test_the_schema_names_every_result_type() -> None:
    described = describe_protocol()
    text = msgspec.json.encode(described).decode()
    for name in ("Status", "RequestPage", "PolicyListing", "SwapResult", "Event", "Response", "Hello"):
        assert name in described["definitions"]
    assert described["protocol"] == schema.PROTOCOL
    assert [method["name"] for method in described["methods"]] == [method.name for method in METHODS]
    assert all(method["params_type"] in described["definitions"] for method in described["methods"])
    assert "waiting_by_reason" in text


def test_messages_survive_a_round_trip() -> None:
    messages: list[schema.Hello | schema.Response | schema.Event] = [
        schema.Hello(1, "0", "viewer", 5),
        schema.Response(3, {"a": None}),
        schema.Response(4, error=schema.ErrorBody("c", "m", "h")),
        schema.Event("status", 1.5, {"x": [1]}),
    ]
    decoder: msgspec.json.Decoder[schema.Hello | schema.Response | schema.Event] = msgspec.json.Decoder(
        schema.Hello | schema.Response | schema.Event
    )
    for message in messages:
        assert decoder.decode(msgspec.json.encode(message)) == message
