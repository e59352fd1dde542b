"""The daemon's log: one form for its own lines and for those of its libraries."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog
from kvyard.logs import configure


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.basicConfig(handlers=handlers, level=level, force=True)


def speak() -> None:
    structlog.get_logger().info("own", number=1)
    logging.getLogger("asyncio").info("not said")
    logging.getLogger("uvicorn.error").error("theirs: %s", "x")
    try:
        raise LookupError("as it is")
    except LookupError:
        logging.getLogger("asyncio").exception("failed")


def test_every_line_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    speak()
    own, theirs, failed = map(json.loads, capfd.readouterr().err.splitlines())
    assert (own["event"], own["number"], own["level"]) == ("own", 1, "info")
    assert (theirs["event"], theirs["level"]) == ("theirs: x", "error")
    assert "LookupError: as it is" in failed["exception"]
    assert all("timestamp" in line for line in (own, theirs, failed))


@pytest.mark.parametrize(("level", "said"), [("info", 3), ("error", 2)])
def test_the_level_is_that_of_the_daemons_own_lines(
    capfd: pytest.CaptureFixture[str], level: Literal["info", "error"], said: int
) -> None:
    configure(level, "json")
    speak()
    assert len(capfd.readouterr().err.splitlines()) == said
