"""README.md: its commands are there, and every page is linked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_page_is_linked_and_every_link_is_there() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)\)", PAGE))
    assert pages - linked == set()
    assert [link for link in sorted(linked) if not (ROOT / link).is_file()] == []


def test_every_target_it_names_is_in_the_makefile_and_its_help() -> None:
    named = set(re.findall(r"`?make ([a-z-]+)", PAGE)) - {"an"}
    assert {"serve", "test", "venv", "install"} <= named
    for target in named:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        assert f'"make {target} ' in MAKEFILE, f"make help does not tell of {target}"


@pytest.mark.parametrize(("target", "installs"), [("venv", False), ("install", True)])
def test_an_environment_alone_has_nothing_installed_in_it(tmp_path: Path, target: str, installs: bool) -> None:
    words = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m venv" in done.stdout
    assert ("--editable" in done.stdout) == installs
