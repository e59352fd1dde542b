"""Latency, capacity, policies, header, banner, events: what they say, and that every line has its width."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.control.schema import Event, Hello, Quantiles, QuarantineEntry
from kvyard_tui.glyphs import ASCII, UNICODE
from kvyard_tui.model import Notice, Shown, Yard
from kvyard_tui.spans import Line, plain, width_of
from kvyard_tui.views.capacity import brief_lines, capacity
from kvyard_tui.views.events import describe, events_panel, is_receipt, tone_of
from kvyard_tui.views.header import badge, banner, header, message, state
from kvyard_tui.views.latency import latency
from kvyard_tui.views.layout import mode, too_small
from kvyard_tui.views.policies import overrides, policies, totals
from kvyard_tui.views.requests import requests_heading

from tests.tui.yard import quarantined, status

VIEWS: list[Callable[[Shown, int], list[Line]]] = [
    header, banner, message, latency, capacity, brief_lines, policies, totals, events_panel, requests_heading,
]  # fmt: skip


def known(now: float = 0.0, **changes: object) -> Shown:
    yard = Yard()
    yard.connected(Hello(1, "0.1.0", "admin", 1))
    yard.saw_status(status(), 0.0)
    return Shown(yard, now, **changes)  # type: ignore[arg-type]  # fields of Shown


def texts(lines: list[Line]) -> str:
    return "\n".join(plain(line) for line in lines)


@given(st.sampled_from(VIEWS), st.integers(1, 220), st.sampled_from([UNICODE, ASCII]), st.booleans())
def test_every_line_of_every_view_has_its_width(
    view: Callable[[Shown, int], list[Line]], width: int, glyphs: object, empty: bool
) -> None:
    shown = Shown(Yard(), 0.0, glyphs=glyphs) if empty else known(glyphs=glyphs)  # type: ignore[arg-type]
    if not empty:
        shown.yard.saw_event(Event("events", 1.0, {"kind": "swap", "message": "a long text " * 20}))
        assert shown.yard.status is not None
        shown.yard.status.quarantine = [quarantined()]
        shown.yard.status.errors = {"timeout": 3}
    for line in view(shown, width):
        assert width_of(line) == width, plain(line)


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_known_makes_up_no_number(view: Callable[[Shown, int], list[Line]]) -> None:
    drawn = texts(view(Shown(Yard(), 0.0, socket="s"), 60))
    assert not re.search(r"\d", re.sub(r"p50|p95|p99|E2E|1 min", "", drawn))


def test_ascii_screens_are_ascii_but_for_micro() -> None:
    for view in VIEWS:
        assert texts(view(known(glyphs=ASCII), 80)).replace("µ", "u").replace("…", "~").isascii()


# ---- latency and capacity --------------------------------------------------------------------------------------


def test_latencies_are_apart_and_p99_needs_room() -> None:
    narrow, wide = texts(latency(known(), 39)), texts(latency(known(), 60))
    assert "p99" not in narrow and "p99" in wide
    assert [line.split()[0] for line in narrow.splitlines()[1:5]] == ["Queue", "TTFT", "ITL", "E2E"]
    assert "2.00 s" in wide


def test_a_latency_without_a_request_shows_no_zero() -> None:
    shown = known()
    assert shown.yard.status is not None
    shown.yard.status.latency.ttft = Quantiles(None, None, None, 0)
    assert plain(latency(shown, 39)[2]).split() == ["TTFT", "-", "-", "0"]


def test_the_kv_bar_is_used_cached_free_in_this_order() -> None:
    bar = plain(capacity(known(), 40)[1])
    assert bar == "█" * 24 + "▒" * 8 + "·" * 8


def test_a_full_pool_reads_full() -> None:
    shown = known()
    assert shown.yard.status is not None
    kv = shown.yard.status.kv
    kv.used, kv.cached, kv.free = kv.total, 0, 0
    lines = capacity(shown, 40)
    assert plain(lines[1]) == "█" * 40
    assert "used 100%" in plain(lines[2]) and "free 0%" in plain(lines[2])


def test_the_small_screen_has_the_same_numbers() -> None:
    text = texts(brief_lines(known(), 80))
    assert "queue 4.0 ms/1.25 s" in text and "TTFT 85 ms/1.31 s" in text and "60% KV" in text and "340 tok/s" in text


# ---- policies --------------------------------------------------------------------------------------------------


def test_policies_show_cost_overrides_and_parameters() -> None:
    shown = known()
    assert shown.yard.status is not None
    shown.yard.status.policies[0].overrides = {"cannot-fit": 2, "unknown-id": 40}
    lines = policies(shown, 110)
    assert "vllm-aging, generation 3" in plain(lines[0])
    assert "unknown-id 40, cannot-fit 2  rate=0.1" in plain(lines[1])
    assert plain(lines[1]).split()[-5:] == ["2", "µs", "9", "µs", "42"]


def test_a_single_swapped_part_makes_it_mixed() -> None:
    shown = known()
    assert shown.yard.status is not None
    shown.yard.status.discipline = None
    assert "mixed, generation 3" in plain(policies(shown, 80)[0])


def test_quarantine_tells_how_long_and_why() -> None:
    shown = known(wall=1000.0)
    assert shown.yard.status is not None
    shown.yard.status.quarantine = [
        QuarantineEntry("admission/x", "raised", "ValueError", 1042.0, 1),
        QuarantineEntry("prefill/y", "hung", "no step for 9 s", None, 3),
    ]
    first, second = (plain(line) for line in policies(shown, 100)[-2:])
    assert "quarantined for 42.0 s: admission/x raised ValueError" in first
    assert "quarantined until released, 3 times: prefill/y hung" in second


def test_causes_are_ordered_by_how_often() -> None:
    assert overrides({"b": 1, "a": 1, "c": 2000}) == "c 2,000, a 1, b 1"


def test_totals_fit_80_columns() -> None:
    assert "restarts 0" in plain(totals(known(), 80)[0])


# ---- header and banner -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "field", "value", "word"),
    [
        ("status", "paused", True, "■ paused"),
        ("status", "draining", True, "▼ draining"),
        ("status", "ready", False, "◐ not ready"),
        ("engine", "state", "failed", "✖ engine failed"),
        ("engine", "state", "recovering", "◐ engine recovering"),
        ("engine", "state", "starting", "◐ engine starting"),
        ("engine", "last_step_age_s", 61.0, "▲ no step for 1m01s"),
    ],
)
def test_state(where: str, field: str, value: object, word: str) -> None:
    shown = known()
    status_ = shown.yard.status
    assert status_ is not None
    setattr(status_ if where == "status" else status_.engine, field, value)
    assert state(shown)[0] == word


def test_an_idle_engine_is_not_stuck() -> None:
    shown = known()
    assert shown.yard.status is not None
    shown.yard.status.engine.last_step_age_s = 900.0
    shown.yard.status.requests.running = 0
    assert state(shown)[0] == "● ready"


def test_state_without_a_connection() -> None:
    assert state(Shown(Yard(), 0.0))[0] == "◐ connecting"
    shown = known()
    shown.yard.lost("gone", 5.0)
    assert state(shown) == ("✖ no connection", "bad")


def test_badge() -> None:
    assert badge(known())[0] == "read-only"
    assert badge(known(writable=True)) == (" CHANGES ALLOWED ", "alarm")


def test_no_banner_while_all_is_well() -> None:
    assert banner(known(1.0), 80) == []


def test_banner_without_a_connection() -> None:
    shown = known(20.0)
    shown.yard.lost("no daemon answers at /s", 22.0)
    assert texts(banner(shown, 80)).strip() == "▲ DATA 20s OLD, next try in 2s: no daemon answers at /s"
    assert "NO DATA YET" in texts(banner(Shown(Yard(phase="lost", problem="x"), 0.0), 80))


def test_banner_of_a_silent_daemon_and_of_a_frozen_screen() -> None:
    assert "DATA 9s OLD" in texts(banner(known(9.0), 80))
    assert "FROZEN 8s ago" in texts(banner(known(9.0, frozen_at=1.0), 80))


def test_banner_gives_the_engine_s_reason() -> None:
    shown = known()
    assert shown.yard.status is not None
    shown.yard.status.engine.reason = "loading\x1b[2J weights"
    assert texts(banner(shown, 80)).strip() == "▲ loading weights"


def test_the_message_line_answers_first_and_tells_news_otherwise() -> None:
    shown = known(5.0)
    shown.yard.saw_event(Event("events", 1.0, {"kind": "restart", "message": "engine died"}))
    shown.yard.saw_event(
        Event("events", 2.0, {"kind": "control", "message": "root called pause: ok", "outcome": "ok"})
    )
    assert "restart engine died" in texts(message(shown, 80))
    answered = Shown(shown.yard, 5.0, notice=Notice("Paused", "good", 4.0))
    assert texts(message(answered, 80)).strip() == "Paused"


# ---- events and layout -----------------------------------------------------------------------------------------


def test_an_event_tells_its_facts_once_and_no_traceback() -> None:
    event = Event(
        "events",
        1.0,
        {
            "number": 4, "kind": "ejected", "message": "admission/x was put out (raised)", "policy": "admission/x",
            "code": "raised", "step": 77, "traceback": "Traceback\n  ...", "snapshot": {"free": 3}, "until": 1e9,
        },
    )  # fmt: skip
    assert describe(event) == ("ejected", "admission/x was put out (raised)  step=77")


@pytest.mark.parametrize(
    ("kind", "tone"), [("ejected", "bad"), ("restart", "bad"), ("drain", "warn"), ("swap", "accent")]
)
def test_event_tones(kind: str, tone: str) -> None:
    assert tone_of(kind) == tone


def test_receipts_are_known() -> None:
    assert is_receipt(Event("events", 0.0, {"kind": "control", "outcome": "ok"}))
    assert not is_receipt(Event("events", 0.0, {"kind": "control", "outcome": "forbidden"}))


def test_events_come_newest_first_and_wrap() -> None:
    shown = known()
    for number in range(3):
        shown.yard.saw_event(
            Event("events", float(number), {"kind": "swap", "message": f"number{number} " + "word " * 20})
        )
    lines = [plain(line) for line in events_panel(shown, 46)]
    assert "number2" in lines[1] and "word" in lines[2] and "number1" in lines[3]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((1, 1), "tiny"), ((39, 40), "tiny"), ((200, 9), "tiny"), ((40, 10), "compact"), ((79, 50), "compact"),
        ((200, 21), "compact"), ((80, 24), "normal"), ((159, 60), "normal"), ((160, 24), "wide"), ((200, 60), "wide"),
    ],
)  # fmt: skip
def test_mode(size: tuple[int, int], wanted: str) -> None:
    assert mode(*size) == wanted


def test_too_small_says_what_is_needed() -> None:
    assert texts(too_small(12, 3)).split() == ["too", "small", "12x3", "needs", "40x10"]
    assert len(too_small(1, 1)) == 1
