"""docs/policies.md: nothing that comes with kvyard is undocumented, and every reason for an exit has a meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
from kvyard.policy import Kind
from kvyard.policy.faults import CODES
from kvyard.policy.registry import Installed, list_policies, load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text()
OWN = [item for item in list_policies().policies if item.distribution == "kvyard"]


@pytest.mark.parametrize("item", OWN, ids=lambda item: f"{item.kind}-{item.name}")
def test_every_policy_and_parameter_is_documented(item: Installed) -> None:
    assert item.doc, "a class without a docstring"
    assert f"`{item.name}`" in PAGE
    if item.kind == "discipline":
        return
    for row in load(cast(Kind, item.kind), item.name).policy.params.describe():
        assert re.search(rf"\| {item.kind} `{item.name}` \| `{row['name']}` \|", PAGE), row["name"]
        assert row["doc"], f"parameter {row['name']} says nothing of itself"
        assert row["change"] in ("live", "restart")


def codes_in(*folders: str) -> set[str]:
    """Codes that the source gives to faults."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / "daemon" / "kvyard" / folder).rglob("*.py"):
            text = path.read_text()
            found |= set(re.findall(r'(?:Nonsense|Breach)\(\s*"([a-z-]+)"', text))
            found |= set(re.findall(r'Fault\(\s*[^,"]+(?:"[^"]*"[^,"]+)*,\s*"([a-z-]+)"', text))
            found |= {
                code for pair in re.findall(r'code = "([a-z-]+)" if .* else "([a-z-]+)"', text) for code in pair
            }
    return found


def test_every_code_of_the_guard_has_its_meaning() -> None:
    found = codes_in("core", "engine")
    assert {"raised", "nonsense", "finished", "not-waiting", "stalled", "tampered", "timeout"} <= found
    assert found <= set(CODES), "undocumented codes"
    assert all(f"`{code}`" in PAGE for code in CODES)
