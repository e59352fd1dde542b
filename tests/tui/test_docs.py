"""docs/tui.md lists exactly the keys that are bound."""

from __future__ import annotations

import re
from pathlib import Path

from kvyard.policy.base import KINDS
from kvyard.sim import disciplines
from kvyard_tui.fmt import value
from kvyard_tui.screen import MainScreen
from textual.binding import Binding

PAGE = Path(__file__).parents[2] / "docs" / "tui.md"
NAMES = {"question_mark": "?", "slash": "/", "colon": ":"}


def test_the_key_table_is_the_bindings() -> None:
    table = PAGE.read_text().partition("<!-- table: keys -->")[2].partition("<!-- end -->")[0]
    written = re.findall(r"^\| `(.+?)` \| (.+?) \|$", table, re.MULTILINE)
    bound = [one for one in MainScreen.BINDINGS if isinstance(one, Binding)]
    assert written == [(NAMES.get(one.key, one.key.partition(",")[0]), one.tooltip) for one in bound]


def test_every_key_has_an_id_and_says_what_it_does() -> None:
    bound = [one for one in MainScreen.BINDINGS if isinstance(one, Binding)]
    assert all(one.id and one.tooltip and one.description for one in bound)
    assert len({one.id for one in bound}) == len(bound)


def test_the_picture_shows_policies_that_are_installed_with_their_parameters() -> None:
    page = PAGE.read_text()
    named = re.search(r"^Policies (\S+), generation", page, re.MULTILINE)
    assert named is not None
    policies = disciplines.make(named[1])
    for kind in KINDS:
        shown = re.search(rf"^{kind} +(\S+)  (\S+=.*?) +\d", page, re.MULTILINE)
        assert shown is not None, kind
        assert shown[1] == policies.names[kind]
        values = getattr(policies, kind).params.values()
        whole = " ".join(f"{name}={value(item)}" for name, item in values.items())
        assert whole.startswith(shown[2].removesuffix("…"))
