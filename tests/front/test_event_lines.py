"""Events in the daemon's own log: each once, with what a person reads afterwards."""

from __future__ import annotations

import pytest
from kvyard.front.event_lines import write_event
from kvyard.front.events import KINDS, EventLog
from structlog.testing import capture_logs


@pytest.fixture
def log() -> EventLog:
    found = EventLog()
    found.written = write_event
    return found


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"control", "restart", "reload", "ejected", "error"}))
def test_an_event_is_a_line(log: EventLog, kind: str) -> None:
    with capture_logs() as lines:
        log.add(kind, "it happened", pid=7, who="root", rows=[1, 2])
    assert lines == [
        {"event": f"event.{kind}", "log_level": "info", "message": "it happened", "pid": 7, "who": "root"}
    ]


@pytest.mark.parametrize("kind", ["control", "restart", "reload"])
def test_what_has_a_line_of_its_own_gets_no_second_one(log: EventLog, kind: str) -> None:
    with capture_logs() as lines:
        log.add(kind, "it happened")
    assert lines == []


def test_an_ejection_tells_where_the_policy_failed(log: EventLog) -> None:
    told = 'Traceback (most recent call last):\n  File "p.py", line 3, in rank\nValueError: no'
    with capture_logs() as lines:
        log.add(
            "ejected", "a/b was put out", policy="a/b", code="raised", traceback=told, snapshot="x" * 9999, dump={}
        )
    (line,) = lines
    assert (line["event"], line["log_level"], line["policy"], line["code"]) == (
        "policy.ejected",
        "error",
        "a/b",
        "raised",
    )
    assert line["traceback"] == '  File "p.py", line 3, in rank\nValueError: no'
    assert not {"snapshot", "dump"} & set(line)


def test_what_was_cut_at_the_drains_limit_is_a_warning(log: EventLog) -> None:
    with capture_logs() as lines:
        log.add("drain", "the limit of 5 s passed: 3 sequences were ended", left=3)
        log.add("drain", "drained")
        log.add("error", "the engine cannot start", code="x")
    assert [(line["log_level"], line.get("left")) for line in lines] == [
        ("warning", 3),
        ("info", None),
        ("error", None),
    ]
