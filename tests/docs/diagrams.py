"""Diagrams of docs/architecture.md, made from the state tables: `python -m tests.docs.diagrams`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvyard.core import lifecycle, swap
from kvyard.front import engine_states

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PLACE = re.compile(r"<!-- diagrams -->.*<!-- /diagrams -->", re.DOTALL)


def diagram(title: str, source: str, edges: Iterable[tuple[str, str, str]]) -> str:
    """One Mermaid state diagram; edges are (from, to, event)."""
    lines = [f"### {title}", "", f"`{source}`", "", "```mermaid", "stateDiagram-v2"]
    lines += [f"    {start} --> {end}{': ' + event if event else ''}" for start, end, event in edges]
    return "\n".join([*lines, "```"])


def diagrams() -> str:
    """All of them, as they stand in the page."""
    parts = [
        diagram(
            "A sequence",
            "core/lifecycle.py",
            ((start.value, end.value, event.value) for (start, event), end in lifecycle.TRANSITIONS.items()),
        ),
        diagram(
            "A change of policies",
            "core/swap.py",
            (
                (start.value, end.value, "")
                for start, ends in swap.TRANSITIONS.items()
                for end in sorted(ends, key=lambda state: state.value)
            ),
        ),
        diagram(
            "The engine process",
            "front/engine_states.py",
            ((start.value, end.value, event.value) for (start, event), end in engine_states.TRANSITIONS.items()),
        ),
    ]
    body = "\n\n".join(parts)
    return f"<!-- diagrams -->\n{body}\n<!-- /diagrams -->"


def updated(page: str) -> str:
    """The page with its diagrams made anew."""
    return PLACE.sub(lambda match: diagrams(), page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
