"""docs/api.md: no endpoint, field, bound or error code of the API is undocumented, and nothing else is documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvyard.front.http import errors, requests
from kvyard.front.http.app import ABSENT, create_app
from kvyard.front.http.authentication import OPEN
from kvyard.front.http.order import DEFAULT_MAX_TOKENS
from kvyard.front.http.protocol import ARRIVAL_S, KEEP_ALIVE_S, MOST_HEAD_BYTES
from kvyard.front.http.sampling import GREEDY_BELOW, HOTTEST
from kvyard.front.http.settings import HttpSettings
from kvyard.front.http.unsupported import HARMLESS, UNSUPPORTED
from kvyard.front.settings import Settings
from kvyard.front.text.support import TextSupport
from starlette.routing import Route

from tests.front.http.conftest import MODEL
from tests.front.http.scripted import ScriptedService

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
FRONT = ROOT / "daemon" / "kvyard" / "front"
COMMON = frozenset(requests.GenerationRequest.__struct_fields__)
SECTIONS: dict[str, list[type[msgspec.Struct]]] = {
    "Fields of both completions": [requests.GenerationRequest],
    "Fields of completions": [requests.CompletionRequest],
    "Fields of chat completions": [requests.ChatRequest],
    "Fields of tokenize and detokenize": [requests.TokenizeRequest, requests.DetokenizeRequest],
}


def section(title: str) -> str:
    """The text under a heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def rows(title: str) -> dict[str, str]:
    """Field to its row, without the fields' own column."""
    table: dict[str, str] = {}
    for line in section(title).splitlines():
        if line.startswith("| `"):
            head, rest = line[2:].split(" | ", 1)
            for name in re.findall(r"`(\w+)`", head):
                table[name] = rest
    return table


def fields(kind: type[msgspec.Struct], title: str) -> dict[str, msgspec.inspect.Field]:
    """A body's fields that its section has to name: those of both completions have a section of their own."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    own = title == "Fields of both completions"
    return {
        field.encode_name: field
        for field in info.fields
        if own or not issubclass(kind, requests.GenerationRequest) or field.encode_name not in COMMON
    }


def bounds(kind: Any) -> set[float]:  # noqa: ANN401 - a node of msgspec's type tree
    """Every bound that a type sets, its parts included; Structs apart."""
    if isinstance(kind, msgspec.inspect.StructType):
        return set()
    found = {getattr(kind, name, None) for name in ("ge", "le", "max_length")}
    parts = [
        *getattr(kind, "types", ()),
        *(getattr(kind, name, None) for name in ("type", "item_type", "key_type", "value_type")),
    ]
    return {float(bound) for bound in found if bound is not None}.union(*(bounds(part) for part in parts if part))


def spelt(bound: float) -> str:
    """A bound as the page writes it."""
    for power in (31, 63):
        for number, text in ((2**power - 1, f"2^{power}-1"), (-(2**power), f"-2^{power}")):
            if bound == float(number) and abs(bound) > 1e9:
                return text
    return str(int(bound)) if bound.is_integer() else f"{bound:g}"


@pytest.mark.parametrize("title", SECTIONS)
def test_every_field_is_documented_with_its_bounds_and_no_other_is(title: str) -> None:
    table = rows(title)
    known: set[str] = set()
    for kind in SECTIONS[title]:
        for name, field in fields(kind, title).items():
            known.add(name)
            assert name in table, f"{name} is undocumented"
            for bound in bounds(field.type):
                assert re.search(rf"(?<![\d.^]){re.escape(spelt(bound))}(?![\d^])", table[name]), (name, spelt(bound))
    assert set(table) == known


@pytest.mark.parametrize("kind", [requests.StreamOptions, requests.Message, requests.ContentPart])
def test_the_parts_of_fields_are_named(kind: type[msgspec.Struct]) -> None:
    for name in kind.__struct_fields__:
        assert f"`{name}`" in PAGE or f'"{name}":' in PAGE, name


def test_every_endpoint_is_documented_with_whether_it_needs_a_key(support: TextSupport) -> None:
    app = create_app(
        ScriptedService(lambda job, index: []), support, settings=HttpSettings(MODEL), render_metrics=lambda: b""
    )
    there = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.path not in ABSENT
        for method in route.methods or {"POST"}
        if method != "HEAD"
    }
    told = dict(re.findall(r"^\| `(?:GET|POST) ([^`]+)` \| (yes|no) \|", PAGE, re.MULTILINE))
    assert set(re.findall(r"^\| `(GET|POST) ([^`]+)` \|", PAGE, re.MULTILINE)) == there
    assert {path for path, needed in told.items() if needed == "no"} == OPEN
    for path in ABSENT:
        assert f"`{path}`" in section("Endpoints")


def test_what_is_refused_or_without_effect_is_listed() -> None:
    refused, _, ignored = section("What is refused").partition("bookkeeping")
    listed = set(re.findall(r"`(\w+)`", refused)) - {"unsupported_parameter"}
    assert listed == set(UNSUPPORTED)
    assert set(re.findall(r"`(\w+)`", ignored)) == HARMLESS


def test_every_error_code_is_documented() -> None:
    codes = set(errors._GENERATION_ERRORS) | {"not_found", "method_not_allowed", "internal_error"}
    for path in (FRONT / "http").glob("*.py"):
        codes |= set(re.findall(r'code="([a-z_]+)"', path.read_text()))
    codes |= set(re.findall(r'_refuse\(\s*\d+,\s*"([a-z_]+)"', (FRONT / "serving.py").read_text()))
    codes |= set(re.findall(r'Failed\([^"]+"([a-z_]+)"', (FRONT.parent / "engine" / "loop.py").read_text()))
    told = section("Errors")
    assert [code for code in sorted(codes) if f"`{code}`" not in told] == []


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    settings = HttpSettings(MODEL)
    assert f"at most {settings.max_body_bytes >> 20} MiB" in PAGE
    assert f"at most {MOST_HEAD_BYTES >> 10} KiB" in PAGE
    assert f"for {settings.stall_timeout_s:g} s while something waited" in PAGE
    assert f"after {ARRIVAL_S:g} s, one kept for the next after {KEEP_ALIVE_S} s" in PAGE
    kib = Settings.model_fields["client_buffer_kib"].default
    assert settings.most_unsent == kib << 10
    assert f"`client_buffer_kib` ({kib >> 10} MiB)" in PAGE
    assert (GREEDY_BELOW, HOTTEST) == (1e-5, 1e6)
    assert f"| {DEFAULT_MAX_TOKENS}, or what the window still holds |" in PAGE
