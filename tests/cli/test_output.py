"""How numbers, names and tables are written."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.cli.main import main
from kvyard.cli.operate import _say_event
from kvyard.cli.outline import outline, part_lines, shown_lines
from kvyard.cli.output import clean, count, duration, readable, size, table
from kvyard.cli.screen import request_lines, state, status_lines
from kvyard.control.schema import Event, RequestPage

from tests.control.desk import rows, status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 us"),
        (0.0000045, "4.5 us"),
        (0.00085, "850 us"),
        (0.0123, "12.3 ms"),
        (4.561, "4.56 s"),
        (61, "1 m 1 s"),
        (3725, "1 h 2 m"),
        (200_000, "2 d 7 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (98_362_432, "93.8 MiB"), (2**50, "1024.0 TiB")],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (1234567, "1,234,567"), (0.1234, "0.123"), (1234.5, "1,234")])
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@given(st.text(), st.integers(2, 20))
def test_clean_lets_no_control_sign_through(text: str, width: int) -> None:
    found = clean(text, width)
    assert len(found) <= max(width, 0)
    assert all(unicodedata.category(sign)[0] != "C" for sign in found)
    assert clean(text) == found or len(text) > width


def test_clean_keeps_what_can_be_read() -> None:
    assert clean("naïve 日本語 ✓") == "naïve 日本語 ✓"
    assert clean("a\x1b[2Jb\u202ec\n") == "a?[2Jb?c?"


@given(st.text())
def test_a_models_text_keeps_lines_and_nothing_that_steers(text: str) -> None:
    found = readable(text)
    assert len(found) == len(text) and found.count("\n") == text.count("\n")
    assert all(sign in "\n\t" or unicodedata.category(sign)[0] != "C" for sign in found)


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=6))
def test_tables_are_aligned(cells: list[tuple[str, str]]) -> None:
    lines = table(("FIRST", "SECOND"), cells)
    assert len(lines) == len(cells) + 1
    start = lines[0].index("SECOND")
    for line, (_, second) in zip(lines[1:], cells, strict=True):
        assert line[start:].rstrip() == clean(second).rstrip()


def test_the_status_fits_a_terminal() -> None:
    lines = status_lines(status())
    assert len(lines) < 30
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("changes", "engine", "word"),
    [
        ({}, "ready", "ready"),
        ({"paused": True, "ready": False}, "ready", "paused"),
        ({"paused": True, "ready": False}, "recovering", "recovering"),
        ({"draining": True, "paused": True, "ready": False}, "ready", "draining"),
        ({"ready": False}, "recovering", "recovering"),
        ({"ready": False}, "ready", "not ready"),
    ],
)
def test_the_state_in_a_word(changes: dict[str, bool], engine: str, word: str) -> None:
    s = status()
    s.engine.state = engine
    for name, value in changes.items():
        setattr(s, name, value)
    assert state(s) == word


def test_a_daemon_without_an_engine_is_drawn_too() -> None:
    s = status()
    s.kv.total = s.kv.used = s.kv.cached = s.kv.free = 0
    s.engine.pid = None
    s.engine.last_step_age_s = None
    s.policies = []
    s.quarantine = []
    s.errors = {}
    text = "\n".join(status_lines(s))
    assert "pid -" in text and "[" + " " * 30 + "]" in text


def test_changed_parameters_mark_the_discipline_and_do_not_rename_it() -> None:
    s = status()
    s.changed = {"admission.aging": 3.0, "prefill.chunk": 64}
    assert "discipline kvyard (changed: admission.aging, prefill.chunk), generation 3" in "\n".join(status_lines(s))
    s.discipline = None
    assert "discipline mixed, generation 3" in "\n".join(status_lines(s))


def test_the_daemons_own_process_is_shown() -> None:
    s = status()
    s.pid = 77
    assert status_lines(s)[0].endswith("up 1 h 2 m  pid 77")


def test_requests_are_cut_and_the_rest_is_counted() -> None:
    lines = request_lines(RequestPage(2000, rows(50)), 10)
    assert len(lines) == 12 and lines[-1] == "... and 1990 more"
    assert all("x" * 30 not in line for line in lines), "long names are cut"


def test_nothing_is_cut_for_what_is_piped_on() -> None:
    page = RequestPage(3, rows(3))
    lines = request_lines(page, 10, whole=True)
    assert all(row.request_id in line for row, line in zip(page.rows, lines[1:], strict=True))


def test_an_outline_of_nested_answers() -> None:
    assert outline({"a": {"b": [1, {"c": None, "d": True}]}, "e": [], "f": "x\x1b"}) == [
        "a:", "  b:", "    - 1", "    - c: -", "      d: true", "e: -", "f: x?",
    ]  # fmt: skip


def test_a_policys_parameters_as_a_table() -> None:
    param = {
        "name": "rate", "type": "number", "value": 0.5, "default": 1.0, "change": "live", "ge": 0, "le": 10,
        "choices": None, "unit": "levels per second", "doc": "How fast.",
    }  # fmt: skip
    choice = {**param, "name": "order", "ge": None, "le": None, "choices": ["a", "b"], "unit": "", "doc": ""}
    free = {**choice, "name": "free", "choices": None}
    part = {"kind": "admission", "name": "aging", "version": "1", "distribution": "kvyard", "api": "1.0",
            "doc": "First.\n  Second.", "params": [param, choice, free], "extra": {"x": 1}}  # fmt: skip
    lines = part_lines(part)
    assert lines[:3] == ["admission aging 1  (kvyard, API 1.0)", "  First.", "  Second."]
    text = "\n".join(lines)
    for words in ("0..10", "a | b", "How fast. (levels per second)", "number", "extra:"):
        assert words in text


def test_all_in_charge_then_the_rest() -> None:
    lines = shown_lines({"policies": [{"kind": "prefill", "name": "vllm", "params": []}], "generation": 3})
    assert lines[0].startswith("prefill vllm") and lines[-1] == "generation: 3"


def test_a_discipline_is_its_parts_and_their_parameters() -> None:
    order = {"name": "order", "type": "text", "value": "fcfs", "default": "fcfs", "change": "live", "doc": "Of what."}
    parts = {
        "admission": {"name": "vllm", "params": {"watermark": 0.01}, "parameters": [order]},
        "preemption": {"name": "plain", "params": {}, "parameters": []},
        "prefill": {"name": "gone", "params": {"chunk": 5}, "problem": "it is not installed"},
    }
    shown = {"kind": "discipline", "name": "mine", "distribution": "me", "doc": "Mine.", "parts": parts}
    lines = shown_lines({**shown, "in_charge": False})
    assert lines[:5] == ["discipline mine  (me)", "  not in charge", "  Mine.", "", "  admission vllm"]
    assert lines[5].split()[:3] == ["PARAMETER", "VALUE", "DEFAULT"]
    assert lines[6].split() == ["order", "fcfs", "fcfs", "text", "live", "Of", "what."]
    assert lines[7:] == [
        "", "  preemption plain", "    no parameters",
        "", "  prefill gone", "    chunk=5", "    ! it is not installed",
    ]  # fmt: skip
    assert shown_lines({**shown, "in_charge": True})[1] == "  in charge"


@pytest.mark.parametrize(
    ("words", "command", "says"),
    [
        ("status --nope --json", "kvyard status", "--nope"),
        ("policy swap --json", "kvyard policy swap", "KIND"),
        ("nope --json", "kvyard", "nope"),
        ("top --interval x --json", "kvyard top", "--interval"),
    ],
)
def test_a_wrong_command_line_is_json_where_json_was_asked(
    words: str, command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    told = capsys.readouterr()
    error = json.loads(told.err)["error"]
    assert (error["code"], told.out) == ("usage", "")
    assert says in error["message"]
    assert error["hint"] == f"`{command} --help` shows how it is used"


def test_config_show_asks_the_daemon_whose_socket_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--socket", str(tmp_path / "none"), "--json"]) == 7
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "not-running"
    assert main(["config", "show", "--socket", "x", "--config", "y"]) == 2


def test_the_policies_numbers_are_of_those_in_charge_and_who_was_put_out_is_named() -> None:
    s = status()
    s.policies[0].name, s.policies[0].ejections, s.policies[0].ejected = "builtin", 0, {"aging": 2, "fair": 1}
    table = status_lines(s)[next(i for i, text in enumerate(status_lines(s)) if text.startswith("discipline")) :]
    assert table[0].endswith("; each policy's numbers since it took charge")
    assert table[1].endswith("PUT OUT SINCE START") and "EJECTIONS" not in table[1]
    assert table[2].endswith("aging 2x, fair 1x")


@pytest.mark.parametrize(
    ("engine", "changes", "reason", "said"),
    [
        ("ready", {}, "", "ready  http"),
        ("ready", {"paused": True}, "paused: an operator stopped it", "paused (an operator stopped it)  http"),
        ("draining", {"draining": True}, "draining: what runs is finished", "draining (what runs is finished)  http"),
        ("starting", {}, "the engine is starting", "starting  http"),
        ("recovering", {}, "the engine restarts", "recovering (the engine restarts)  http"),
        (
            "ready",
            {},
            "the engine has been in one step for 25 s",
            "not ready (the engine has been in one step for 25 s)",
        ),
    ],
)
def test_the_headline_says_it_once(engine: str, changes: dict[str, bool], reason: str, said: str) -> None:
    s = status()
    s.engine.state, s.engine.reason, s.ready = engine, reason, not reason
    for name, value in changes.items():
        setattr(s, name, value)
    assert f"kvyard 9.9.9  {said}" in status_lines(s)[0]


def test_an_engine_that_does_not_move_is_told_before_the_daemon_is_not_ready() -> None:
    s = status()
    s.engine.last_step_age_s = 11.0
    assert "  ready (no step for 11 s)  " in status_lines(s)[0]
    s.requests.running = 0
    assert "  ready  " in status_lines(s)[0], "nothing runs"


def test_an_engine_that_starts_has_no_age_and_no_step() -> None:
    s = status()
    s.engine.state, s.engine.uptime_s, s.engine.step, s.engine.last_step_age_s = "starting", 0.0, 0, None
    assert status_lines(s)[2] == "engine   starting  pid 4242  restarts 1"


def test_an_ejection_points_to_its_exit_record(capsys: pytest.CaptureFixture[str]) -> None:
    _say_event(Event("events", 0.0, {"kind": "ejected", "message": "a/b was put out", "traceback": "x"}), json=False)
    _say_event(Event("events", 0.0, {"kind": "swap", "message": "a b is in charge"}), json=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("a/b was put out; its exit record: `kvyard events --json`")
    assert second.endswith("a b is in charge")
